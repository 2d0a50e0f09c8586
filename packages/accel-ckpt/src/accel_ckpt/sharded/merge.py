"""Merging sharded weights into one safetensors file.

The tensors are written piece by piece to their offsets, so that only one piece is in memory.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.file_names import sharded_model_folder
from accel_ckpt.files import digests, tensors
from accel_ckpt.files.disk import flush, replacing
from accel_ckpt.files.safetensors_writer import DTYPES, make_header
from accel_ckpt.folder import manifest
from accel_ckpt.sharded.dcp_reader import METADATA, Piece, pieces_of, read_metadata, read_piece
from accel_ops.collectives.pack_sections import as_bytes
from accel_state.logging.warning import warn


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> Path:
    """Write the weights of a sharded checkpoint into one file, on one process, without a process group.

    If the folder is part of a checkpoint with a manifest, its files are verified first.

    Args:
        checkpoint_dir: The folder of the sharded weights (`pytorch_model_fsdp_0`), or the checkpoint that
            contains it.
        output_path: The folder to write `model.safetensors` into (`pytorch_model.bin` without safetensors);
            created if it does not exist.
        safe_serialization: Whether to write safetensors. The torch format is written from a merged
            safetensors file, and needs disk space for both.
        remove_checkpoint_dir: Whether to delete the sharded weights once the file is on the disk.

    Returns:
        The file.

    Raises:
        FileNotFoundError: If there are no sharded weights.
        CorruptCheckpointError: If they are damaged, or lead out of their folder.
        CheckpointError: If safetensors cannot store them.
    """
    folder = _find(Path(checkpoint_dir))
    _verify(folder)
    target = Path(output_path)
    target.mkdir(parents=True, exist_ok=True)
    final = target / ("model.safetensors" if safe_serialization else "pytorch_model.bin")
    with replacing(final) as draft:
        # torch.save needs full tensors, which are read from a merged safetensors file.
        merged = draft if safe_serialization else draft.with_suffix(".safetensors")
        try:
            _merge(folder, merged)
            if not safe_serialization:
                tensors.write(tensors.load(merged), draft)
        finally:
            if merged != draft:
                merged.unlink(missing_ok=True)
    flush(target)
    if remove_checkpoint_dir:
        shutil.rmtree(folder)
    return final


def _find(path: Path) -> Path:
    for folder in (path, path / sharded_model_folder()):
        if (folder / METADATA).exists():
            return folder
    if not path.is_dir():
        raise FileNotFoundError(
            f"There is no folder {path}. Name {sharded_model_folder()}, or the checkpoint that contains it."
        )
    existing = ", ".join(sorted(child.name for child in path.iterdir())) or "nothing"
    raise FileNotFoundError(
        f"{path} has no sharded weights ({METADATA}), and no {sharded_model_folder()} with some. "
        f"There is: {existing}."
    )


def _verify(folder: Path) -> None:
    checkpoint = folder.resolve().parent
    described = manifest.read(checkpoint)
    if described is not None:
        entries = [entry for entry in described.files if entry.path.startswith(f"{folder.resolve().name}/")]
        digests.verify(checkpoint, entries, described.chunk_bytes, algorithm=described.algorithm)


def _merge(folder: Path, merged: Path) -> None:
    metadata = read_metadata(folder)
    sharded = {name: (kind, pieces) for name, kind, pieces in pieces_of(folder, metadata)}
    if not sharded:
        raise CheckpointError(f"{folder} holds no tensors.")
    others = sorted(metadata.state_dict_metadata.keys() - sharded.keys())
    if others:
        warn(f"{folder} holds more than tensors; omitted: {', '.join(others)}.")
    # DCP has joined the key of write_parts' {"model": ...} and the name with a dot.
    prefix = "model." if all(name.startswith("model.") for name in sharded) else ""
    described = {}
    for name, (kind, _) in sharded.items():
        dtype = kind.properties.dtype
        if dtype not in DTYPES:
            raise CheckpointError(f"{name} in {folder} is {dtype}, which safetensors cannot hold.")
        described[name.removeprefix(prefix)] = dtype, kind.size
    size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in described.values())
    header, begins = make_header(described, {"format": "pt"})
    # Unbuffered, as pieces are written by pwrite, which bypasses any buffer.
    with open(merged, "wb", buffering=0) as file:
        file.write(header)
        # The full size first: pieces are written in any order.
        file.truncate(len(header) + size)
        for name, (kind, pieces) in sharded.items():
            _check_complete(name, tuple(kind.size), pieces)
            for piece in pieces:
                value = read_piece(piece)
                if value.dtype != kind.properties.dtype:
                    raise CorruptCheckpointError(f"{piece.file} has {value.dtype} for {name}.")
                begin = begins[name.removeprefix(prefix)]
                _put(file.fileno(), begin, value, piece.begin, tuple(kind.size))


def _check_complete(name: str, shape: tuple[int, ...], pieces: list[Piece]) -> None:
    inside = all(
        start >= 0 and start + length <= size
        for piece in pieces
        for start, length, size in zip(piece.begin, piece.shape, shape, strict=True)
    )
    # Bounds and the number of elements, not overlaps: this finds damage, not forgery.
    if not inside or sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
        raise CorruptCheckpointError(f"the pieces of {name} do not make up its shape {[*shape]}.")


def _put(handle: int, base: int, value: torch.Tensor, begin: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Write a piece to its position in a tensor that is stored in row-major order."""
    if not value.numel():
        return
    item = value.element_size()
    content: Any = as_bytes(value).numpy()
    raw = memoryview(content)
    first_full = len(shape)  # from here on, the piece has the full dimensions
    while first_full and value.shape[first_full - 1] == shape[first_full - 1]:
        first_full -= 1
    # The innermost sharded dimension, and all after it, are one contiguous run of bytes.
    outer = max(first_full - 1, 0)
    run = math.prod(value.shape[outer:]) * item
    strides = [math.prod(shape[dim + 1 :]) * item for dim in range(len(shape))]
    first = base + sum(start * stride for start, stride in zip(begin, strides, strict=True))
    for number, position in enumerate(product(*(range(length) for length in value.shape[:outer]))):
        at = first + sum(index * stride for index, stride in zip(position, strides, strict=False))
        _write_all(handle, raw[number * run : (number + 1) * run], at)


def _write_all(handle: int, data: memoryview, at: int) -> None:
    while data:
        # It may write less than requested: Linux writes at most 2 GiB minus a page at once.
        if sys.platform == "win32":  # it has no pwrite
            os.lseek(handle, at, os.SEEK_SET)
            count = os.write(handle, data)
        else:
            count = os.pwrite(handle, data, at)
        data, at = data[count:], at + count
