"""Tensors that are memory-mapped from a file, and read when they are used."""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.files.digests import regular_file, regular_size
from accel_ckpt.files.safetensors_header import read_header
from accel_ckpt.files.safetensors_writer import DTYPES

_DTYPE_OF = {code: dtype for dtype, code in DTYPES.items()}

# Up to this size, reading from the page cache is faster than mapping.
_READ_AT_ONCE = 16 << 10

# Whether an open file has a path under which it can be opened again.
_KEPT_OPEN = sys.platform == "linux"

# (tensors by name, their offset in the file)
_Header = tuple[dict[str, dict[str, Any]], int]


def map_tensor(
    path: str | os.PathLike[str], begin: int, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """Map a tensor of a file into memory.

    Args:
        path: The file, which must not shrink while the tensor is in use.
        begin: Its first byte in the file.
        shape: Its shape.
        dtype: Its dtype.

    Returns:
        A tensor on the CPU whose pages are read when they are used; a small one is read at once. Writes to it
        never reach the file.

    Raises:
        CorruptCheckpointError: If the file ends before the tensor, or is not a regular file.
    """
    size = math.prod(shape) * dtype.itemsize
    file_size = regular_size(path)
    if begin + size > file_size:
        raise CorruptCheckpointError(
            f"{path} has {file_size} bytes and is cut off: one of its weights, {shape} of {dtype}, ends at "
            f"byte {begin + size}. Download or copy the file again."
        )
    if not size:
        return torch.empty(shape, dtype=dtype)
    if size <= _READ_AT_ONCE:
        with open(path, "rb", buffering=0) as file:
            file.seek(begin)
            content = bytearray(size)
            if file.readinto(content) != size:
                raise CorruptCheckpointError(
                    f"{path} became shorter while a weight was read. Download or copy the file again."
                )
        return torch.frombuffer(content, dtype=dtype).reshape(shape)
    start = begin - begin % mmap.ALLOCATIONGRANULARITY
    with open(path, "rb") as file:
        # Only this tensor, so that its memory is freed with it.
        pages = mmap.mmap(file.fileno(), begin - start + size, offset=start, access=mmap.ACCESS_COPY)
    mapped = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=begin - start)
    if begin % dtype.itemsize:  # the format allows it, but torch needs aligned elements
        mapped = mapped.clone()
    return mapped.view(dtype).reshape(shape)


def converted(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in a dtype, for short use: its memory returns to the system when it is freed.

    Args:
        value: A tensor on the CPU.
        dtype: The dtype.

    Returns:
        A contiguous tensor without a gradient; it shares memory with `value` if the dtype is the same.
    """
    value = value.detach()
    if value.dtype == dtype or not value.numel():
        return value.to(dtype)
    # Not from the heap: torch requests aligned memory, and glibc (seen in 2.36) then allocates new memory for
    # each weight below 32 MB, as small objects next to it prevent the reuse of the freed block.
    pages = mmap.mmap(-1, value.numel() * dtype.itemsize, access=mmap.ACCESS_COPY)
    return torch.frombuffer(pages, dtype=dtype).reshape(value.shape).copy_(value)


def read_pages(tensor: torch.Tensor) -> None:
    """Read the pages of a mapped tensor into memory, by touching a byte of each.

    Args:
        tensor: A contiguous tensor on the CPU.
    """
    content = tensor.detach().reshape(-1).view(torch.uint8)
    # One byte per page makes the system read the page; the sum is discarded.
    content[:: mmap.PAGESIZE].sum(dtype=torch.int64)


class SafetensorsFiles:
    """Safetensors files whose weights are read in place; the files must not change.

    On Linux they are kept open: a file that is replaced or deleted is still read.
    """

    def __init__(self) -> None:
        self._headers: dict[str, _Header] = {}
        self._files: dict[str, _Opened] = {}

    def open_all(self, paths: Iterable[str]) -> None:
        """Open files and record their version, before a weight is read.

        Args:
            paths: The files, as entries name them; a missing one is an error when it is read.
        """
        for path in paths:
            with suppress(OSError, CorruptCheckpointError):
                self._file(path)

    def _file(self, path: str) -> _Opened:
        return self._files.get(path) or self._files.setdefault(path, _Opened(path))

    def load(self, name: str, entry: Mapping[str, Any]) -> torch.Tensor:
        """Map a weight into memory.

        Args:
            name: The weight, for messages, and in the file unless the entry has another name.
            entry: `safetensors_file`, and optionally `weight_name` (in the file) and `dtype` (of the result).

        Raises:
            CorruptCheckpointError: If the file is damaged, or not a regular file, or lacks the weight, or was
                changed since it was opened or first read, or replaced where it is not kept open.
            FileNotFoundError: If it was deleted, where it is not kept open.
        """
        path, inside = str(entry["safetensors_file"]), str(entry.get("weight_name", name))
        file = self._checked(path, name)
        entries, begin = self._header(file, name)
        try:
            location = entries[inside]
            dtype, shape, first = (
                _DTYPE_OF[location["dtype"]],
                list(location["shape"]),
                int(location["data_offsets"][0]),
            )
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise CorruptCheckpointError(
                f"{path} does not have {inside!r} (weight {name}) as a tensor. Load the weights again."
            ) from error
        value = file.map(begin + first, shape, dtype)
        # Without a known dtype, that of the file.
        wanted = getattr(torch, str(entry.get("dtype", "")).removeprefix("torch."), dtype)
        return converted(value, wanted)

    def _checked(self, path: str, name: str) -> _Opened:
        try:
            file = self._file(path)
            unchanged = file.is_unchanged()
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{path}, where the weight {name} is read in place, is gone. Keep the checkpoint while "
                "the model is in use."
            ) from error
        # Otherwise weights of a newer checkpoint would be mixed with those read before.
        if not unchanged:
            raise CorruptCheckpointError(
                f"{path}, where the weight {name} is read in place, has changed since the model was "
                "loaded. Build and load the model again, and keep the checkpoint unchanged meanwhile."
            )
        return file

    def _header(self, file: _Opened, name: str) -> _Header:
        header = self._headers.get(file.path)
        if header is None:
            try:
                entries, _, begin = read_header(Path(file.open_path))
            except ValueError as error:
                raise CorruptCheckpointError(
                    f"weight {name}: {file.with_path(error)} Download or copy the file again."
                ) from error
            self._headers[file.path] = header = entries, begin
        return header


class _Opened:
    """A file that is read piece by piece, and kept open where possible (Linux).

    Args:
        path: The file.
        version: Its recorded version, if it is opened again.

    Attributes:
        open_path: The path to open: the file's, or that of the open file, whatever has the name now.
    """

    def __init__(self, path: str, version: tuple[int, int] | None = None) -> None:
        self.path = self.open_path = path
        self._descriptor: int | None = None
        if version is None:
            regular_file(path)  # opening a pipe could block forever
        # Too many open files; or deleted, which is an error when it is read.
        with suppress(OSError):
            if _KEPT_OPEN:
                self._descriptor = os.open(path, os.O_RDONLY)
                self.open_path = f"/proc/self/fd/{self._descriptor}"
        self._version = version or self._current_version()

    def _current_version(self) -> tuple[int, int]:
        return _version(
            regular_file(self.path).stat() if self._descriptor is None else os.fstat(self._descriptor)
        )

    def is_unchanged(self) -> bool:
        return self._current_version() == self._version

    def map(self, begin: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        try:
            return map_tensor(self.open_path, begin, shape, dtype)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(self.with_path(error)) from error

    def with_path(self, error: Exception) -> str:
        """Return the text of an error with the path that users know."""
        return str(error).replace(self.open_path, self.path)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Opened:
        return self  # immutable

    def __reduce__(self) -> tuple[Any, ...]:
        return _Opened, (self.path, self._version)

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def _version(status: os.stat_result) -> tuple[int, int]:
    """Return mtime and size, which change when a file is replaced or written; mounts may change the inode."""
    return status.st_mtime_ns, status.st_size
