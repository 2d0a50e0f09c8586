"""Running a model whose modules are on several devices, in memory and on disk, according to a device map."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from accel.big_models.hooks.align import AlignDevicesHook
from accel.big_models.hooks.attach import attach_align_device_hook_on_blocks
from accel.big_models.hooks.base import add_hook_to_module, remove_hook_from_module
from accel.big_models.hooks.move_guard import MoveGuard
from accel.big_models.hooks.prefetch import EndOfForward
from accel.big_models.hooks.tensors import Device, TiedParameters, as_device, tied_key
from accel.big_models.offload.weights import (
    check_not_sharded,
    collect,
    hooks_of,
    materialize_meta,
    named_tensors,
    offloaded_values,
    tied_params,
    use_prefetcher,
)
from accel.big_models.parameters import move
from accel.big_models.placement.requested import (
    check_placement,
    find_main_device,
    make_device_map,
    offloaded_kinds,
)
from accel_ckpt.weights.load import device_for, load_placed
from accel_ckpt.weights.offload import OffloadedWeightsLoader
from accel_ckpt.weights.placement import WeightPlacement

Folder = str | os.PathLike[str]
DeviceMap = Mapping[str, Device]


def dispatch_model(
    model: nn.Module,
    device_map: DeviceMap,
    main_device: Device | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Place a model according to a device map, and add the hooks to run it.

    Weights that the map puts on "disk", or on "cpu" next to an accelerator, are offloaded: they are moved to
    the main device while their module runs. Tied weights stay tied; they are not offloaded if one of their
    modules is not. A dispatched model is dispatched again.

    Args:
        model: The model. It gets `hf_device_map`, a copy of the map.
        device_map: Device by name of a module or weight; the longest matching name applies, and "" is the
            full model. "disk" is a device. Names that the model does not have cause a warning.
        main_device: Where offloaded modules run; by default the first device of the map that is neither "cpu"
            nor "disk", or else the CPU.
        state_dict: The weights of modules on "cpu"; by default the model's.
        offload_dir: The folder for modules on "disk". Weights of the model are written to it; for weights on
            the meta device the folder's are used.
        offload_index: Where weights are on the disk, by name, as for `OffloadedWeightsLoader`; by default
            from the folder's index. Weights that the map has in memory, and the model on the meta device, are
            read.
        offload_buffers: Offload buffers too.
        skip_keys: Keyword arguments, keys and fields whose values are not moved between devices.
        preload_module_classes: Names of classes that use the weights of modules inside of them without
            calling these. Those of torch are included.
        force_hooks: Attach hooks even if the map has one device, to which the model could simply be moved.

    Returns:
        The model.

    Raises:
        TypeError: If the map is not a mapping.
        ValueError: If the map does not cover the model, or names a device that does not exist; if a weight
            has no values, has a class that cannot be written to the disk, or would replace one in the folder
            that another model reads; if FSDP shards the model. The model is unchanged.
        OSError: If the folder cannot be written. The model is unchanged.
    """
    check_placement(model, device_map, main_device)
    check_not_sharded(model)
    # Weights as well as modules: a map may place a single weight.
    names = {name for name, _ in model.named_modules(remove_duplicate=False)} | named_tensors(model).keys()
    existing_map = {name: device for name, device in device_map.items() if name in names}
    # As devices: 0, "cuda:0" and torch.device("cuda", 0) are the same.
    kinds = {
        str(device) if str(device) == "disk" else str(as_device(device)) for device in existing_map.values()
    }
    # A model that is entirely on disk only runs through hooks.
    if len(kinds) > 1 or kinds == {"disk"} or force_hooks:
        main = find_main_device(existing_map) if main_device is None else as_device(main_device)
        _spread(
            model, existing_map, main, state_dict or {}, offload_dir, offload_index,
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
        )  # fmt: skip
    elif existing_map:
        _move_to_device(model, existing_map, offload_dir, offload_index)
    # transformers and other libraries read this attribute.
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Folder,
    device_map: str | DeviceMap | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_folder: Folder | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model, each weight on its device, and dispatch the model.

    Files are mapped into memory, and weights are copied from there to their device one by one. Those on "cpu"
    and "disk" stay mapped from safetensors files that have them in the right dtype: those on "cpu" are paged
    in as they are used, and writes to them never reach the file. Do not write to the files while the model is
    in use: this is an error when weights on "disk" are read, and changes weights on "cpu". Replacing the
    files is safe on Linux, and an error for "disk" on other systems.

    Args:
        model: The model, usually made under `init_empty_weights`. A dispatched one is
            dispatched again.
        checkpoint: A file of weights, an index, or a folder with one of them.
        device_map: Device by name of a module, as for `dispatch_model`; or a strategy to make such a map:
            "auto" or "balanced" (evenly over the accelerators), "balanced_low_0" (with room on the first for
            `generate`) or "sequential" (one after the other). None: the weights are loaded where the model
            is, which is not dispatched; a dispatched one stays dispatched.
        max_memory: Bytes (or text such as "1GB") by device, for a map made from a strategy.
        no_split_module_classes: Names of classes whose instances stay on one device, for such a map.
        offload_folder: The folder for weights on "disk" that cannot be read in place.
        offload_buffers: Offload buffers too.
        dtype: Dtype of floating-point weights; by default the model's.
        offload_state_dict: No effect: weights are never all in memory before they are placed.
        skip_keys: As for `dispatch_model`.
        preload_module_classes: As for `dispatch_model`.
        force_hooks: As for `dispatch_model`.
        strict: Raise if the model or the checkpoint has weights that the other lacks.
        full_state_dict: As for `load_checkpoint_in_model`.
        broadcast_from_rank0: As for `load_checkpoint_in_model`.

    Returns:
        The model.

    Raises:
        ValueError: If `device_map` is unknown text, does not fit the model, or names a device that does
            not exist; if a folder is needed and not passed, or has weights that another model reads and that
            would be replaced; if a weight would have no values.
        FileNotFoundError: If there are no weights at `checkpoint`.
        CheckpointError: If a file is damaged.
        OSError: If a weight cannot be written to the folder. After an error while weights are placed, those
            that were on the meta device are on it again.
    """
    if isinstance(device_map, str):
        splits = no_split_module_classes
        device_map = make_device_map(model, device_map, max_memory, splits, dtype, offload_buffers)
    if device_map is not None:
        check_placement(model, device_map)
    # Weights on "disk" stay in the safetensors files that have them.
    placement = WeightPlacement.from_options(
        device_map, offload_folder, dtype, offload_buffers, in_place=True
    )
    load_placed(model, checkpoint, placement, strict, full_state_dict, broadcast_from_rank0)
    if device_map is None:
        return model
    _forget_replaced(model)
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_index=placement.index,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def _spread(
    model: nn.Module,
    device_map: DeviceMap,
    main: torch.device,
    state_dict: Mapping[str, torch.Tensor],
    folder: Folder | None,
    index: Mapping[str, Mapping[str, Any]] | None,
    *,
    offload_buffers: bool,
    skip_keys: str | list[str] | None,
    preload_module_classes: list[str] | None,
) -> None:
    """Attach the hooks that run a model over several devices; offloaded weights are stored first."""
    # Weights offloaded by a previous dispatch; its hooks stay until all checks have passed.
    previous = offloaded_values(model)
    offloaded = offloaded_kinds(main)

    def place(name: str) -> str | None:
        # Missing only if a library has disabled the check of the map.
        kind = str(device_for(name, device_map, default=main))
        return kind if kind in offloaded else None

    # The user's values take precedence over those of a previous dispatch.
    wanted = collect(model, place, offload_buffers, {**previous, **state_dict}, folder, index)
    previous = {**_listed_values(model, wanted.names, folder, index), **previous}
    _check_resident(model, device_map, wanted.names | previous.keys())
    written = wanted.write()
    _remove_hooks(model, {name: previous[name] for name in previous.keys() - wanted.names})
    weights = OffloadedWeightsLoader(wanted.in_memory, folder, written) if wanted.on_disk else None
    try:
        _attach(
            model, device_map, main, offloaded, wanted.in_memory if weights is None else weights,
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
        )  # fmt: skip
        # After attaching: it registers with the attached hooks.
        use_prefetcher(model, wanted.on_disk)
        add_hook_to_module(model, MoveGuard(bool(wanted.on_disk or wanted.in_memory)), append=True)
    except BaseException:
        remove_hook_from_module(model, recurse=True)
        raise


def _move_to_device(
    model: nn.Module,
    device_map: DeviceMap,
    folder: Folder | None,
    index: Mapping[str, Mapping[str, Any]] | None,
) -> None:
    """Move the full model to one device, without hooks."""
    device = as_device(next(iter(device_map.values())))
    previous = {**_listed_values(model, (), folder, index), **offloaded_values(model)}
    _check_resident(model, device_map, previous.keys())
    _remove_hooks(model, previous)
    # Quantized models reject to() even if there is nothing to move.
    if any(tensor.device != device for tensor, _ in named_tensors(model).values()):
        model.to(device)


def _remove_hooks(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Remove the hooks of a previous dispatch, and restore the weights that only these hooks had.

    Other hooks are added again.
    """
    for module in model.modules():
        hooks = hooks_of(module)
        # The user's hooks stay, in their order.
        user_hooks = [
            hook for hook in hooks if not isinstance(hook, AlignDevicesHook | EndOfForward | MoveGuard)
        ]
        if len(user_hooks) < len(hooks):
            remove_hook_from_module(module)
            for hook in user_hooks:
                add_hook_to_module(module, hook, append=True)
    materialize_meta(model, values)


def _forget_replaced(model: nn.Module) -> None:
    """Make hooks of a previous dispatch drop weights that have been replaced by loaded ones."""
    for module in model.modules():
        for hook in hooks_of(module):
            if isinstance(hook, AlignDevicesHook):
                hook.slots[:] = [slot for slot in hook.slots if slot.table[slot.leaf] is slot.placeholder]


def _listed_values(
    model: nn.Module,
    offloaded: Collection[str],
    folder: Folder | None,
    index: Mapping[str, Mapping[str, Any]] | None,
) -> dict[str, torch.Tensor]:
    """Map weights that are in an index and on the meta device, and that will not be offloaded."""
    if not index:
        return {}
    weights = OffloadedWeightsLoader(save_folder=folder, index=index)
    tensors = {name: tensor for name, (tensor, _) in named_tensors(model).items() if tensor.is_meta}
    # An index may have any name of a tied weight.
    listed = {id(tensors[name]): name for name in tensors.keys() & index.keys()}
    return {
        name: weights[listed[id(tensor)]]
        for name, tensor in tensors.items()
        if id(tensor) in listed and name not in offloaded
    }


def _check_resident(model: nn.Module, device_map: DeviceMap, with_values: Collection[str]) -> None:
    """Check that weights that are not offloaded have values, before anything moves."""
    lost = [
        name
        for name, (tensor, _) in named_tensors(model).items()
        if tensor.is_meta
        and name not in with_values
        and str(device_for(name, device_map, default="meta")) not in ("meta", "disk")
    ]
    if lost:
        raise ValueError(
            f"{type(model).__name__} has no values for {', '.join(lost)} (on the meta device). Load its "
            "weights before it is dispatched, or with load_checkpoint_and_dispatch."
        )


def _attach(
    model: nn.Module,
    device_map: DeviceMap,
    main: torch.device,
    offloaded: tuple[str, ...],
    weights: Mapping[str, torch.Tensor],
    **options: Any,
) -> None:
    execution: dict[str, Device] = {
        name: main if str(device) in ("cpu", "disk") else as_device(device)
        for name, device in device_map.items()
    }
    offload = {name: str(device) in offloaded for name, device in device_map.items()}
    _raise_weights_to_modules(model, execution, offload, main)
    # The model itself: inputs are moved to its first device.
    execution.setdefault("", main)
    ties = tied_params(model)
    _place_tied(model, ties, execution, offload)
    attach_align_device_hook_on_blocks(
        model,
        execution_device=execution,
        offload=offload,
        weights_map=weights,
        tied_params_map=ties,
        **options,
    )


def _raise_weights_to_modules(
    model: nn.Module, execution: dict[str, Device], offload: dict[str, bool], main: torch.device
) -> None:
    """Offload a module if the map offloads one of its weights by name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    # Anything else is a weight.
    for name in [name for name in offload if name not in modules]:
        owner = name.rpartition(".")[0]
        if not offload.pop(name) or device_for(owner, offload, default=0) is True:
            continue
        inherited = device_for(owner, offload, default=0), device_for(owner, execution, default=main)
        for child, _ in modules[owner].named_children():
            path = f"{owner}.{child}" if owner else child
            # Children that stay on a device would be offloaded with the module:
            # they get their own entries.
            if inherited[0] is False and path not in offload:
                offload[path], execution[path] = False, inherited[1]
        offload[owner], execution[owner] = True, main


def _place_tied(
    model: nn.Module, ties: TiedParameters, execution: Mapping[str, Device], offload: Mapping[str, bool]
) -> None:
    """Copy tied weights to the devices where a module keeps them, so that no other offloads them there."""
    for name, (tensor, _) in named_tensors(model).items():
        copies = ties.get(tied_key(tensor))
        if copies is None or tensor.is_meta or device_for(name, offload, default=0) is True:
            continue
        device = as_device(device_for(name, execution))
        if device not in copies:
            copies[device] = move(tensor, tensor, device)
