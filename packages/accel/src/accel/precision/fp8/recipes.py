"""The settings of fp8 training, one class per library; what is left at None comes from the environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from accel_state import env
from accel_state.env.fields import from_env, read_environment
from accel_state.handlers import KwargsHandler
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    import torch

_AO_FIELDS = ("pad_inner_dim", "enable_fsdp_float8_all_gather")
_OVERRIDES = ("FP8_OVERRIDE_FPROP", "FP8_OVERRIDE_DGRAD", "FP8_OVERRIDE_WGRAD")


def _has_no_config(recipe: Any) -> bool:
    return recipe.config is None


@dataclasses.dataclass
class AORecipeKwargs(KwargsHandler):
    """How torchao trains in fp8.

    Args:
        config: torchao's own `Float8LinearConfig`; by default tensorwise scaling with the two settings below.
        module_filter_func: Called with each linear layer and its name; True to compute it in fp8. By default
            all but the first and the last one.
        pad_inner_dim: Pad the inner dimension of products to a multiple of 16; default:
            ACCELERATE_FP8_PAD_INNER_DIM, then True.
        enable_fsdp_float8_all_gather: Gather weights that FSDP2 shards in fp8; default:
            ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER, then True.

    Raises:
        ValueError: If a setting contradicts that of the same name in `config`.
    """

    config: Any = None
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = from_env("ACCELERATE_FP8_PAD_INNER_DIM", when=_has_no_config)
    enable_fsdp_float8_all_gather: bool | None = from_env(
        "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", when=_has_no_config
    )

    def __post_init__(self) -> None:
        read_environment(self, defaults=False)  # to know what was set on purpose
        for name in _AO_FIELDS if self.config is not None else ():
            value, in_config = getattr(self, name), getattr(self.config, name)
            if value is not None and value != in_config:
                raise ValueError(
                    f"AORecipeKwargs got {name}={value!r} and a config with {name}={in_config!r}: set it in "
                    "the config alone."
                )

    @property
    def library(self) -> str:
        """The library that it is for."""
        return "AO"

    def asks_for(self, name: str) -> bool:
        """Return whether a setting was made on purpose, and is on; a default is not."""
        return bool(getattr(self if self.config is None else self.config, name))

    def build(self, gathers: bool) -> Any:
        """Return torchao's configuration.

        Args:
            gathers: Whether FSDP2 gathers the weights; otherwise they are plain, whatever the setting says.

        Raises:
            ImportError: If torchao is not installed.
        """
        from accel_state.imports.packages import require

        config: Any = self.config
        if config is None:
            fields = {name: getattr(self, name) in (None, True) for name in _AO_FIELDS}  # on by default
            config = require("torchao.float8", "fp8").Float8LinearConfig(**fields)
        # torchao would wrap weights in a class that only FSDP2 unwraps.
        if not gathers and config.enable_fsdp_float8_all_gather:
            config = dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
        return config


@dataclasses.dataclass
class TERecipeKwargs(KwargsHandler):
    """How Transformer Engine trains in fp8.

    What is left at None is read from ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL, _MARGIN, _INTERVAL, _FORMAT,
    _AMAX_HISTORY_LEN, _AMAX_COMPUTE_ALGO, _OVERRIDE_LINEAR_PRECISION (or FP8_OVERRIDE_FPROP, _DGRAD, _WGRAD)
    and _USE_MXFP8_BLOCK_SCALING.

    Args:
        use_autocast_during_eval: Use fp8 in evaluation too; metrics are generally better without.
        margin: Margin of the scaling factor, in powers of two; default 0.
        interval: Steps between recomputations of the scaling factor; default 1, the only value that newer
            versions of the library have.
        fp8_format: "HYBRID" (the default: E4M3 in forward, E5M2 in backward), "E4M3" or "E5M2".
        amax_history_len: Steps of the history that the scaling factor is made from; default 1024.
        amax_compute_algo: "most_recent" (the default) or "max" of that history.
        override_linear_precision: Whether fprop, dgrad and wgrad run in higher precision; default: none.
        use_mxfp8_block_scaling: Scale by blocks (MXFP8), rather than from a history.

    Raises:
        ValueError: If a value is not allowed.
    """

    use_autocast_during_eval: bool | None = from_env("ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL")
    margin: int | None = from_env("ACCELERATE_FP8_MARGIN")
    interval: int | None = from_env("ACCELERATE_FP8_INTERVAL")
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] | None = from_env("ACCELERATE_FP8_FORMAT")
    amax_history_len: int | None = from_env("ACCELERATE_FP8_AMAX_HISTORY_LEN")
    amax_compute_algo: Literal["max", "most_recent"] | None = from_env("ACCELERATE_FP8_AMAX_COMPUTE_ALGO")
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = from_env("ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING")

    def __post_init__(self) -> None:
        read_environment(self)
        self.fp8_format = _choice(self.fp8_format and self.fp8_format.upper(), "fp8_format", "FORMAT")
        _choice(self.amax_compute_algo, "amax_compute_algo", "AMAX_COMPUTE_ALGO")
        self.override_linear_precision = _overrides(self.override_linear_precision)

    @property
    def library(self) -> str:
        """The library that it is for."""
        return "TE"


@dataclasses.dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """How MS-AMP trains in fp8, which the Accelerator does not support: it raises an ImportError.

    Args:
        opt_level: "O1" (weights and their gradients' communication in fp8) or "O2" (optimizer states too);
            default: ACCELERATE_FP8_OPT_LEVEL, then "O2".

    Raises:
        ValueError: If the level is not one of these.
    """

    opt_level: Literal["O1", "O2"] | None = from_env("ACCELERATE_FP8_OPT_LEVEL")

    def __post_init__(self) -> None:
        read_environment(self)
        _choice(self.opt_level, "opt_level", "OPT_LEVEL")

    @property
    def library(self) -> str:
        """The library that it is for."""
        return "MSAMP"


@dataclasses.dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The old name for the recipes of Transformer Engine and MS-AMP in one; warns with a FutureWarning.

    Args:
        opt_level: As in `MSAMPRecipeKwargs`.
        use_autocast_during_eval: This and the following as in `TERecipeKwargs`.
        margin: See there.
        interval: See there.
        fp8_format: See there.
        amax_history_len: See there.
        amax_compute_algo: See there.
        override_linear_precision: See there.
        use_mxfp8_block_scaling: See there.
        backend: "MSAMP" or "TE", in any letter case; default: ACCELERATE_FP8_BACKEND, then "TE".

    Raises:
        ValueError: If a value is not allowed.
    """

    backend: Literal["MSAMP", "TE"] | None = from_env("ACCELERATE_FP8_BACKEND")

    def __post_init__(self) -> None:
        warn(
            "FP8RecipeKwargs is the old name; write TERecipeKwargs or MSAMPRecipeKwargs.",
            FutureWarning,
        )
        # Both by their names: neither calls the other.
        TERecipeKwargs.__post_init__(self)
        MSAMPRecipeKwargs.__post_init__(self)
        chosen = str(self.backend or "").upper()
        if chosen not in ("", "MSAMP", "TE"):
            raise ValueError(
                f"FP8RecipeKwargs(backend={chosen!r}): it has the settings of MSAMP and TE; for torchao, "
                "pass AORecipeKwargs."
            )
        self.backend = chosen or "TE"  # type: ignore[assignment]

    @property
    def library(self) -> str:
        """The library that it is for."""
        return str(self.backend)


def _choice(value: Any, field: str, variable: str) -> Any:
    allowed = env.VARIABLES[f"ACCELERATE_FP8_{variable}"].choices
    if value not in allowed:
        raise ValueError(f"{field}={value!r} is not known; allowed: {', '.join(map(str, allowed))}.")
    return value


def _overrides(passed: Any) -> tuple[bool, bool, bool]:
    if passed is None and env.is_set("ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION"):
        passed = env.get("ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION")
    if passed is None:
        passed = [env.get(name) for name in _OVERRIDES]
    flags = tuple(passed)
    if len(flags) != 3 or not all(isinstance(flag, bool) for flag in flags):
        raise ValueError(
            f"override_linear_precision={passed!r}: it takes three flags, for fprop, dgrad and wgrad."
        )
    return flags
