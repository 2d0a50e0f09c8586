"""Tensors that are read where they lie in a file: mapped into memory, and brought in when they are used."""

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

# Mapping takes longer than reading this many bytes that the system has in its cache.
_READ_AT_ONCE = 16 << 10

# Whether a file that is open has a name of its own, under which it can be opened again.
_KEPT_OPEN = sys.platform == "linux"

# (names of tensors with their place, where these begin)
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
        A tensor on the CPU whose pages are read when they are used; a small one is read at once. What is
        written to it is its own, and never reaches the file.

    Raises:
        CorruptCheckpointError: If the file ends before the tensor, or is no regular file.
    """
    size = math.prod(shape) * dtype.itemsize
    found = regular_size(path)
    if begin + size > found:
        raise CorruptCheckpointError(
            f"{path} has {found} bytes and is cut off: a weight of it, {shape} of {dtype}, ends at byte "
            f"{begin + size}. Copy it anew."
        )
    if not size:
        return torch.empty(shape, dtype=dtype)
    if size <= _READ_AT_ONCE:
        with open(path, "rb", buffering=0) as file:
            file.seek(begin)
            content = bytearray(size)
            if file.readinto(content) != size:
                raise CorruptCheckpointError(f"{path} became shorter while a weight was read. Copy it anew.")
        return torch.frombuffer(content, dtype=dtype).reshape(shape)
    start = begin - begin % mmap.ALLOCATIONGRANULARITY
    with open(path, "rb") as file:
        # Of this tensor alone, so that its memory is free again when the tensor is.
        pages = mmap.mmap(file.fileno(), begin - start + size, offset=start, access=mmap.ACCESS_COPY)
    mapped = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=begin - start)
    if begin % dtype.itemsize:  # the format allows that, and torch wants elements where they are aligned
        mapped = mapped.clone()
    return mapped.view(dtype).reshape(shape)


def converted(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in a dtype, for a short time: its memory goes back to the system when it is freed.

    Args:
        value: A tensor on the CPU.
        dtype: The dtype.

    Returns:
        A contiguous tensor without a gradient; `value`'s own memory if it has the dtype already.
    """
    value = value.detach()
    if value.dtype == dtype or not value.numel():
        return value.to(dtype)
    # Not from the heap: torch asks for aligned memory, and glibc (seen in 2.36) then takes new memory for
    # each weight below 32 MB, since small objects beside it keep the freed block from being used again.
    pages = mmap.mmap(-1, value.numel() * dtype.itemsize, access=mmap.ACCESS_COPY)
    return torch.frombuffer(pages, dtype=dtype).reshape(value.shape).copy_(value)


def read_pages(tensor: torch.Tensor) -> None:
    """Bring the pages of a mapped tensor into memory, by looking at a byte of each.

    Args:
        tensor: A contiguous tensor on the CPU.
    """
    content = tensor.detach().reshape(-1).view(torch.uint8)
    # One byte a page makes the system read all of it; the sum itself is thrown away.
    content[:: mmap.PAGESIZE].sum(dtype=torch.int64)


class SafetensorsFiles:
    """Safetensors files whose weights are read in place; each file has to stay as it was at first.

    On Linux they are kept open: a file that another one replaces, or that is deleted, is read as before.
    """

    def __init__(self) -> None:
        self._headers: dict[str, _Header] = {}
        self._files: dict[str, _Opened] = {}

    def note(self, paths: Iterable[str]) -> None:
        """Open files, and remember them as they are now, before a weight of them is read.

        Args:
            paths: The files, as entries name them; one that is not there is named when it is read.
        """
        for path in paths:
            with suppress(OSError, CorruptCheckpointError):
                self._file(path)

    def _file(self, path: str) -> _Opened:
        return self._files.get(path) or self._files.setdefault(path, _Opened(path))

    def load(self, name: str, entry: Mapping[str, Any]) -> torch.Tensor:
        """Map a weight into memory.

        Args:
            name: The weight, for messages, and in the file if the entry has no other name.
            entry: `safetensors_file`, and if wanted `weight_name` (in the file) and `dtype` (of the result).

        Raises:
            CorruptCheckpointError: If the file is damaged, or no regular file, or lacks the weight, or has
                been written into since it was noted or first read, or replaced where it is not kept open.
            FileNotFoundError: If it is gone, where it is not kept open.
        """
        path, inside = str(entry["safetensors_file"]), str(entry.get("weight_name", name))
        file = self._checked(path, name)
        entries, begin = self._header(file, name)
        try:
            place = entries[inside]
            dtype, shape, first = (
                _DTYPE_OF[place["dtype"]],
                list(place["shape"]),
                int(place["data_offsets"][0]),
            )
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise CorruptCheckpointError(
                f"{path} does not have {inside!r} (weight {name}) as a tensor. Load the model's weights anew."
            ) from error
        value = file.map(begin + first, shape, dtype)
        # An unknown or missing dtype means the file's own.
        wanted = getattr(torch, str(entry.get("dtype", "")).removeprefix("torch."), dtype)
        return converted(value, wanted)

    def _checked(self, path: str, name: str) -> _Opened:
        try:
            file = self._file(path)
            same = file.is_as_before()
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{path}, where the weight {name} is read in place, is gone. Keep the checkpoint while "
                "the model is in use."
            ) from error
        # Weights of a checkpoint that was saved meanwhile would be mixed with those that were read before.
        if not same:
            raise CorruptCheckpointError(
                f"{path}, where the weight {name} is read in place, has changed since the model was loaded. "
                "Build and load the model anew, and keep the checkpoint as it is while a model uses it."
            )
        return file

    def _header(self, file: _Opened, name: str) -> _Header:
        known = self._headers.get(file.path)
        if known is None:
            try:
                entries, _, begin = read_header(Path(file.place))
            except ValueError as error:
                raise CorruptCheckpointError(f"weight {name}: {file.named(error)} Copy it anew.") from error
            self._headers[file.path] = known = entries, begin
        return known


class _Opened:
    """A file that is read piece by piece, and where Linux can, kept open for that.

    Args:
        path: The file.
        version: What it was like before, for one that is opened anew.

    Attributes:
        place: Where it is opened: by its name, or as the file that is open, whatever has its name now.
    """

    def __init__(self, path: str, version: tuple[int, int] | None = None) -> None:
        self.path = self.place = path
        self._number: int | None = None
        if version is None:
            regular_file(path)  # opening a pipe would wait for ever
        # Not enough numbers of open files; or gone, which is an error when it is read.
        with suppress(OSError):
            if _KEPT_OPEN:
                self._number = os.open(path, os.O_RDONLY)
                self.place = f"/proc/self/fd/{self._number}"
        self._version = version or self._now()

    def _now(self) -> tuple[int, int]:
        return _version(regular_file(self.path).stat() if self._number is None else os.fstat(self._number))

    def is_as_before(self) -> bool:
        return self._now() == self._version

    def map(self, begin: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        try:
            return map_tensor(self.place, begin, shape, dtype)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(self.named(error)) from error

    def named(self, error: Exception) -> str:
        """Return the text of an error with the name that users know."""
        return str(error).replace(self.place, self.path)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Opened:
        return self  # nothing of it changes

    def __reduce__(self) -> tuple[Any, ...]:
        return _Opened, (self.path, self._version)

    def __del__(self) -> None:
        if self._number is not None:
            os.close(self._number)


def _version(status: os.stat_result) -> tuple[int, int]:
    """Time and size, which change when a file is replaced or written to; mounts may change its number."""
    return status.st_mtime_ns, status.st_size
