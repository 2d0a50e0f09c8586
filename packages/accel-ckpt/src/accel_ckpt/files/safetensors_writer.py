"""Writing the safetensors format into an open file, tensor by tensor.

The format (https://github.com/huggingface/safetensors#format): the length of the header as 8 bytes, little
endian; the header, JSON padded with spaces; the tensors' bytes, one after the other. The library's
`save_file` writes the same except for the order of the metadata, which differs from call to call; here equal
states give equal files, and are not copied in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import IO, Any

import torch

from accel_ops.collectives.pack_sections import as_bytes

_NAMES = {  # in the order of the library
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}

DTYPES = {getattr(torch, name): code for name, code in _NAMES.items()}
"""The format's names of the supported dtypes."""


def dump(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], file: IO[bytes]) -> None:
    """Write tensors as safetensors.

    Args:
        tensors: Tensors of a dtype in `DTYPES`, by name.
        metadata: Strings to store with them.
        file: The file to write to.
    """
    described = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    header, begins = make_header(described, metadata)
    file.write(header)
    for name in begins:
        if tensors[name].numel():
            # One tensor at a time is copied to the CPU, never the full model.
            content: Any = as_bytes(tensors[name].detach().cpu()).numpy()
            file.write(content)


def make_header(
    described: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Make the header of such a file.

    Args:
        described: Dtype and shape of each tensor, by name.
        metadata: Strings to store with them.

    Returns:
        (header, begins): the bytes before the tensors, and the offset of each tensor in the file.
    """
    # Large elements first, so that every tensor is aligned.
    order = list(DTYPES)
    names = sorted(described, key=lambda name: (-order.index(described[name][0]), name))
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in names:
        dtype, shape = described[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": [*shape], "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # Padded to 8 bytes, so that the tensors after it are aligned for every dtype.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + entries[name]["data_offsets"][0] for name in names}
