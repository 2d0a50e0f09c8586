"""The header of a safetensors file: the offset of each tensor. Nothing else of the file is read.

The format: eight bytes with the length of the header (little-endian), the header as JSON, the tensors. The
header has `dtype`, `shape` and `data_offsets` by name, counted from its end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000
"""The longest header that safetensors accepts."""

_NAMED = 8  # weights that are named for a damaged range


def shortened(names: Sequence[str]) -> str:
    """Return the first of many names, and the number of the rest."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str], int]:
    """Read the header of a file.

    Args:
        path: A file, safetensors or not.

    Returns:
        (tensors, metadata, begin): `dtype`, `shape` and `data_offsets` by name, the free-form metadata, and
        the offset of the tensors.

    Raises:
        ValueError: If it has no such header.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        # 2 is the length of "{}"; without the limit, eight random bytes could make it read gigabytes.
        if not 2 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file: its header would have {size} bytes.")
        # It may be shorter than `size`; truncated JSON does not parse, so this needs no check.
        raw = file.read(size)
    try:
        entries = json.loads(raw)
    except ValueError as error:
        raise ValueError(
            f"{path} is not a safetensors file: its header is not valid JSON ({error})."
        ) from error
    if not isinstance(entries, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is not a JSON object.")
    metadata = entries.pop("__metadata__", {})
    return entries, metadata, 8 + size


def tensors_between(path: Path, first: int, last: int) -> list[str]:
    """Return the names of the tensors in a byte range of a file.

    Args:
        path: A file.
        first: The first byte of the range.
        last: Its last byte.

    Returns:
        Their names, in the order of the file; empty for a file of another format.
    """
    if path.suffix != ".safetensors":
        return []
    entries, _, begin = read_header(path)
    spans = sorted(
        (begin + e["data_offsets"][0], begin + e["data_offsets"][1], name) for name, e in entries.items()
    )
    # `end` is one past the tensor's last byte, `last` is in the range.
    return [name for start, end, name in spans if start <= last and end > first]
