"""Files that are on the disk before anything depends on them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows has no handles on folders to flush
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file so that its name never stands for half of it.

    Args:
        path: The file, which need not be there.

    Yields:
        Where to write in the block; it takes the file's place afterwards, and is deleted after an error.
    """
    # In the same folder, as a rename is one step within a file system alone. No other save has its name.
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield draft
        flush(draft)  # before the rename, which some file systems put on the disk before the content
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
