"""Copies of objects in memory, from which later the same bytes are written as now."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import IO, Any

import torch

from accel_ckpt.background.buffers import Memory
from accel_ckpt.files.tensors import split_tied, write_safe


class _Records:
    """Takes what torch.save writes into its archive, in place of the archive's writer."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.records: list[tuple[str, Any, int]] = []

    # The signature of PyTorchFileWriter.write_record, the one method of it that torch.serialization._save
    # calls here; `write_record_metadata` is only called under torch.serialization.skip_data.
    def write_record(self, name: str, data: Any, size: int) -> None:
        if isinstance(data, torch.UntypedStorage):
            data = self._memory.copy_storage(data).untyped_storage()
        # Anything else is bytes or text already: the pickle, the format version, the byte order.
        self.records.append((name, data, size))


def freeze(obj: Any, safe_serialization: bool, memory: Memory) -> Callable[[IO[bytes]], None]:
    """Copy an object, so that it can be written when it has changed.

    Args:
        obj: What to write; for safetensors a dict of tensors.
        safe_serialization: Whether to write safetensors.
        memory: Where the copy of its tensors goes; `memory.finish` must be called before it is used.

    Returns:
        What writes the copy into an open file, as often as it is called.

    Raises:
        ValueError: If safetensors cannot hold the object; it names the entry.
    """
    if safe_serialization:
        tensors, tied = split_tied(obj)
        # The header depends on names, dtypes and shapes alone, so it can be made when the file is written.
        copies = {name: memory.copy(tensor) for name, tensor in tensors.items()}
        memory.copy_waiting()
        return partial(write_safe, copies, tied)
    # The pickle is made now, so that plain values are those of this moment; only writing it is put off.
    frozen = _Records(memory)
    # torch.save is these two steps, so that what is written later is what it would write now.
    # 2 is torch's DEFAULT_PROTOCOL, and False writes the byte order, as torch.save does by default.
    torch.serialization._save(obj, frozen, pickle, 2, False)  # type: ignore[no-untyped-call]
    memory.copy_waiting()

    def write(file: IO[bytes]) -> None:
        with torch.serialization._open_zipfile_writer(file) as archive:
            for record in frozen.records:
                archive.write_record(*record)

    return write
