"""Snapshots of objects in memory, which can be written later."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import IO, Any

import torch

from accel_ckpt.background.buffers import SnapshotBuffer
from accel_ckpt.files.tensors import split_tied, write_safe

_TYPED: Any = torch.storage.TypedStorage  # torch's annotations leave out its constructor
_STORAGES = (_TYPED, torch.UntypedStorage)


class _Records:
    """Receives the records that torch.save writes, instead of the archive's writer.

    torch.save gets copies of the storages: it would copy each storage of a device into new memory by itself,
    and wait for it.
    """

    def __init__(self, buffer: SnapshotBuffer) -> None:
        self._buffer = buffer
        self.records: list[tuple[str, Any, int]] = []
        # Copies by the address of the storage's C++ object. The storage is kept too, as the address of a
        # freed one may be reused.
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._dtypes: dict[int, torch.dtype] = {}  # by the address of the bytes
        self.pickler: Any = None  # the class that torch creates for this file

    def collect(self, obj: Any) -> None:
        """Pickle an object, and copy its storages."""
        # torch.save is this and the archive's writer, so the same bytes are written later as
        # now. 2 is torch's DEFAULT_PROTOCOL, and False writes the byte order, as torch.save does by default.
        token = _collecting.set(self)
        try:
            torch.serialization._save(obj, self, _PICKLE, 2, False)  # type: ignore[no-untyped-call]
        finally:
            _collecting.reset(token)
            self._copies.clear()
            if self.pickler is not None:
                # The garbage collector frees classes. After an error the method would keep the copies until
                # then.
                self.pickler.of_storage = self.pickler.persistent_id = None

    # The signature of PyTorchFileWriter.write_record, its only method that torch.serialization._save calls
    # here; `write_record_metadata` is only called under torch.serialization.skip_data.
    def write_record(self, name: str, data: Any, size: int) -> None:
        # A copy of a storage, bytes or text: the pickle, the format version, the byte order.
        self.records.append((name, data, size))

    def copied(self, storage: Any) -> Any:
        """Return the copy of a storage, of the same kind, which torch pickles like the storage."""
        typed = isinstance(storage, _TYPED)
        source = storage._untyped_storage if typed else storage
        dtype = storage.dtype if typed else torch.uint8
        # torch checks this by addresses, which differ for each copy.
        if source.data_ptr() and self._dtypes.setdefault(source.data_ptr(), dtype) != dtype:
            raise RuntimeError(
                "Cannot save tensors or storages that view the same data as different types: "
                f"{self._dtypes[source.data_ptr()]} and {dtype}. Save one of them, or a clone of the other."
            )
        if source._cdata not in self._copies:
            self._copies[source._cdata] = source, self._buffer.copy_storage(source).untyped_storage()
        copy: Any = self._copies[source._cdata][1]
        if typed:
            copy = _TYPED(wrap_storage=copy, dtype=storage.dtype, _internal=True)
        # torch's attribute for a storage on the CPU that is saved as one of another device.
        copy._fake_device = torch.serialization.location_tag(source)
        return copy


_collecting: ContextVar[_Records] = ContextVar("_collecting")


class _Pickler(pickle.Pickler):
    """The base of torch's pickler, a class that torch creates for each file."""

    of_storage: Any

    def __init_subclass__(cls) -> None:
        _collecting.get().pickler = cls
        # torch's method describes a storage, and keeps it for writing.
        cls.of_storage = cls.persistent_id
        cls.persistent_id = _Pickler.of_any  # type: ignore[method-assign, assignment]

    def of_any(self, obj: Any) -> Any:
        return self.of_storage(_collecting.get().copied(obj)) if isinstance(obj, _STORAGES) else None


_PICKLE = SimpleNamespace(Pickler=_Pickler)


def freeze(obj: Any, safe_serialization: bool, buffer: SnapshotBuffer) -> Callable[[IO[bytes]], None]:
    """Start to copy an object, so that it can be written after it has changed.

    Args:
        obj: The object to write; a dict of tensors for safetensors.
        safe_serialization: Whether to write safetensors.
        buffer: The memory for the copies of its tensors. The object must not change before
            `buffer.wait_for_cpu`, and `buffer.synchronize` must be called before the copy is used.

    Returns:
        A function that writes the copy into an open file, any number of times.

    Raises:
        ValueError: If safetensors cannot store the object; it names the entry.
    """
    if safe_serialization:
        tensors, tied = split_tied(obj)
        # The header depends only on names, dtypes and shapes, so it can be built when the file is written.
        copies = {name: buffer.copy(tensor) for name, tensor in tensors.items()}
        return partial(write_safe, copies, tied)
    # Pickled now, so that plain values are the current ones; only writing is deferred.
    frozen = _Records(buffer)
    frozen.collect(obj)

    def write(file: IO[bytes]) -> None:
        with torch.serialization._open_zipfile_writer(file) as archive:
            for record in frozen.records:
                archive.write_record(*record)

    return write
