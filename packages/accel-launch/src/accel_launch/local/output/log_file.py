"""A log file whose errors never end the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


class Log:
    """A copy of one stream in a file.

    Args:
        path: The file, which is created.
        failed: Called with the error when the file cannot be written (a full disk); nothing is written
            afterwards.
    """

    def __init__(self, path: Path, failed: Callable[[OSError], None]) -> None:
        # Unbuffered: what a worker wrote before a crash of the launcher is in the file.
        self._file: BinaryIO | None = path.open("wb", buffering=0)
        self._failed = failed

    def write(self, data: bytes) -> None:
        """Add to the file.

        Args:
            data: What to add.
        """
        if self._file is None:
            return
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._failed(error)
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as error:  # a quota or a server may report only now that the disk is full
            self._failed(error)
