"""torchao: linear layers that multiply in fp8, with the parameters that they had."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from accel_state.imports.available import is_torchao_available
from accel_state.imports.packages import install_hint, require
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.precision.fp8.recipes import AORecipeKwargs

_P = ParamSpec("_P")
_R = TypeVar("_R")


def torchao_required(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that needs torchao: without it, calling raises ImportError with what to install."""

    @functools.wraps(func)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not is_torchao_available():
            raise ImportError(
                f"{func.__name__} needs torchao (0.6.1 or newer). Install it with: {install_hint('fp8')}"
            )
        return func(*args, **kwargs)

    return checked


def has_ao_layers(model: torch.nn.Module) -> bool:
    """Return whether a layer of the model is torchao's.

    Args:
        model: The model.
    """
    module: Any = sys.modules.get("torchao.float8.float8_linear")  # a layer can only be of a loaded module
    return module is not None and any(isinstance(layer, module.Float8Linear) for layer in model.modules())


def filter_first_and_last_linear_layers(module: torch.nn.Module, fqn: str) -> bool:
    """Return whether a linear layer is neither the first nor the last of a model.

    These two take the input and give the output, where rounding hurts most: training stays stable when they
    compute in higher precision.

    Args:
        module: The model.
        fqn: The layer's name in it.

    Returns:
        True for a linear layer to be computed in fp8.
    """
    return fqn in _inner_linear_layers(module)


@torchao_required
def convert_model_to_fp8_ao(
    model: torch.nn.Module,
    config: Any = None,
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None,
) -> None:
    """Replace linear layers by ones that multiply in fp8, in place.

    The parameters stay the same objects, unless `config` has FSDP2 gather them in fp8.

    Args:
        model: The model, before it is wrapped.
        config: torchao's `Float8LinearConfig`; default: tensorwise scaling.
        module_filter_func: Called with each linear layer and its name; True to replace it. By default all
            but the first and the last one, and but those that GPUs cannot multiply in fp8 (sizes that are
            no multiples of 16).

    Raises:
        ImportError: If torchao is not installed.
        ValueError: If the model is a linear layer itself, which cannot be replaced in place.
    """
    if isinstance(model, torch.nn.Linear):  # torchao returns another layer, where the caller keeps this one
        raise ValueError("convert_model_to_fp8_ao got a single linear layer: put it into a model.")
    # torchao's filter sees one layer and its name at a time, and the first and last are of the whole model.
    wanted = module_filter_func
    if wanted is None or wanted is filter_first_and_last_linear_layers:
        inner = frozenset(
            name
            for name in _inner_linear_layers(model)
            if wanted is not None or _fits(model.get_submodule(name))
        )
        wanted = functools.partial(_is_among, inner)
    convert = require("torchao.float8", "fp8").convert_to_float8_training
    convert(model, module_filter_fn=wanted, config=config)


def apply(model: torch.nn.Module, recipe: AORecipeKwargs, gathers: bool) -> None:
    """Convert a model as a recipe says; idempotent.

    Args:
        model: The model.
        recipe: The settings.
        gathers: Whether FSDP2 is going to shard it, and gathers its weights for computing.
    """
    if has_ao_layers(model):
        return
    if not gathers and recipe.asks_for("enable_fsdp_float8_all_gather"):
        warn(
            f"enable_fsdp_float8_all_gather is ignored for {type(model).__name__}: FSDP2 alone gathers "
            "weights, those of models that it trains. Leave it out, or set "
            "FullyShardedDataParallelPlugin(fsdp_version=2).",
        )
    convert_model_to_fp8_ao(model, recipe.build(gathers), recipe.module_filter_func)
    if not has_ao_layers(model):
        warn(
            f"mixed_precision='fp8' computes no layer of {type(model).__name__} in fp8, but in bf16: by "
            "default the first and the last linear layer, and those whose sizes are no multiples of 16, stay "
            "as they are. AORecipeKwargs(module_filter_func=...) chooses others.",
        )


def _inner_linear_layers(model: torch.nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)][1:-1]


def _is_among(names: frozenset[str], _layer: torch.nn.Module, name: str) -> bool:
    return name in names


def _fits(layer: torch.nn.Module) -> bool:
    # As torch._scaled_mm takes on GPUs.
    return isinstance(layer, torch.nn.Linear) and not (layer.in_features % 16 or layer.out_features % 16)
