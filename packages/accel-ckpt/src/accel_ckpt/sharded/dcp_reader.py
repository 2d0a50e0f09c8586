"""Folders of torch.distributed.checkpoint (DCP), read without running code.

DCP stores its index in `.metadata`, a pickle, and tensors in `.distcp` files, at locations in the index. Here
the pickle may only name the types of such an index, its paths must stay inside the folder, and non-tensors
are read with `weights_only`.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.files import tensors, values
from accel_ckpt.files.paths import listed_file

METADATA = ".metadata"

_INDEX_TYPES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _INDEX_TYPES.get(module, ()):
            return super().find_class(module, name)
        # A dtype pickles as its name in torch.
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath", "PurePosixPath"):
            return PurePosixPath  # the original path of the folder; nothing is read there
        raise pickle.UnpicklingError(f"it names {module}.{name}")


@dataclass(frozen=True)
class Piece:
    """A piece of a tensor that one process has written.

    Args:
        file: The file that contains it.
        offset: The offset of its bytes.
        length: The number of bytes.
        begin: Its offset in the tensor, in each dimension.
        shape: Its shape.
    """

    file: Path
    offset: int
    length: int
    begin: tuple[int, ...]
    shape: tuple[int, ...]


def read_metadata(folder: Path) -> Metadata:
    """Read the index of a folder, and check its paths.

    Args:
        folder: The folder.

    Returns:
        The index.

    Raises:
        FileNotFoundError: If there is no index, or a file that it names is missing.
        CorruptCheckpointError: If it is damaged, or names other types than those of an index, or a location
            that is not inside a plain file of the folder.
    """
    path = folder / METADATA
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no {METADATA}, and so is not a folder of sharded weights.")
    raw = listed_file(folder, METADATA, path).read_bytes()
    try:
        metadata = _IndexUnpickler(io.BytesIO(raw)).load()
        ends: dict[str, int] = {}
        for info in metadata.storage_data.values():
            # Before the isinstance: objects without these attributes raise too, and both are "damaged".
            name = str(info.relative_path)
            ends[name] = max(ends.get(name, 0), info.offset + info.length)
        if not isinstance(metadata, Metadata):
            raise TypeError(type(metadata).__name__)
    except Exception as error:  # a damaged pickle can raise any exception
        raise CorruptCheckpointError(
            f"{path} is not the index of sharded weights: {error}. Do not use it."
        ) from error
    for name, end in sorted(ends.items()):
        file = listed_file(folder, name, path)
        size = file.stat().st_size
        if size < end:
            raise CorruptCheckpointError(
                f"{file} is cut off: it has {size} bytes, and {path} says at least {end}. Download or copy "
                "the file again."
            )
    return metadata


def pieces_of(folder: Path, metadata: Metadata) -> Iterator[tuple[str, TensorStorageMetadata, list[Piece]]]:
    """Iterate over the tensors of a folder.

    Args:
        folder: The folder.
        metadata: Its index.

    Yields:
        Each tensor's name, its metadata, and its pieces.
    """
    stored: dict[tuple[str, tuple[int, ...]], Any] = {
        (index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()
    }
    for name, kind in metadata.state_dict_metadata.items():
        if isinstance(kind, TensorStorageMetadata):
            pieces = []
            for chunk in kind.chunks:
                info = stored[name, tuple(chunk.offsets)]
                # `read_metadata` has checked that this stays in the folder.
                file = folder / info.relative_path
                pieces.append(Piece(file, info.offset, info.length, tuple(chunk.offsets), tuple(chunk.sizes)))
            yield name, kind, pieces


def read_piece(piece: Piece) -> torch.Tensor:
    """Read a piece of a tensor, and nothing else of its file.

    Args:
        piece: The piece.

    Raises:
        CorruptCheckpointError: If it does not have the shape in the index.
    """
    with open(piece.file, "rb", buffering=0) as file:
        view = io.BufferedReader(_Slice(file, piece.offset, piece.length))
        try:
            tensor = tensors.load(view, map_location="cpu")
        except (CheckpointError, RuntimeError, EOFError, OSError) as error:
            raise CorruptCheckpointError(
                f"{piece.file} is damaged at byte {piece.offset}: {error}"
            ) from error
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != piece.shape:
        raise CorruptCheckpointError(
            f"{piece.file} has no tensor of shape {piece.shape} at byte {piece.offset}."
        )
    return tensor


class SafeReader(FileSystemReader):
    """Reads a folder for `torch.distributed.checkpoint.load`, with the checks of `read_metadata`.

    Args:
        folder: The folder.
        index: Its index, if already read.
    """

    def __init__(self, folder: Path, index: Metadata | None = None) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index, once."""
        if self._index is None:
            self._index = read_metadata(Path(self.path))
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan file by file, so that an error names the file."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            # FileSystemReader sets storage_data from the index in
            # set_up_storage_reader, before read_data is called.
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            self._read_file(name, replace(plan, items=items), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, name: str, plan: LoadPlan, planner: LoadPlanner) -> None:
        try:
            super().read_data(plan, planner).wait()
        except (CheckpointError, torch.OutOfMemoryError, Warning):
            raise
        except Exception as error:  # a damaged file can raise any exception
            raise CorruptCheckpointError(
                f"{Path(self.path) / name} cannot be read ({type(error).__name__}: {error}). Unless that "
                "names another cause, it is damaged. Download or copy the file again."
            ) from error


class SafePlanner(DefaultLoadPlanner):
    """Loads non-tensors with `weights_only`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value into the state dict that is loaded."""
        name = read_item.dest_index.fqn
        loaded = values.decode(tensors.load(value, map_location="cpu"))
        # As DefaultLoadPlanner.load_bytes of torch 2.10 to 2.15, but for weights_only.
        if not self.flatten_state_dict:
            self.state_dict[name] = loaded
            return
        path = self.mappings[name]
        target: Any = self.original_state_dict
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = loaded


class _Slice(io.RawIOBase):
    """A byte range of a file as a file."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        # `_at` is relative to the start of the range.
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view) or 0
        self._at += count
        return count
