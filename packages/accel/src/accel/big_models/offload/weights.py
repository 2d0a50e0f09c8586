"""Where the offloaded weights of a model are: in memory, in a folder, or in safetensors read in place."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel.big_models.hooks.align import AlignDevicesHook
from accel.big_models.hooks.base import ModelHook, SequentialHook, add_hook_to_module
from accel.big_models.hooks.prefetch import EndOfForward, Prefetcher
from accel.big_models.hooks.tensors import TiedParameters, list_tensors, tied_key
from accel.big_models.parameters import move
from accel_ckpt.weights.offload import (
    make_offload_folder,
    offload_weight,
    read_offload_index,
    save_offload_index,
)
from accel_ckpt.weights.open_folders import check_not_in_use, open_folders_of
from accel_ops.modules import model_is_sharded

Index = dict[str, dict[str, Any]]


@dataclass
class Offloaded:
    """The offloaded weights of a model.

    Args:
        in_memory: Weights that are kept on the CPU, by name.
        index: Entries of those already on the disk, by name.
        to_write: Those to write, by name; equal tensors are written once.
        folder: The folder for them.
        readers_of_model: Ids of the readers of the folder that belong to this model.
    """

    in_memory: dict[str, torch.Tensor] = field(default_factory=dict)
    index: Index = field(default_factory=dict)
    to_write: dict[str, torch.Tensor] = field(default_factory=dict)
    folder: Path | None = None
    readers_of_model: set[int] = field(default_factory=set)

    @property
    def on_disk(self) -> set[str]:
        """The names of weights that are, or will be, on the disk."""
        return self.index.keys() | self.to_write.keys()

    @property
    def names(self) -> set[str]:
        """The names of all offloaded weights."""
        return self.on_disk | self.in_memory.keys()

    def write(self) -> Index:
        """Write the weights in `to_write`.

        Returns:
            Entries of all weights on the disk, by name.

        Raises:
            OSError: If a weight cannot be written; files written before are deleted.
            ValueError: If the class of a weight cannot be written; likewise. Or if one would replace a
                weight that another model reads; nothing is written then.
        """
        first: dict[int, str] = {}
        written: Index = {}
        for name, tensor in self.to_write.items():
            # A tied weight is written once, under its first name.
            first.setdefault(id(tensor), name)
        try:
            if first:
                assert self.folder is not None
                check_not_in_use(self.folder, set(first.values()), self.readers_of_model)
                make_offload_folder(self.folder)
                for name in first.values():
                    offload_weight(self.to_write[name], name, self.folder, written)
                save_offload_index(written, self.folder)
        except BaseException:
            # Without the index, which comes last, they cannot be read.
            for name in written:
                (self.folder / f"{name}.dat").unlink(missing_ok=True)  # type: ignore[operator]
            raise
        aliases = {
            name: {**written[first[id(tensor)]], "weight_name": first[id(tensor)]}
            for name, tensor in self.to_write.items()
        }
        return self.index | aliases


def collect(
    model: nn.Module,
    place: Callable[[str], str | None],
    offload_buffers: bool,
    state_dict: Mapping[str, torch.Tensor],
    folder: str | os.PathLike[str] | None = None,
    index: Mapping[str, Mapping[str, Any]] | None = None,
) -> Offloaded:
    """Find the values of a model's offloaded weights, without changing anything.

    A tied weight is kept once: in memory, if one of its names is there or not offloaded.

    Args:
        model: The model.
        place: Returns "cpu" or "disk" for the name of a weight to offload, None for one to leave.
        offload_buffers: Whether persistent buffers are offloaded.
        state_dict: Values that are in memory, by name; they take precedence over the model's.
        folder: The folder for the disk; its weights are used for those that have no values elsewhere.
        index: Entries of weights on the disk, which take precedence over values in memory.

    Returns:
        The weights.

    Raises:
        ValueError: If a weight has no values; or must be written and there is no folder.
        CorruptCheckpointError: If the folder's index is damaged.
    """
    root = None if folder is None else Path(folder)
    found = Offloaded(folder=root, readers_of_model=open_folders_of(model))
    folder_index: Index | None = None
    groups: dict[int, list[str]] = {}
    tensors = named_tensors(model)
    states = (vars(tensor).get("quant_state") for tensor, _ in tensors.values())
    if any(getattr(state, "packing_format_for_cpu", False) for state in states):
        # 4-bit layers of bitsandbytes that have run on the CPU return to the form that is saved.
        model.state_dict()
    for name, (tensor, _) in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    lost: list[str] = []
    for names in groups.values():
        tensor, kind = tensors[names[0]]
        places = {name: place(name) for name in names}
        wanted = [name for name in names if places[name] is not None]
        if not wanted or kind == "own buffer" or (kind == "buffer" and not offload_buffers):
            continue
        provided = next((state_dict[name] for name in names if name in state_dict), None)
        value = tensor if provided is None else provided
        # A tied weight that one module keeps in memory is in memory for all.
        # Tied names may have their own places in a map.
        on_disk = all(places[name] == "disk" for name in names)
        listed = index or {}
        # The folder's index is read once, and only if a weight has no values elsewhere.
        if value.is_meta and folder_index is None and index is None and root is not None:
            folder_index = read_offload_index(root) if (root / "index.json").exists() else {}
        entry_name = next((name for name in names if name in listed), None)
        if entry_name is None and value.is_meta:
            listed = folder_index or {}
            entry_name = next((name for name in names if name in listed), None)
        if entry_name is not None and (on_disk or value.is_meta):
            entry = {"weight_name": entry_name, **listed[entry_name]}
            found.index |= dict.fromkeys(wanted, entry)
        elif value.is_meta:
            lost += wanted
        elif on_disk:
            found.to_write |= dict.fromkeys(wanted, value)
        else:
            kept = value if value.device.type == "cpu" else value.to("cpu")
            found.in_memory |= dict.fromkeys(wanted, kept)
    _check(model, found, lost)
    return found


def _check(model: nn.Module, found: Offloaded, lost: list[str]) -> None:
    if lost:
        where = "" if found.folder is None else f", nor has {found.folder}"
        raise ValueError(
            f"{type(model).__name__} has no values for {', '.join(lost)} (on the meta device){where}. Load "
            "them first, or pass state_dict=, offload_dir= or offload_index=."
        )
    if found.to_write and found.folder is None:
        raise ValueError(
            f"{', '.join(found.to_write)} of {type(model).__name__} are to be on the disk: pass offload_dir=."
        )


def check_not_sharded(model: nn.Module) -> None:
    """Check that a model is not sharded: hooks would offload weights that FSDP gathers.

    Args:
        model: The model.

    Raises:
        ValueError: If it is.
    """
    if model_is_sharded(model):
        raise ValueError(
            f"{type(model).__name__} is sharded by FSDP, which places its weights itself: it cannot be "
            "dispatched or offloaded. Let FSDP offload it: with cpu_offload of the FSDP plugin, or "
            "CPUOffloadPolicy of fully_shard."
        )


def offloaded_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that the hooks of a model keep, under all their names.

    Args:
        model: The model.

    Returns:
        Weights by name; those on the disk are mapped, and read when they are used.
    """
    values: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for hook in hooks_of(module):
            if isinstance(hook, AlignDevicesHook):
                values |= {prefix + name: value for name, value in hook.values().items()}
    return values


def materialize_meta(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give tensors of a model that are on the meta device their values, on the CPU; tied ones stay tied.

    Args:
        model: The model.
        values: Values by name; others stay on the meta device.
    """
    tensors = {name: tensor for name, (tensor, _) in named_tensors(model).items() if tensor.is_meta}
    # A copy, as the value may be mapped from a file.
    filled = {
        id(tensors[name]): move(values[name].clone(), tensors[name], torch.device("cpu"))
        for name in tensors.keys() & values.keys()
    }
    for name, tensor in tensors.items():
        if id(tensor) in filled:
            path, _, leaf = name.rpartition(".")
            owner = model.get_submodule(path)
            table: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
            table[leaf] = filled[id(tensor)]


def named_tensors(model: nn.Module) -> dict[str, tuple[torch.Tensor, str]]:
    """List a model's tensors under all their names.

    Args:
        model: The model.

    Returns:
        (tensor, kind) by name; the kinds are "parameter", "buffer" and "own buffer" for one that is not in
        the state dict.
    """
    modules = model.named_modules(remove_duplicate=False)
    return {name: (table[leaf], kind) for table, leaf, name, kind in list_tensors(modules)}


def tied_params(model: nn.Module) -> TiedParameters:
    """Create the map through which the hooks of a model share copies of its tied weights.

    A tied weight is left out where another tensor, a view of it, begins at the same address.
    """
    count: dict[int, int] = {}
    tensors: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                tensors[id(tensor)] = tensor
                count[id(tensor)] = count.get(id(tensor), 0) + 1
    at = Counter(tied_key(tensor) for tensor in tensors.values())
    tied = (tied_key(tensor) for key, tensor in tensors.items() if count[key] > 1)
    # The map only has addresses: a hook would replace the view with the full weight.
    return {address: {} for address in tied if at[address] == 1}


def use_prefetcher(model: nn.Module, on_disk: set[str]) -> None:
    """Read a model's weights on the disk ahead: each module's while the one before it runs.

    Args:
        model: The model, with its hooks.
        on_disk: Full names of the weights on the disk.
    """
    prefetcher, reading = Prefetcher(), list[str]()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for hook in hooks_of(module):
            if isinstance(hook, AlignDevicesHook) and any(
                prefix + slot.name in on_disk for slot in hook.slots
            ):
                hook.prefetcher = prefetcher
                reading.append(path)
    # On all modules around these, as users may call only a part of a model.
    outer = {""} if reading else set[str]()
    for path in reading:
        outer.update(accumulate(path.split(".")[:-1], "{}.{}".format))
    for path in sorted(outer):
        module = model.get_submodule(path)
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):  # which have no forward
            add_hook_to_module(module, EndOfForward(prefetcher), append=True)


def hooks_of(module: nn.Module) -> tuple[ModelHook, ...]:
    """Return the hooks of a module, those of a `SequentialHook` one by one."""
    hook: ModelHook | None = vars(module).get("_hf_hook")
    if hook is None:
        return ()
    return tuple(hook.hooks) if isinstance(hook, SequentialHook) else (hook,)
