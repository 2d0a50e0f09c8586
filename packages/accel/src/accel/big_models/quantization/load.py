"""Models whose linear layers bitsandbytes quantizes to 8 or 4 bits while their weights are loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accel.big_models.dispatch import dispatch_model
from accel.big_models.placement.requested import check_placement, make_device_map
from accel.big_models.quantization.config import BnbQuantizationConfig
from accel.big_models.quantization.layers import QuantizedLayers, check_weights
from accel_ckpt.weights.files import WeightFile, find_weight_files
from accel_ckpt.weights.load import load_state_dict
from accel_ckpt.weights.model_tensors import ModelTensors
from accel_ckpt.weights.placement import DeviceMap, WeightPlacement
from accel_state.imports.packages import require
from accel_state.logging.warning import warn
from accel_state.process.state import current_process

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
        bnb_quantization_config: 8 or 4 bits, and the modules to skip.
        weights_location: Weights to load, as for `load_checkpoint_in_model`; also weights that
            `save_model` wrote of a quantized model. By default the model's own are quantized.
        device_map: Device by name of a module, or "auto" ("balanced", "balanced_low_0", "sequential") to make
            such a map, for which quantized weights count with their bits. The model is dispatched as by
            `dispatch_model`; offloaded weights are quantized too. None: all on this process's device.
        no_split_module_classes: Names of classes whose instances stay on one device, for such a map.
        max_memory: Bytes (or text such as "1GB") by device, likewise; by default the free memory.
        offload_folder: The folder for weights on "disk".
        offload_state_dict: No effect, as in `load_checkpoint_in_model`.

    Returns:
        The model; its linear layers are replaced.

    Raises:
        ImportError: If bitsandbytes is not installed; the message names the extra.
        TypeError: If the configuration is not a `BnbQuantizationConfig`, or the device map not a mapping.
        ValueError: If weights are missing: a model on the meta device needs them all; or the device map does
            not cover the model, names a device that does not exist, has "disk" without an `offload_folder`,
            or is unknown text.
        RuntimeError: If a shape differs. In all these cases the model is unchanged.
        CheckpointError: If a file is damaged.
        OSError: If a weight cannot be written to the folder. After an error while weights are placed, those
            that were on the meta device are on it again.

    Example:
        >>> with init_empty_weights():
        ...     model = Net()
        >>> config = BnbQuantizationConfig(load_in_8bit=True)
        >>> model = load_and_quantize_model(model, config, weights_location="weights")
    """
    config = bnb_quantization_config
    files = _check_arguments(model, config, weights_location)
    names = _layers_to_quantize(model, config)
    if not names:
        warn(f"{type(model).__name__} has no linear layer that is quantized; see skip_modules.")
    placed = _read_map(model, names, config, device_map, max_memory, no_split_module_classes, offload_folder)
    placement = WeightPlacement.from_options(
        placed, offload_folder, config.torch_dtype, False, config.keep_in_fp32_modules, in_place=True
    )
    # Before the layers with these weights are replaced.
    original = {} if files else dict(model.state_dict())
    # Everything is compared before the model changes, so files are read twice.
    surplus = check_weights(model, names, config, _read(files) if files else original.items())
    placement.check_folder(
        ModelTensors(model), ((name, value, None) for name, value in model.state_dict().items())
    )
    if surplus:
        warn(f"Weights that {type(model).__name__} does not have are ignored: {', '.join(surplus)}.")
    layers = QuantizedLayers(model, names, config)
    _load_weights(model, layers, placement, _read(files) if files else _drain(original))
    if device_map is None:
        return model.to(device=placed[""])
    return dispatch_model(model, placed, offload_dir=offload_folder, offload_index=placement.index)


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return whether a layer of a model is one of bitsandbytes' 4-bit layers.

    Args:
        model: The model.
    """
    bnb: Any = sys.modules.get("bitsandbytes")  # otherwise no layer can be one of these
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
        # Of exactly this class: a subclass may compute differently, or its parent may read its weight.
        if type(module) is nn.Linear and not any(_is_in(name, path) for name in kept)
    ]


def _output_layers(model: nn.Module) -> list[str]:
    """Return the last layer, and layers that share their weight with another module."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    shared = [path for paths in owners.values() if len(paths) > 1 for path in paths]
    # Every output has the rounding of the last layer; a shared weight would be quantized for both.
    leaves = [path for path, module in model.named_modules() if path and not any(module.children())]
    return [*shared, *leaves[-1:]]


def _is_in(name: str, path: str) -> bool:
    """Return whether a name, or the end of a dotted path, matches a module or one that contains it."""
    # With dots at both ends, so that "fc1" does not match "fc10".
    return f".{name}." in f".{path}."


def _check_arguments(model: nn.Module, config: Any, weights_location: Folder | None) -> list[WeightFile]:
    """Check what does not depend on the device map; return the files of the weights."""
    if not isinstance(config, BnbQuantizationConfig):
        raise TypeError(
            f"bnb_quantization_config must be a BnbQuantizationConfig, not {type(config).__name__}."
        )
    require("bitsandbytes", extra="bitsandbytes")
    if weights_location is not None:
        return find_weight_files(weights_location)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is on the meta device, and has no weights to quantize: pass "
            "weights_location."
        )
    return []


def _read_map(
    model: nn.Module,
    names: list[str],
    config: BnbQuantizationConfig,
    device_map: Any,
    max_memory: dict[int | str, int | str] | None,
    no_split_module_classes: list[str] | None,
    offload_folder: Folder | None,
) -> DeviceMap:
    """Return a device map that fits the model and the machine; for a strategy, one is made."""
    if device_map is None:
        device_map = {"": current_process().device}
    if isinstance(device_map, str):
        sizes: dict[str, Any] = {
            name: torch.float32
            for name, _ in model.named_parameters()
            if any(_is_in(module, name) for module in config.keep_in_fp32_modules or ())
        }
        sizes |= {f"{name}.weight": config.target_dtype for name in names}
        device_map = make_device_map(
            model, device_map, max_memory, no_split_module_classes, config.torch_dtype, special_dtypes=sizes
        )
    else:
        for name, value in (
            ("max_memory", max_memory),
            ("no_split_module_classes", no_split_module_classes),
        ):
            if value is not None:
                warn(f"{name} is ignored: it applies only to strategies such as device_map='auto'.")
    check_placement(model, device_map)
    on_disk = [name for name, device in device_map.items() if str(device) == "disk"]
    if on_disk and offload_folder is None:
        raise ValueError(
            f"device_map puts {', '.join(map(repr, on_disk))} on the disk: pass offload_folder=."
        )
    found: DeviceMap = device_map
    return found


def _read(files: list[WeightFile]) -> Iterator[tuple[str, Any]]:
    for file in files:
        yield from file.select(load_state_dict(file.path)).items()


def _drain(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a model's weights one by one, dropping the reference to each."""
    for name in list(state):
        yield name, state.pop(name)


def _load_weights(
    model: nn.Module, layers: QuantizedLayers, placement: WeightPlacement, weights: Iterator[tuple[str, Any]]
) -> None:
    """Quantize the weights of quantized layers, and place the others."""
    targets = ModelTensors(model)
    try:
        for name, value in weights:
            if not layers.take(name, value, placement) and name in targets:
                placement.place(targets, name, value)
        layers.finish(placement)
        placement.finish()
    except BaseException:
        placement.undo(targets)
        layers.undo()
        raise
