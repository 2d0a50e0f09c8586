"""Loading weight files into a model: file by file, each weight to where a device map wants it."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accel_ckpt import tensors
from accel_ckpt.offload import load_offloaded_weight, offload_weight, save_offload_index
from accel_ckpt.slots import Slots
from accel_ckpt.weights import find_weight_files
from accel_ops.modules import model_has_dtensor
from accel_state.process import current_process

__all__ = ["device_for", "load_checkpoint_in_model", "load_offloaded_weights", "load_state_dict"]

DeviceMap = Mapping[str, int | str | torch.device]
Folder = str | os.PathLike[str]


def load_state_dict(checkpoint_file: Folder, device_map: DeviceMap | None = None) -> dict[str, torch.Tensor]:
    """Read one file of weights.

    Args:
        checkpoint_file: A safetensors file, or one that torch has saved.
        device_map: Device by name of a module or weight; "" is the whole model. A weight goes to the device
            of the longest name that fits; those of "disk" are read to the CPU, and mapped from the file.
            Without a map, all are.

    Returns:
        Tensors by name.

    Raises:
        CheckpointError: If a torch file holds more than tensors and plain containers.
    """
    if device_map is None or not str(checkpoint_file).endswith(".safetensors"):
        return dict(tensors.load(checkpoint_file, map_location="cpu"))
    state: dict[str, torch.Tensor] = {}
    copies: dict[tuple[int, str], torch.Tensor] = {}
    for name, value in tensors.load(checkpoint_file, map_location="cpu").items():
        device = _memory_device(device_for(name, device_map, default="cpu"))
        # Names of one tensor stay names of one tensor.
        state[name] = copies.setdefault((id(value), device), value.to(device) if device != "cpu" else value)
    return state


def device_for(name: str, device_map: DeviceMap, default: Any = None) -> Any:
    """Look a weight up in a device map.

    Args:
        name: Name of the weight.
        device_map: Device by name of a module or weight.
        default: What to return for a weight that the map does not cover; without it, that is an error.

    Raises:
        ValueError: If the map does not cover the weight.
    """
    part = name
    while part and part not in device_map:
        part = part.rpartition(".")[0]
    if part in device_map:
        return device_map[part]
    if default is None:
        raise ValueError(
            f"device_map says nothing about {name}. It has: {', '.join(map(repr, device_map))}. "
            'Add the module, or "" for all others.'
        )
    return default


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: Folder,
    device_map: DeviceMap | None = None,
    offload_folder: Folder | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load weights into a model, one file after the other.

    A model on the meta device gets its weights from the files; otherwise they are copied into the weights
    that it has, and take their dtype.

    Args:
        model: The model.
        checkpoint: A file of weights, an index of several, or a folder with either.
        device_map: Device by name of a module or weight; "" is the whole model, "disk" leaves a weight on the
            meta device and its value in `offload_folder`. To run a model that is spread like this, dispatch
            it.
        offload_folder: Where weights of "disk" go.
        dtype: Type that floating-point parameters become; by default they keep theirs.
        offload_state_dict: Whether weights for the CPU are put on the disk until all files are read, for
            models of which the weights and a file do not fit into memory together.
        offload_buffers: Whether buffers of modules on "disk" go there too, or stay on the CPU.
        keep_in_fp32_modules: Parts of names of modules that stay float32 whatever `dtype` is.
        offload_8bit_bnb: Whether modules that bitsandbytes has quantized may be on the CPU or disk.
        strict: Whether it is an error if names of the files and the model differ; otherwise it is told.
        full_state_dict: Whether the files hold whole tensors, where the model is sharded over processes.
        broadcast_from_rank0: Whether the main process alone reads the files, and gives each process its part
            of the weights, or all of them; the process group must be there.

    Raises:
        FileNotFoundError: If there are no weights.
        ValueError: If the device map does not cover a weight or has no folder for the disk, or an option is
            unknown.
        CorruptCheckpointError: If an index is damaged, or leads out of its folder.
        RuntimeError: If names differ and `strict` is set, or a shape differs.
        NotImplementedError: For quantized weights.
    """
    if offload_8bit_bnb:
        raise NotImplementedError("offload_8bit_bnb needs quantized models, which are not there yet.")
    if device_map is not None and offload_folder is None and "disk" in map(str, device_map.values()):
        raise ValueError("device_map puts weights on the disk: say where with offload_folder=.")
    wanted = _dtype(dtype)
    if broadcast_from_rank0 or not full_state_dict or model_has_dtensor(model):
        if device_map is not None:
            raise ValueError("a model that is sharded over processes takes no device_map; leave it out.")
        _load_sharded(model, checkpoint, strict, full_state_dict, broadcast_from_rank0)
        return
    files = find_weight_files(checkpoint)
    with ExitStack() as stack:
        later = Path(stack.enter_context(tempfile.TemporaryDirectory())) if offload_state_dict else None
        target = _Target(model, device_map, offload_folder, later, wanted, tuple(keep_in_fp32_modules or ()))
        target.offload_buffers = offload_buffers
        for file in files:
            for name, value in load_state_dict(file, device_map).items():
                target.put(name, value)
        target.finish(strict, checkpoint)


def load_offloaded_weights(model: torch.nn.Module, index: Mapping[str, Any], offload_folder: Folder) -> None:
    """Load weights from a folder of offloaded weights into a model, on the CPU.

    Args:
        model: The model.
        index: The folder's index, or a part of it; nothing happens if it is empty.
        offload_folder: The folder.
    """
    if not index:
        return
    slots = Slots(model)
    for name, info in index.items():
        value = load_offloaded_weight(Path(offload_folder) / f"{name}.dat", info)
        # A copy, so that the folder may be deleted; the model keeps its own type.
        slots.put(name, value.to(slots.get(name).dtype, copy=True))


@dataclass
class _Target:
    """Where weights go that are read one by one."""

    model: torch.nn.Module
    device_map: DeviceMap | None
    offload_folder: Folder | None
    later: Path | None
    dtype: torch.dtype | None
    keep_in_fp32: tuple[str, ...]
    offload_buffers: bool = False
    unexpected: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    others: dict[str, Any] = field(default_factory=dict)
    offloaded: dict[str, dict[str, Any]] = field(default_factory=dict)
    delayed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = Slots(self.model)
        if self.device_map is not None:
            for name in sorted(self.slots.expected):
                device_for(name, self.device_map)
        if self.offload_folder is not None:
            os.makedirs(self.offload_folder, exist_ok=True)

    def put(self, name: str, value: torch.Tensor) -> None:
        if name not in self.slots.expected:
            self.unexpected.append(name)
            return
        if name not in self.slots:  # extra state of a module
            self.others[name] = value
            self.seen.add(name)
            return
        own = self.slots.get(name)
        if own.shape != value.shape:
            raise RuntimeError(
                f"{name} has the shape {list(value.shape)} in the file and {list(own.shape)} in "
                f"{type(self.model).__name__}."
            )
        self.seen.update(self.slots.names(name))
        value = value.to(self._dtype_of(name, own, value))
        device = "cpu" if self.device_map is None else device_for(name, self.device_map)
        if str(device) == "disk" and (self.offload_buffers or name not in self.slots.buffers):
            assert self.offload_folder is not None
            offload_weight(value, name, self.offload_folder, self.offloaded)
            self.slots.put(name, value.to("meta"))
        elif self.device_map is None and not own.is_meta and own.dtype == value.dtype:
            with torch.no_grad():
                own.copy_(value)
        elif self.later is not None and _memory_device(device) == "cpu":
            offload_weight(value, name, self.later, self.delayed)
        else:
            home = own.device if self.device_map is None and not own.is_meta else _memory_device(device)
            self.slots.put(name, value.to(home, copy=True))

    def finish(self, strict: bool, checkpoint: Folder) -> None:
        for name, info in self.delayed.items():
            assert self.later is not None
            self.slots.put(name, load_offloaded_weight(self.later / f"{name}.dat", info).clone())
        if self.offload_folder is not None:
            save_offload_index(self.offloaded, self.offload_folder)
        if self.others:
            self.model.load_state_dict(self.others, strict=False)
        _compare(self.slots.expected - self.seen, self.unexpected, self.model, checkpoint, strict)

    def _dtype_of(self, name: str, own: torch.Tensor, value: torch.Tensor) -> torch.dtype:
        if not value.is_floating_point() or name in self.slots.buffers:
            return own.dtype
        parts = name.split(".")
        if any(part in parts or part in name for part in self.keep_in_fp32):
            return torch.float32
        return own.dtype if self.dtype is None else self.dtype


def _load_sharded(
    model: torch.nn.Module, checkpoint: Folder, strict: bool, full: bool, broadcast: bool
) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state: dict[str, Any] = {}
    if not broadcast or current_process().is_main:
        for file in find_weight_files(checkpoint):
            state |= load_state_dict(file)
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast, strict=strict)
    told = set_model_state_dict(model, state, options=options)
    if told is not None and state:
        _compare(set(told.missing_keys), told.unexpected_keys, model, checkpoint, strict)


def _compare(
    missing: set[str], unexpected: Iterable[str], model: torch.nn.Module, checkpoint: Folder, strict: bool
) -> None:
    found = [
        f"{label}: {', '.join(sorted(names))}"
        for label, names in (
            ("in the model and not in the files", missing),
            ("in the files and not in the model", unexpected),
        )
        if names
    ]
    if not found:
        return
    message = f"{checkpoint} and {type(model).__name__} have different weights; {'; '.join(found)}."
    if strict:
        raise RuntimeError(f"{message} Load what fits with strict=False.")
    warnings.warn(message, stacklevel=4)


def _memory_device(device: Any) -> str:
    if isinstance(device, int):
        kind = current_process().device.type
        return f"{kind}:{device}" if kind != "cpu" else "cpu"
    return "cpu" if str(device) == "disk" else str(device)


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype must be a dtype of torch or its name, such as 'bfloat16', not {dtype!r}.")
    return found
