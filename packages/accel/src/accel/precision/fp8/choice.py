"""Which library computes in fp8, and what it does to models and optimizers before an engine wraps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel.precision.fp8.recipes import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel_state.imports.available import is_torchao_available
from accel_state.imports.packages import install_hint
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    import torch

    from accel_state.train_plan import TrainPlan

_RECIPES: dict[str, type[Any]] = {"AO": AORecipeKwargs, "TE": TERecipeKwargs, "MSAMP": MSAMPRecipeKwargs}


@dataclass(frozen=True)
class Fp8:
    """The library that computes in fp8, and its settings.

    Attributes:
        backend: "AO" (torchao) or "TE" (Transformer Engine).
        recipe: The settings of that library.
    """

    backend: str
    recipe: Any

    def convert(self, model: torch.nn.Module, gathers: bool = False) -> None:
        """Replace a model's layers by those of the library, in place; idempotent.

        Args:
            model: The model, before an engine wraps it.
            gathers: Whether FSDP2 is going to shard it, and gathers its weights for computing.

        Raises:
            ImportError: If the library is not installed.
        """
        if self.backend == "AO":
            # One of the two libraries: the other one need not be installed.
            from accel.precision.fp8 import ao

            ao.apply(model, self.recipe, gathers)
        else:
            from accel.precision.fp8 import te

            te.apply(model, self.recipe)


def make_fp8(plan: TrainPlan, recipe: Any) -> Fp8 | None:
    """Check the library that the plan names, and take its settings.

    Args:
        plan: The plan for this process.
        recipe: The recipe among the Accelerator's handlers; None: none was given.

    Returns:
        Both; None in other precisions.

    Raises:
        ImportError: If the library is not installed; the message names the command that installs it.
    """
    if plan.fp8_backend is None:
        if recipe is not None:
            warn(
                f"{type(recipe).__name__} is ignored: mixed_precision is {plan.mixed_precision!r}. Set "
                "mixed_precision='fp8' to train in fp8.",
            )
        return None
    _check_installed(plan.fp8_backend)  # not at the first model: a job fails before it has loaded data
    return Fp8(plan.fp8_backend, recipe if recipe is not None else _RECIPES[plan.fp8_backend]())


def _check_installed(backend: str) -> None:
    if backend == "AO" and not is_torchao_available():
        raise ImportError(
            "mixed_precision='fp8' needs a library that computes in fp8, and there is none that runs here. "
            f"Install torchao (0.6.1 or newer) with: {install_hint('fp8')}. On NVIDIA GPUs Transformer "
            f"Engine does it too: {install_hint('transformer-engine')}."
        )
    if backend == "TE":
        from accel.precision.fp8 import te

        te.library()
    if backend == "MSAMP":
        raise ImportError(
            "MS-AMP is not supported: it is not on the package index (https://github.com/Azure/MS-AMP). "
            f"Train in fp8 with torchao: kwargs_handlers=[AORecipeKwargs()] and {install_hint('fp8')}."
        )
