"""Writing files so that they are on the disk before anything depends on them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot flush a folder
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file atomically: its name never refers to a partial file.

    Args:
        path: The file, which need not exist.

    Yields:
        The path to write to in the block; it replaces the file afterwards, and is deleted after an error.
    """
    # In the same folder, as a rename is atomic only within a file system. The name is unique to this save.
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield draft
        flush(draft)  # before the rename, which some file systems write before the content
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
