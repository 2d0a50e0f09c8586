"""Reading weights from their file directly into the memory of a model.

A mapped file would be read page by page and then copied by one thread, which takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_ckpt.errors import CheckpointError
from accel_ckpt.files.digests import THREADS
from accel_ckpt.files.safetensors_header import read_header
from accel_ckpt.files.safetensors_writer import DTYPES
from accel_ckpt.files.threads import Threads
from accel_ckpt.weights.files import WeightFile
from accel_ops.collectives.pack_sections import as_bytes

_PIECE_BYTES = 2**22  # read by one thread at a time


def read_into_model(model: nn.Module, files: Sequence[WeightFile]) -> dict[str, torch.Tensor]:
    """Read the weights that files have in the same dtype and shape into a model's parameters and buffers.

    Nothing is read if the model, or a submodule, customizes loading (`load_state_dict`,
    `_load_from_state_dict`, pre-hooks), and nothing into weights that are not plain, contiguous and on the
    CPU.

    Args:
        model: The model.
        files: Safetensors files that have been checked.

    Returns:
        The parameters and buffers that were read, by name. `load_state_dict` does not copy them again.

    Raises:
        CheckpointError: If a file ends early; some weights have already been changed.
        OSError: If one cannot be read.
    """
    if not _loads_as_torch_does(model):
        return {}
    entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}  # file, offset of its tensors, and the entry
    for file in files:
        header, _, begin = read_header(file.path)
        entries |= {name: (file.path, begin, entry) for name, entry in file.select(header).items()}
    current = model.state_dict(keep_vars=True)
    readable = {
        name: value for name, value in current.items() if name in entries and _fits(value, entries[name][2])
    }
    # Of two names of one weight the last one counts, as in load_state_dict.
    last = {id(value): name for name, value in readable.items()}
    with Threads(THREADS, "accel-read") as threads:  # reading releases the GIL
        pieces = [
            threads.submit(_read_piece, path, begin + entry["data_offsets"][0] + start, piece)
            for path, begin, entry, name in ((*entries[name], name) for name in last.values())
            for start, piece in _pieces(readable[name])
        ]
    for piece in pieces:
        piece.result()
    # Includes the other names of a tied weight: load_state_dict then copies a tensor onto itself.
    return {name: value for name, value in current.items() if id(value) in last}


def _loads_as_torch_does(model: nn.Module) -> bool:
    if type(model).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(model):
        return False
    return all(
        # Privates of torch.nn.Module (torch 2.13); without them this raises AttributeError, before any
        # change.
        not module._load_state_dict_pre_hooks
        and "_load_from_state_dict" not in vars(module)
        and type(module)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        for module in model.modules()
    )


def _fits(value: Any, entry: dict[str, Any]) -> bool:
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and value.device.type == "cpu"
        and value.is_contiguous()
        and value.numel() > 0
        and DTYPES.get(value.dtype) == entry["dtype"]
        and list(value.shape) == entry["shape"]
    )


def _pieces(value: torch.Tensor) -> list[tuple[int, memoryview]]:
    content: Any = as_bytes(value.detach()).numpy()
    view = memoryview(content)
    return [(start, view[start : start + _PIECE_BYTES]) for start in range(0, len(view), _PIECE_BYTES)]


def _read_piece(path: Path, start: int, piece: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while piece and (count := file.readinto(piece)):
            piece = piece[count:]
    if piece:
        raise CheckpointError(f"{path} ends {len(piece)} bytes early: it was changed during loading.")
