"""A module's weights on a device for a while, wherever they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from accel.big_models.hooks.align import AlignDevicesHook
from accel.big_models.hooks.tensors import Device, as_device
from accel.big_models.offload.weights import hooks_of
from accel.big_models.parameters import META, move
from accel_ckpt.weights.offload import replace_offloaded


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether a module has a hook that offloads its weights.

    Args:
        module: The module.
    """
    return _offloading(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Move a module's own parameters to a device, and back at the end.

    Changes to them are kept: offloaded ones are written to where they are stored, in memory or on the disk.
    Safetensors files that are read in place are never written to: their changed weights are kept in the
    offload folder or, without one, in memory. Changing an offloaded quantized weight is an error, as it
    cannot be stored again.

    Args:
        module: The module. Those of modules inside of it stay where they are, unless its hook offloads them.
        execution_device: The device. By default offloaded weights are moved to where they are used, and
            others stay.

    Yields:
        Nothing.

    Raises:
        ValueError: If the shape of an offloaded parameter has changed, or a quantized one was changed.
    """
    device = None if execution_device is None else as_device(execution_device)
    hook = _offloading(module)
    if hook is not None:
        usual = hook.execution_device
        # Only in this block: the hook moves weights to its own device.
        hook.execution_device = usual if device is None else device
        try:
            hook.load(module)
            with ExitStack() as ending:
                ending.callback(hook.unload, module)
                versions = {slot.name: _version(slot.table.get(slot.leaf)) for slot in hook.slots}
                ending.callback(_keep_changes, module, hook, versions)  # before weights are offloaded
                yield
        finally:
            hook.execution_device = usual
        return
    before: dict[str, torch.Tensor] = {}
    if device is not None:
        # The same parameter objects return at the end, as optimizers have them.
        before = {name: value for name, value in module._parameters.items() if value is not None}
        for name, value in before.items():
            module._parameters[name] = move(value, value, device)  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, value in before.items():
            current = module._parameters[name]
            if current is not None and current is not value and META not in (current.device, value.device):
                with torch.no_grad():
                    value.copy_(current)  # changes made meanwhile
            module._parameters[name] = value  # type: ignore[assignment]


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: Device | int = "cpu",
) -> dict[str, Any]:
    """Fill in the tensors of a module, wherever they are kept.

    Args:
        module: The module that has the tensor.
        module_name: The full name of one of its tensors; the part before the last dot is the module's name.
        state_dict: What is filled in: with each tensor of the module whose full name is a key.
        device_to_put_offload: Device of the tensors.

    Returns:
        `state_dict`.
    """
    prefix = module_name.rpartition(".")[0]
    device = as_device(device_to_put_offload)
    with align_module_device(module, device):
        for name, value in module.state_dict().items():
            key = f"{prefix}.{name}" if prefix else name
            if key in state_dict:
                state_dict[key] = value.to(device) if isinstance(value, torch.Tensor) else value
    return state_dict


def _version(value: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    return value, 0 if value is None or value.is_inference() else value._version


def _is_quantized(value: torch.Tensor) -> bool:
    """Whether a weight has its own form: of bitsandbytes, or made of other tensors (torchao)."""
    return type(value).to is not torch.Tensor.to or hasattr(value, "__tensor_flatten__")


def _keep_changes(module: nn.Module, hook: AlignDevicesHook, versions: dict[str, Any]) -> None:
    """Store changed offloaded parameters; otherwise the old values would be loaded the next time."""
    for slot in hook.slots:
        current = slot.table.get(slot.leaf)
        # A buffer that has changed stays in the module.
        if slot.is_buffer or current is None or current.is_meta:
            continue
        assert hook.weights_map is not None
        stored = hook.weights_map[slot.name]
        if current is stored:
            continue
        if _is_quantized(stored):
            was, version = versions[slot.name]
            if current is not was or _version(current)[1] != version:
                raise ValueError(
                    f"{slot.name} of {type(module).__name__} is quantized ({type(stored).__name__}) and "
                    "offloaded, so changes to it cannot be stored: remove its hook first "
                    "(accel.hooks.remove_hook_from_submodules)."
                )
            continue
        if current.shape != stored.shape:
            raise ValueError(
                f"{slot.name} of {type(module).__name__} now has the shape {list(current.shape)}, but "
                f"{list(stored.shape)} where it is offloaded: remove its hook first."
            )
        if current.data_ptr() == stored.data_ptr():
            continue
        if not torch.equal(current, move(stored, current, current.device)):
            replace_offloaded(hook.weights_map, slot.name, current.detach().cpu())


def _offloading(module: nn.Module) -> AlignDevicesHook | None:
    for hook in hooks_of(module):
        if isinstance(hook, AlignDevicesHook) and hook.offload:
            return hook
    return None
