"""The linear layers of a model that bitsandbytes quantizes, and their weights while they are loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from accel.big_models.parameters import on_meta
from accel.big_models.quantization.config import BnbQuantizationConfig
from accel_ckpt.weights.model_tensors import ModelTensors
from accel_ckpt.weights.placement import WeightPlacement, device_for, memory_device
from accel_state.imports.packages import require


class QuantizedLayers:
    """Quantized layers whose weights are being loaded.

    Args:
        model: The model, whose layers are replaced; the new ones have their weights on the meta device.
        names: Names of linear layers.
        config: 8 or 4 bits.
    """

    def __init__(self, model: nn.Module, names: list[str], config: BnbQuantizationConfig) -> None:
        self._bnb: Any = require("bitsandbytes", extra="bitsandbytes")
        self._config = config
        self._layers: dict[str, Any] = {}
        # By layer, what has been read so far of those that were saved quantized.
        self._saved_tensors: dict[str, dict[str, torch.Tensor]] = {}
        # Those without weights, to undo the loading; the others are freed one by one.
        self._empty: list[tuple[nn.Module, str, nn.Linear]] = []
        for name in names:
            path, _, leaf = name.rpartition(".")
            parent = model.get_submodule(path)
            linear: Any = getattr(parent, leaf)
            if linear.weight.is_meta:
                self._empty.append((parent, leaf, linear))
            self._layers[name] = layer = self._make(linear)
            setattr(parent, leaf, layer)

    def undo(self) -> None:
        """Restore the layers that had no weights."""
        for parent, leaf, linear in self._empty:
            setattr(parent, leaf, linear)

    def take(self, name: str, value: Any, placement: WeightPlacement) -> bool:
        """Take a weight of a checkpoint if it belongs to one of these layers and is not a bias.

        Args:
            name: Its name.
            value: The weight, as `check_weights` passed it; it is copied.
            placement: Its placement, which gets an entry if it is written to the disk.

        Returns:
            Whether it belongs to one of them.
        """
        path, leaf = _split(name, self._layers)
        if not path:
            return False
        if leaf == "weight" and value.is_floating_point():
            self._set(path, self._quantize(value).to(self._device(path, placement)), placement)
        else:
            self._saved_tensors.setdefault(path, {})[leaf] = value
        return True

    def finish(self, placement: WeightPlacement) -> None:
        """Set the weights of layers that were saved quantized.

        Args:
            placement: Their placement.
        """
        set_weight = self._saved_8bit if self._config.load_in_8bit else self._saved_4bit
        for path, tensors in self._saved_tensors.items():
            self._set(path, set_weight(tensors, self._device(path, placement)), placement)

    def _device(self, path: str, placement: WeightPlacement) -> str:
        assert placement.device_map is not None
        return memory_device(device_for(f"{path}.weight", placement.device_map))

    def _set(self, path: str, weight: Any, placement: WeightPlacement) -> None:
        """Set a layer's quantized weight; on "disk" it is written, but its statistics stay in memory."""
        assert placement.device_map is not None
        if str(device_for(f"{path}.weight", placement.device_map)) == "disk":
            placement.write(f"{path}.weight", weight)
            weight = on_meta(weight)
        self._layers[path].weight = weight

    def _make(self, linear: nn.Linear) -> Any:
        config, bias = self._config, linear.bias is not None
        sizes = (linear.in_features, linear.out_features, bias)
        # The weight is set later, so this one takes no memory.
        with torch.device("meta"):
            if config.load_in_8bit:
                layer = self._bnb.nn.Linear8bitLt(
                    *sizes, has_fp16_weights=False, threshold=config.llm_int8_threshold
                )
            else:
                layer = self._bnb.nn.Linear4bit(
                    *sizes,
                    compute_dtype=config.bnb_4bit_compute_dtype,
                    compress_statistics=config.bnb_4bit_use_double_quant,
                    quant_type=config.bnb_4bit_quant_type,
                )
        # Integers have no gradients.
        layer.weight.requires_grad_(False)
        layer.train(linear.training)
        if bias:
            layer.bias = linear.bias
        return layer

    def _quantize(self, value: torch.Tensor) -> Any:
        config, kinds = self._config, self._bnb.nn
        plain = value.detach().to(config.torch_dtype).contiguous()
        if config.load_in_8bit:
            return kinds.Int8Params(plain, requires_grad=False, has_fp16_weights=False)
        return kinds.Params4bit(
            plain,
            requires_grad=False,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
        )

    def _saved_8bit(self, tensors: dict[str, torch.Tensor], device: str) -> Any:
        # Copied, as the tensors may be mapped from the file.
        weight, scales = tensors["weight"].clone(), tensors["SCB"].clone()
        made = self._bnb.nn.Int8Params(
            weight, requires_grad=False, has_fp16_weights=False, CB=weight, SCB=scales
        )
        return made.to(device)

    def _saved_4bit(self, tensors: dict[str, torch.Tensor], device: str) -> Any:
        statistics = {leaf: value.clone() for leaf, value in tensors.items() if leaf != "weight"}
        return self._bnb.nn.Params4bit.from_prequantized(
            tensors["weight"].clone(), statistics, requires_grad=False, device=device
        )


def check_weights(
    model: nn.Module,
    names: Collection[str],
    config: BnbQuantizationConfig,
    weights: Iterable[tuple[str, Any]],
) -> list[str]:
    """Compare weights with a model, before it is changed.

    Args:
        model: The model, with its plain linear layers.
        names: Names of layers that will be quantized.
        config: 8 or 4 bits.
        weights: Weights by name.

    Returns:
        The names of weights that the model does not have.

    Raises:
        RuntimeError: If a shape differs.
        ValueError: If a layer was saved with another quantization, or a weight on the meta device is missing.
    """
    targets = ModelTensors(model)
    found: set[str] = set()
    saved: dict[str, set[str]] = {}
    surplus = []
    for name, value in weights:
        path, leaf = _split(name, names)
        if path and (leaf != "weight" or not value.is_floating_point()):
            saved.setdefault(path, set()).add(leaf)
            found.add(f"{path}.weight")
        elif name not in targets or not isinstance(value, torch.Tensor):
            surplus.append(name)
        elif value.shape != targets.get(name).shape:
            raise RuntimeError(
                f"{name} has the shape {list(value.shape)} in the weights and "
                f"{list(targets.get(name).shape)} in {type(model).__name__}."
            )
        else:
            found.update(targets.names(name))
    for path, leaves in saved.items():
        _check_saved_tensors(path, leaves, config)
    missing = [name for name, value in model.named_parameters() if value.is_meta and name not in found]
    if missing:
        raise ValueError(f"weights_location has no weights for: {', '.join(missing)}.")
    return surplus


def _check_saved_tensors(path: str, leaves: set[str], config: BnbQuantizationConfig) -> None:
    # What bitsandbytes saves in addition to a 4-bit weight; for one of 8 bits it is "SCB".
    four = any(".quant_state." in leaf for leaf in leaves)
    needed = {"weight"} if four else {"weight", "SCB"}
    if four == config.load_in_8bit or not needed <= leaves:
        raise ValueError(
            f"{path} was saved with {', '.join(sorted(leaves))}, which is not a layer quantized to "
            f"{8 if config.load_in_8bit else 4} bits. Load it with the configuration that it was quantized "
            "with, or from the weights before that."
        )


def _split(name: str, layers: Collection[str]) -> tuple[str, str]:
    """Split the name of a weight after its layer; ("", name) if it is the bias or of another layer."""
    segments = name.split(".")
    for length in range(1, len(segments)):
        path, leaf = ".".join(segments[:length]), ".".join(segments[length:])
        # Biases keep their dtype, and are placed like weights of other layers.
        if path in layers and leaf != "bias":
            return path, leaf
    return "", name
