"""Transformer Engine: its layers in place of torch's, and forward in its fp8 autocast."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from accel_state.imports.packages import install_hint
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.precision.fp8.recipes import TERecipeKwargs


def library() -> Any:
    """Import Transformer Engine's module for torch.

    Raises:
        ImportError: If it, or its part for torch, is not installed; the message names what to install.
    """
    try:
        return import_module("transformer_engine.pytorch")
    except Exception as error:  # the package without its compiled parts raises RuntimeError
        raise ImportError(
            f"transformer_engine.pytorch cannot be imported ({type(error).__name__}: {error}). Install it "
            f"on NVIDIA GPUs with: {install_hint('transformer-engine')}, or train with torchao: "
            f"kwargs_handlers=[AORecipeKwargs()] and {install_hint('fp8')}."
        ) from error


def has_transformer_engine_layers(model: torch.nn.Module) -> bool:
    """Return whether a layer of the model is Transformer Engine's.

    Args:
        model: The model.
    """
    te: Any = sys.modules.get("transformer_engine.pytorch")  # a layer can only be of a loaded module
    if te is None:
        return False
    kinds = (te.LayerNorm, te.Linear, te.LayerNormLinear, te.LayerNormMLP, te.TransformerLayer)
    return any(isinstance(layer, kinds) for layer in model.modules())


def convert_model(
    model: torch.nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> None:
    """Replace the linear and norm layers inside a model by Transformer Engine's, or the other way round.

    The parameters stay the same objects, so that optimizers and ties keep theirs. Linear layers whose sizes
    are not multiples of 16 stay, because fp8 kernels cannot multiply them.

    Args:
        model: The model, changed in place.
        to_transformer_engine: False to put torch's layers back.
        _convert_linear: Whether linear layers are replaced.
        _convert_ln: Whether `LayerNorm` layers are replaced.

    Raises:
        ImportError: If Transformer Engine is not installed.
    """
    te = library()
    source, target = (torch.nn, te) if to_transformer_engine else (te, torch.nn)
    with torch.no_grad():
        for name, child in model.named_children():
            if _convert_linear and isinstance(child, source.Linear) and _fits(child):
                made = _linear(target, child)  # with the same parameter objects
            elif _convert_ln and isinstance(child, source.LayerNorm) and child.weight is not None:
                made = _norm(target, child)
            else:
                convert_model(child, to_transformer_engine, _convert_linear, _convert_ln)
                continue
            made.train(child.training)
            setattr(model, name, made)


def _linear(target: Any, layer: Any) -> torch.nn.Module:
    bias = layer.bias if isinstance(layer.bias, torch.nn.Parameter) else None  # te's is an empty tensor
    made: torch.nn.Module = target.Linear(
        layer.in_features,
        layer.out_features,
        bias=bias is not None,
        **_made_for(target, layer.weight),
    )
    # The same parameter, which an optimizer may have already.
    made.weight = layer.weight
    if bias is not None:
        made.bias = bias
    return made


def _norm(target: Any, layer: Any) -> torch.nn.Module:
    made: torch.nn.Module = target.LayerNorm(
        tuple(layer.weight.shape), eps=layer.eps, **_made_for(target, layer.weight)
    )
    made.weight, made.bias = layer.weight, layer.bias
    return made


def _made_for(target: Any, weight: torch.Tensor) -> dict[str, Any]:
    name = "dtype" if target is torch.nn else "params_dtype"
    return {name: weight.dtype, "device": weight.device}


def _fits(layer: Any) -> bool:
    # What fp8 matrix products on NVIDIA GPUs take.
    return not (layer.in_features % 16 or layer.out_features % 16)


def recipe_arguments(handler: TERecipeKwargs, known: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of one of the library's recipe classes for a handler's settings, without the format.

    Args:
        handler: The settings.
        known: The arguments that the installed version's class takes.

    Returns:
        Arguments by name. A setting that the version does not know is left out, with a warning where it
        differs from what the version always does.
    """
    # What versions without these settings do.
    always = {"interval": 1, "override_linear_precision": (False, False, False)}
    names = ["margin"]
    if not handler.use_mxfp8_block_scaling:
        names += ["interval", "amax_history_len", "amax_compute_algo", "override_linear_precision"]
    values = {name: getattr(handler, name) for name in names}
    for name in [name for name in values if name not in known]:
        value = values.pop(name)
        if value != always.get(name):
            warn(
                f"TERecipeKwargs({name}={value!r}) is ignored: the installed version of Transformer Engine "
                "has no such setting. Leave it out.",
            )
    return values


def apply_fp8_autowrap(model: torch.nn.Module, fp8_recipe_handler: TERecipeKwargs | None) -> torch.nn.Module:
    """Make a model with Transformer Engine's layers compute in fp8.

    Args:
        model: The model, changed in place.
        fp8_recipe_handler: The settings; None for the defaults.

    Returns:
        `model`.

    Raises:
        ImportError: If Transformer Engine is not installed.
    """
    from accel.precision.fp8.recipes import TERecipeKwargs

    library()
    handler = fp8_recipe_handler if fp8_recipe_handler is not None else TERecipeKwargs()
    recipes = import_module("transformer_engine.common.recipe")
    kind = recipes.MXFP8BlockScaling if handler.use_mxfp8_block_scaling else recipes.DelayedScaling
    arguments = recipe_arguments(handler, tuple(inspect.signature(kind).parameters))
    assert handler.fp8_format is not None, "filled when the handler was made"
    recipe = kind(fp8_format=getattr(recipes.Format, handler.fp8_format), **arguments)
    evaluates = bool(handler.use_autocast_during_eval)
    model.forward = contextual_fp8_autocast(model.forward, recipe, evaluates)
    return model


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Wrap a model's forward so that it runs in fp8, in evaluation only on request.

    Args:
        model_forward: The `forward` of a module, bound to it.
        fp8_recipe: A recipe of `transformer_engine.common.recipe`.
        use_during_eval: Use fp8 in evaluation too.

    Returns:
        The forward to put into its place.

    Raises:
        ImportError: If Transformer Engine is not installed.
        TypeError: If it is not bound to a module.
    """
    module = getattr(model_forward, "__self__", None)
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"contextual_fp8_autocast takes the forward method of a module (model.forward), got "
            f"{model_forward!r}."
        )
    te = library()
    # Called `fp8_autocast(fp8_recipe=...)` before version 2.9.
    autocast, name = (te.autocast, "recipe") if hasattr(te, "autocast") else (te.fp8_autocast, "fp8_recipe")
    return Fp8Forward(
        model_forward, module, functools.partial(autocast, **{name: fp8_recipe}), use_during_eval
    )


class Fp8Forward:
    """A module's forward in fp8; a class, and not a closure, so that the module still pickles."""

    def __init__(
        self,
        forward: Callable[..., Any],
        module: torch.nn.Module,
        autocast: Callable[..., Any],
        evaluates: bool,
    ) -> None:
        self.forward = forward
        self.module = module
        self.autocast = autocast
        self.evaluates = evaluates
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward in the library's autocast context, which is off in evaluation by default."""
        with self.autocast(enabled=self.evaluates or self.module.training):
            return self.forward(*args, **kwargs)


def apply(model: torch.nn.Module, recipe: TERecipeKwargs) -> None:
    """Convert a model as a recipe says; idempotent.

    Args:
        model: The model.
        recipe: The settings.
    """
    # Mixed precision wraps it, and keeps it under the second name.
    forwards = [vars(model).get(name) for name in ("forward", "_original_forward")]
    if any(isinstance(forward, Fp8Forward) for forward in forwards):
        return
    if not has_transformer_engine_layers(model):
        convert_model(model)
    apply_fp8_autowrap(model, recipe)
