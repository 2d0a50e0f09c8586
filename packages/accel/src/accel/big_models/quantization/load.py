"""Models whose linear layers bitsandbytes quantizes to 8 or 4 bits while their weights are loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accel.big_models.hooks.align import as_device
from accel.big_models.placement.memory import STRATEGIES, get_max_memory
from accel.big_models.quantization.config import BnbQuantizationConfig
from accel.big_models.quantization.layers import QuantizedLayers, check_weights
from accel_ckpt.weights.by_name import Slots
from accel_ckpt.weights.files import find_weight_files
from accel_ckpt.weights.load import load_state_dict
from accel_ckpt.weights.placement import DeviceMap, Placing
from accel_ops.module_sizes import compute_module_sizes
from accel_state.imports.packages import require
from accel_state.logging.warning import warn
from accel_state.process.state import current_process

__all__ = ["has_4bit_bnb_layers", "load_and_quantize_model"]

Folder = str | os.PathLike[str]


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: Folder | None = None,
    device_map: Any = None,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    offload_folder: Folder | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Quantize the linear layers of a model, each as soon as its weight is read.

    Args:
        model: A model on the meta device (`init_empty_weights`), or one that has its weights.
        bnb_quantization_config: 8 or 4 bits, and what is not quantized.
        weights_location: Weights to load, as `load_checkpoint_in_model` takes them; weights that
            `save_model` wrote of a quantized model too. By default the model's own are quantized.
        device_map: Device by name of a module, the same for all; by default that of this process. Or "auto"
            ("balanced", "balanced_low_0", "sequential"): the first device with room for all, accelerators
            before the CPU.
        no_split_module_classes: Without effect: the model is whole on one device.
        max_memory: Bytes (or text such as "1GB") by device, for a map that is made here; by default what is
            free.
        offload_folder: Without effect.
        offload_state_dict: As in `load_checkpoint_in_model`: without effect, files serve for that.

    Returns:
        The model; its linear layers are replaced.

    Raises:
        ImportError: If bitsandbytes is not installed; it names the extra.
        TypeError: If the configuration is no `BnbQuantizationConfig`.
        ValueError: If weights are missing: a model on the meta device needs them all; or the device map does
            not cover the model, names a device that is not there, or is unknown text.
        NotImplementedError: If the device map spreads the model over devices or offloads it, or no device has
            room for all of it.
        RuntimeError: If a shape differs.
        CheckpointError: If a file is damaged.

    Example:
        >>> with init_empty_weights():
        ...     model = Net()
        >>> config = BnbQuantizationConfig(load_in_8bit=True)
        >>> model = load_and_quantize_model(model, config, weights_location="weights")
    """
    config = bnb_quantization_config
    if not isinstance(config, BnbQuantizationConfig):
        raise TypeError(
            f"bnb_quantization_config must be a BnbQuantizationConfig, not {type(config).__name__}."
        )
    require("bitsandbytes", extra="bitsandbytes")
    if weights_location is None and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is on the meta device, and has no weights to quantize: say where they "
            "are with weights_location."
        )
    files = [] if weights_location is None else find_weight_files(weights_location)
    ignored: dict[str, Any] = {
        "no_split_module_classes": no_split_module_classes,
        "offload_folder": offload_folder,
    }
    if not isinstance(device_map, str):
        ignored["max_memory"] = max_memory
    for name, value in ignored.items():
        if value is not None:
            warn(f"{name} is ignored: a quantized model is whole on one device.")
    names = _layers_to_quantize(model, config)
    if not names:
        warn(f"{type(model).__name__} has no linear layer that is quantized; see skip_modules.")
    if isinstance(device_map, str):
        device_map = {"": _first_with_room(model, names, config, device_map, max_memory)}
    device_map = _device(model, device_map)
    placing = Placing.of(device_map, None, config.torch_dtype, False, config.keep_in_fp32_modules)
    # Before layers are replaced, which have these weights.
    own = {} if files else dict(model.state_dict())
    # All is compared before the model changes, for which files are read twice.
    surplus = check_weights(model, names, config, _read(files) if files else own.items())
    if surplus:
        warn(f"Weights that {type(model).__name__} does not have are ignored: {', '.join(surplus)}.")
    layers = QuantizedLayers(model, names, config)
    _fill(model, layers, placing, device_map, _read(files) if files else _drain(own))
    return model.to(device=device_map[""])


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return whether a layer of a model is one of bitsandbytes' 4-bit layers.

    Args:
        model: The model.
    """
    bnb: Any = sys.modules.get("bitsandbytes")  # a layer can only be of a loaded module
    return bnb is not None and any(isinstance(module, bnb.nn.Linear4bit) for module in model.modules())


def _layers_to_quantize(model: nn.Module, config: BnbQuantizationConfig) -> list[str]:
    modules = dict(model.named_modules())
    kept = [*(config.skip_modules or ()), *(config.keep_in_fp32_modules or ())]
    for name in kept:
        if not any(_is_in(name, path) for path in modules):
            warn(f"{name!r} in skip_modules or keep_in_fp32_modules is no module of {type(model).__name__}.")
    if config.skip_modules is None:
        kept += _output_layers(model)
    return [
        path
        for path, module in modules.items()
        # Of this very class: a derived one may compute otherwise, or have its weight read by its parent.
        if type(module) is nn.Linear and not any(_is_in(name, path) for name in kept)
    ]


def _output_layers(model: nn.Module) -> list[str]:
    """Return the last layer, and layers that share their weight with another module."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    shared = [path for paths in owners.values() if len(paths) > 1 for path in paths]
    leaves = [path for path, module in model.named_modules() if path and not any(module.children())]
    return [*shared, *leaves[-1:]]


def _is_in(name: str, path: str) -> bool:
    """Return whether a name, or the end of a dotted path, leads to a module or to one around it."""
    return f".{name}." in f".{path}."


def _first_with_room(
    model: nn.Module,
    names: list[str],
    config: BnbQuantizationConfig,
    strategy: str,
    max_memory: dict[int | str, int | str] | None,
) -> int | str:
    """Return the first device that has room for a model as it is after it was quantized."""
    if strategy not in STRATEGIES:
        raise ValueError(
            f"device_map must be a dict of devices by name of a module, or one of {', '.join(STRATEGIES)}, "
            f"not {strategy!r}."
        )
    kept = {
        name: torch.float32
        for name, _ in model.named_parameters()
        if any(_is_in(module, name) for module in config.keep_in_fp32_modules or ())
    }
    quantized = {f"{name}.weight": config.target_dtype for name in names}
    needed = compute_module_sizes(model, config.torch_dtype, {**kept, **quantized})[""]
    memory = {device: size for device, size in get_max_memory(max_memory).items() if device != "disk"}
    for device, size in memory.items():
        if needed <= size:
            return device
    rooms = ", ".join(f"{device}: {size:.0f}" for device, size in memory.items())
    raise NotImplementedError(
        f"{type(model).__name__} takes {needed:.0f} bytes when it is quantized, and no device has as much "
        f"({rooms or 'none'}): a quantized model is whole on one device. Quantize to fewer bits, or give "
        "more in max_memory."
    )


def _device(model: nn.Module, device_map: Any) -> dict[str, Any]:
    """Return the map of a model that is whole on one device."""
    if device_map is None:
        return {"": current_process().device}
    Placing.of(device_map, "", None, False, None).check(Slots(model))
    devices = set(map(str, device_map.values()))
    if len(devices) > 1 or "disk" in devices:
        raise NotImplementedError(
            f"device_map puts {type(model).__name__} on {', '.join(sorted(devices))}: a quantized model is "
            "whole on one device, in memory. Give it one, as in {'': 'cpu'}."
        )
    return {"": as_device(next(iter(device_map.values())))}


def _read(files: list[Any]) -> Iterator[tuple[str, Any]]:
    for file in files:
        yield from load_state_dict(file).items()


def _drain(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give a model's weights one by one, and let go of each."""
    for name in list(state):
        yield name, state.pop(name)


def _fill(
    model: nn.Module,
    layers: QuantizedLayers,
    placing: Placing,
    device_map: DeviceMap,
    weights: Iterator[tuple[str, Any]],
) -> None:
    """Quantize the weights of quantized layers, and place the others."""
    slots = Slots(model)
    for name, value in weights:
        if not layers.take(name, value, device_map) and name in slots:
            placing.place(slots, name, value)
    layers.finish(device_map)
    placing.finish()
