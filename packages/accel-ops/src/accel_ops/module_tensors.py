"""The parameters and buffers of a module by name: listing, moving and replacing them, and which are tied."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import Parameter

from accel_ops.modules import unsaved_buffers
from accel_state.devices.table import DEVICES, existing_device
from accel_state.logging.warning import warn

Device = int | str | torch.device


def named_module_tensors(
    module: torch.nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """List the parameters of a module, then its buffers; a shared one once, under its first name.

    Args:
        module: The module.
        include_buffers: List the buffers too.
        recurse: List those of submodules too, by their full names.
        remove_non_persistent: Leave out buffers that are not in the state dict.

    Yields:
        Name and tensor.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    skipped: set[str] = set()
    if remove_non_persistent:
        for path, owner in module.named_modules() if recurse else [("", module)]:
            skipped.update(_join(path, name) for name in unsaved_buffers(owner))
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in skipped:
            yield name, buffer


def set_module_tensor_to_device(
    module: torch.nn.Module,
    tensor_name: str,
    device: Device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: dict[int, dict[torch.device, torch.Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move a parameter or buffer of a module to a device, or replace it by another tensor there.

    Its class and attributes are kept: a parameter of bitsandbytes is quantized on its way to the device as
    bitsandbytes does it, and a DTensor takes its shard of a full value.

    Args:
        module: The module.
        tensor_name: Full name of the tensor.
        device: Where it goes; an integer counts the accelerators, and "meta" drops its values.
        value: What it becomes, of the same shape; needed for a tensor that is on the meta device. It is
            copied only if device or dtype differ.
        dtype: What it is cast to; by default its present dtype.
        fp16_statistics: Scales of the rows of a weight that bitsandbytes quantized to 8 bits, which become
            its attribute `SCB`.
        tied_params_map: Per address of a tied weight's values, the tensors with these values by device. A
            weight whose address is a key takes the tensor of its device from here, or is recorded here once
            it has been moved.
        non_blocking: Copy asynchronously with respect to the host, where memory allows.
        clear_cache: Release the accelerators' cached memory afterwards. That takes time; leave it out where
            many tensors move.

    Raises:
        ValueError: If there is no such tensor or device, if the value has another shape, or if the tensor is
            on the meta device and has no value.

    Example:
        >>> layer = torch.nn.Linear(2, 3, device="meta")
        >>> set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(3, 2))
        >>> layer.weight.device.type
        'cpu'
    """
    owner, name = _find_owner(module, tensor_name)
    old = _tensor_dict(owner, name)[name]
    assert old is not None
    target = _read_device(device)
    _check_value(tensor_name, old, value, target)
    # Only where it is requested: an address is read from the tensor's storage.
    address = _address(old if value is None else value) if tied_params_map else 0
    # Tied weights on one device share one copy: that of the first.
    on_devices = tied_params_map.get(address) if tied_params_map and address else None
    new = on_devices.get(target) if on_devices else None
    if new is None:
        try:
            new = move_tensor(old, value, target, read_dtype(dtype), non_blocking)
        except (RuntimeError, AssertionError):
            existing_device(target)  # one that is not here is named; anything else is as torch says it
            raise
    if fp16_statistics is not None:
        new.SCB = fp16_statistics.to(target)  # type: ignore[attr-defined]
    if new is not old:
        _set_tensor(owner, name, new)
    if on_devices is not None and target.type != "meta":
        on_devices[target] = new
    if clear_cache:
        for kind in {old.device.type, target.type} - {"cpu"} & DEVICES.keys():
            DEVICES[kind].empty_cache()


def read_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return a dtype of torch that is given by itself or by name ("bfloat16", "torch.bfloat16").

    Raises:
        ValueError: If there is none of that name.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    torch_dtype = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(f"dtype must be a dtype of torch or its name, such as 'bfloat16', not {dtype!r}.")
    return torch_dtype


def find_tied_parameters(model: torch.nn.Module, **kwargs: Any) -> list[list[str]]:
    """Find parameters that are one object under several names.

    Args:
        model: The model.
        **kwargs: Without effect; the documented interface has them for calls of the function by itself.

    Returns:
        A list of names for each tied parameter, in the order of the model.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> model[1].weight = model[0].weight
        >>> find_tied_parameters(model)
        [['0.weight', '1.weight']]
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def retie_parameters(model: torch.nn.Module, tied_params: Iterable[Iterable[str]]) -> None:
    """Make parameters one object again whose tie was broken, as when each was replaced by itself.

    Of each group the first parameter that is not on the meta device is kept, or else the first.

    Args:
        model: The model.
        tied_params: What `find_tied_parameters` returned.

    Raises:
        ValueError: If the model has no such parameter.
    """
    for group in tied_params:
        slots = [_find_owner(model, name) for name in group]
        tensors = [_tensor_dict(owner, name)[name] for owner, name in slots]
        remaining = next((tensor for tensor in tensors if tensor is not None and not tensor.is_meta), None)
        for owner, name in slots:
            _set_tensor(owner, name, tensors[0] if remaining is None else remaining)


def check_tied_parameters_in_config(model: torch.nn.Module) -> bool:
    """Check whether a model of transformers ties some of its weights.

    Args:
        model: The model.

    Returns:
        Whether its configuration requests tied embeddings and it has output embeddings to tie, or for an
        encoder that is tied to the decoder; False for models of other libraries.
    """
    # Where transformers is not imported, no model can be of it.
    transformers: Any = sys.modules.get("transformers.modeling_utils")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return False
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    embeddings = getattr(text, "tie_word_embeddings", False) and model.get_output_embeddings() is not None
    halves = getattr(text, "is_encoder_decoder", False) and getattr(text, "tie_encoder_decoder", False)
    return bool(embeddings or halves)


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Iterable[str]], device_map: Mapping[str, Device]
) -> None:
    """Warn of tied parameters that a device map puts on different devices.

    Args:
        tied_params: What `find_tied_parameters` returned.
        device_map: Device by name of a module or tensor, "" for the full model.

    Raises:
        ValueError: If the map leaves one of the parameters out.
    """
    for group in tied_params:
        devices = {name: _mapped(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            warn(
                f"Tied parameters are on different devices: {devices}. Each device has its own copy. "
                "Give their modules one device in the device map, or use device_map='auto'."
            )


def _mapped(name: str, device_map: Mapping[str, Device]) -> Device:
    place = name
    while place not in device_map:
        if not place:
            raise ValueError(
                f"device_map says nothing about {name}. It has: {', '.join(map(repr, device_map))}. Add its "
                'module, or "" for all others.'
            )
        place = place.rpartition(".")[0]
    return device_map[place]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _find_owner(module: torch.nn.Module, tensor_name: str) -> tuple[torch.nn.Module, str]:
    path, _, name = tensor_name.rpartition(".")
    owner = module
    for child_name in path.split(".") if path else ():
        # Not get_submodule, whose error does not name the tensor.
        torch_dtype = owner._modules.get(child_name)
        if torch_dtype is None:
            raise ValueError(
                f"{type(module).__name__} has no tensor {tensor_name!r}: {type(owner).__name__} has no "
                f"module {child_name!r}."
            )
        owner = torch_dtype
    if _tensor_dict(owner, name).get(name) is None:
        tensor_names = [*owner._parameters, *owner._buffers]
        raise ValueError(
            f"{type(module).__name__} has no tensor {tensor_name!r}: {type(owner).__name__} has no parameter "
            f"or buffer {name!r}. It has: {', '.join(tensor_names) or 'none'}."
        )
    return owner, name


def _tensor_dict(owner: torch.nn.Module, name: str) -> dict[str, Any]:
    return owner._parameters if name in owner._parameters else owner._buffers


def _set_tensor(owner: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    # Recurrent layers keep a second list, which assignment brings up to date.
    if "_flat_weights" in vars(owner):
        setattr(owner, name, tensor)
    else:
        _tensor_dict(owner, name)[name] = tensor


def _read_device(device: Device) -> torch.device:
    if isinstance(device, torch.device):
        return device
    try:
        return torch.device(device)
    except RuntimeError:
        return existing_device(device)


def _check_value(
    tensor_name: str, old: torch.Tensor, value: torch.Tensor | None, target: torch.device
) -> None:
    if value is None:
        if old.is_meta and target.type != "meta":
            raise ValueError(
                f"{tensor_name} is on the meta device, where it has no values: give its values for {target} "
                "with value=."
            )
    elif value.shape != old.shape:
        raise ValueError(
            f"{tensor_name} has the shape {tuple(old.shape)}, and the value given has {tuple(value.shape)}. "
            "Give a value of its shape."
        )


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's values begin; 0 for one without its own memory."""
    return 0 if type(tensor.detach()) is not torch.Tensor else tensor.data_ptr()


@torch.no_grad()
def move_tensor(
    old: torch.Tensor,
    value: torch.Tensor | None,
    device: torch.device,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
) -> torch.Tensor:
    """Return a tensor of the class of another, with its attributes, on a device.

    Args:
        old: A parameter or buffer.
        value: The values; by default those of `old`.
        device: Where they go.
        dtype: What they are cast to; by default the dtype of `old`.
        non_blocking: Copy asynchronously with respect to the host, where memory allows.

    Returns:
        `old` itself if nothing changes.

    Raises:
        ValueError: If `old` is of a custom tensor class, and the value is a plain tensor.
    """
    if value is None and old.device == device and dtype in (None, old.dtype):
        return old
    data = (old if value is None else _as_replacement(old, value)).detach()
    dtype = dtype or _target_dtype(old, data)
    if not isinstance(old, Parameter):
        return data.to(device, dtype, non_blocking=non_blocking)
    if type(data) is not torch.Tensor:  # DTensor and torchao: tensors that are made of others
        return _with_attributes(old, Parameter(data.to(device, dtype, non_blocking=non_blocking), False))
    # A class with a custom `to` (bitsandbytes) is moved by it, and drops its statistics on the meta device.
    if type(old).to is torch.Tensor.to or device.type == "meta":
        return _of_class(old, data.to(device, dtype, non_blocking=non_blocking))
    new = _of_class(old, data.to(dtype=dtype)).to(device, non_blocking=non_blocking)
    return _with_attributes(old, new) if type(new) is type(old) else _of_class(old, new.detach())


def _as_replacement(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value as a tensor that can replace `old`: a DTensor takes its shard."""
    if not hasattr(old, "__tensor_flatten__") or hasattr(value, "__tensor_flatten__"):
        return value
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    if tensor is None or not isinstance(old, tensor.DTensor):
        raise ValueError(
            f"the parameter is a {type(old).__name__}, and its value a plain tensor, which would replace it. "
            f"Give a {type(old).__name__}, or set the value before the model is converted."
        )
    # None: each process takes its part of what it has, without communication.
    shard: torch.Tensor = tensor.distribute_tensor(
        value.detach(), old.device_mesh, old.placements, src_data_rank=None
    )
    return shard


def _target_dtype(old: torch.Tensor, data: torch.Tensor) -> torch.dtype:
    """Return the dtype of `old`, or of the data if that is quantized for a class of quantized weights."""
    quantized = (
        old.is_floating_point() and not data.is_floating_point() and type(old).to is not torch.Tensor.to
    )
    return data.dtype if quantized else old.dtype


def _of_class(old: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Make a parameter of the class of `old`, with its attributes, from plain data."""
    differentiable = data.is_floating_point() or data.is_complex()
    # What torch.nn.Parameter's constructor calls; classes of quantized weights
    # have their own constructors.
    new: torch.Tensor = torch.Tensor._make_subclass(type(old), data, old.requires_grad and differentiable)
    return _with_attributes(old, new)


def _with_attributes(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Copy the attributes that a parameter lacks from `old`."""
    if new.requires_grad != old.requires_grad and (new.is_floating_point() or new.is_complex()):
        new.requires_grad_(old.requires_grad)
    for key, attribute in vars(old).items():
        if new.is_meta and isinstance(attribute, torch.Tensor) and _address(attribute) == _address(old) != 0:
            attribute = (
                new.detach()
            )  # int8 weights know themselves under a second name, which must not hold them
        if key == "quant_state":  # of 4-bit weights, whose layer changes those of the weight that runs
            attribute = copy.copy(attribute)
        vars(new).setdefault(key, attribute)
    return new
