"""Models whose weights are in memory or on the disk, and on the device only while they are used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accel.big_models.hooks.align import AlignDevicesHook
from accel.big_models.hooks.attach import attach_align_device_hook
from accel.big_models.hooks.base import Arguments, ModelHook, add_hook_to_module, remove_hook_from_module
from accel.big_models.hooks.tensors import Device, as_device, is_on
from accel.big_models.offload.weights import check_not_sharded, collect, tied_params, use_prefetcher
from accel_ckpt.weights.offload import OffloadedWeightsLoader
from accel_ops.memory import clear_device_cache
from accel_ops.trees.send import send_to_device
from accel_state.process.state import PartialState, current_process


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep a model's weights in CPU memory; each module's weights are moved to the device while it runs.

    Args:
        model: The model.
        execution_device: Where it runs; by default where its first parameter is.
        offload_buffers: Offload buffers too; by default they are on the execution device.
        state_dict: The weights; by default the model's. These tensors are used without a copy.
        preload_module_classes: Names of classes that use the weights of modules inside of them without
            calling these: all are loaded for the forward of the instance.

    Returns:
        The model, with hooks. `remove_hook_from_submodules` undoes it.

    Raises:
        ValueError: If a weight is neither in the model nor in `state_dict`, or FSDP has sharded the model.
    """
    check_not_sharded(model)
    device = _execution_device(model, execution_device)
    # Before hooks are attached, so that an error leaves the model as it was.
    wanted = collect(model, lambda name: "cpu", offload_buffers, dict(state_dict or {}))
    _attach(model, device, wanted.in_memory, offload_buffers, preload_module_classes)
    return model


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep a model's weights on the disk; each module's are read while the one before it runs.

    Args:
        model: The model. Weights that it has are written; for those on the meta device the folder's are used.
        offload_dir: The folder; created if missing. Keep it while the model is in use.
        execution_device: Where it runs; by default where its first parameter is.
        offload_buffers: Offload buffers too; by default they are on the execution device.
        preload_module_classes: As for `cpu_offload`.

    Returns:
        The model, with hooks. `remove_hook_from_submodules` undoes it.

    Raises:
        ValueError: If a weight is neither in the model nor in the folder, or is of a class that cannot be
            written to the disk (DTensor, those of torchao), or would replace one in the folder that another
            model reads; or FSDP has sharded the model.
        OSError: If a weight cannot be written; the model is unchanged, and what was written is deleted.
    """
    check_not_sharded(model)
    device = _execution_device(model, execution_device)
    wanted = collect(model, lambda name: "disk", offload_buffers, {}, offload_dir)
    weights = OffloadedWeightsLoader(wanted.in_memory, offload_dir, wanted.write())
    _attach(model, device, weights, offload_buffers, preload_module_classes)
    # After attaching: it registers with the attached hooks.
    use_prefetcher(model, wanted.on_disk)
    return model


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU until it runs, and then on the device until its hook offloads it.

    For pipelines that run one model several times, and then the next.

    Args:
        model: The model. It is moved as one unit.
        execution_device: Where it runs; by default this process's accelerator.
        prev_module_hook: The hook of the model before it in the pipeline, which is offloaded when this one
            runs.

    Returns:
        The model, and its hook, with `offload()` and `remove()`.

    Example:
        >>> first, hook = cpu_offload_with_hook(torch.nn.Linear(2, 2), "cpu")
        >>> second, hook = cpu_offload_with_hook(torch.nn.Linear(2, 2), "cpu", prev_module_hook=hook)
        >>> second(first(torch.ones(1, 2))).shape
        torch.Size([1, 2])
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


class CpuOffload(ModelHook):
    """Keep a model on the CPU until its forward, and leave it on the device afterwards.

    Args:
        execution_device: Where it runs; by default this process's accelerator.
        prev_module_hook: The hook of another model, which is offloaded before this one is moved to the
            device.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = (
            PartialState().default_device if execution_device is None else as_device(execution_device)
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Move the model and its inputs to the device, if they are not there."""
        device = self.execution_device
        # One is enough: the model is moved as one unit.
        first = next(module.parameters(), None)
        if first is None or not is_on(first, device):
            # First, so that the device never has both models.
            if self.prev_module_hook is not None:
                self.prev_module_hook.offload()
                clear_device_cache()
            module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


class UserCpuOffloadHook:
    """A model and its hook, as `cpu_offload_with_hook` returns it.

    Args:
        model: The model.
        hook: Its hook.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to the CPU; its next forward moves it back."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the model stays where it is."""
        remove_hook_from_module(self.model)


def _attach(
    model: nn.Module,
    device: torch.device,
    weights: Mapping[str, torch.Tensor],
    offload_buffers: bool,
    preload_module_classes: list[str] | None,
) -> None:
    ties = tied_params(model)
    try:
        # Added first, and outermost: outputs return to where the inputs were.
        add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
        attach_align_device_hook(
            model,
            execution_device=device,
            offload=True,
            weights_map=weights,
            offload_buffers=offload_buffers,
            preload_module_classes=preload_module_classes,
            tied_params_map=ties,
        )
    except BaseException:
        remove_hook_from_module(model, recurse=True)
        raise


def _execution_device(model: nn.Module, device: Device | None) -> torch.device:
    if device is not None:
        return as_device(device)
    first = next(model.parameters(), None)
    # The meta device is where nothing can run.
    return current_process().device if first is None or first.is_meta else first.device
