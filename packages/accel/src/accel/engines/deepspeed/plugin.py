"""DeepSpeed settings: its configuration, from a file, a dict, arguments or environment variables."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch

from accel.engines.deepspeed.config import AUTO, HfDeepSpeedConfig, find, put, show_to_transformers
from accel.engines.deepspeed.settings import warn_of_unused
from accel_state import env
from accel_state.env.fields import from_env, read_environment
from accel_state.imports.packages import require
from accel_state.logging.warning import warn

_ZERO = "zero_optimization"
_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": f"{_ZERO}.stage",
    "offload_optimizer_device": f"{_ZERO}.offload_optimizer.device",
    "offload_param_device": f"{_ZERO}.offload_param.device",
    "offload_optimizer_nvme_path": f"{_ZERO}.offload_optimizer.nvme_path",
    "offload_param_nvme_path": f"{_ZERO}.offload_param.nvme_path",
    "zero3_save_16bit_model": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
}
_DEVICES = ("none", "cpu", "nvme")


@dataclasses.dataclass
class DeepSpeedPlugin:
    """Train under DeepSpeed.

    Arguments that are None are read from their environment variables, which the launcher's flags set, and
    then from DeepSpeed's configuration. Settings in several places must agree; an error lists all that do
    not.

    Args:
        hf_ds_config: DeepSpeed's configuration: path of a JSON file, dict, or HfDeepSpeedConfig. "auto"
            settings are filled in from the prepared objects. Without one
            (ACCELERATE_DEEPSPEED_CONFIG_FILE), it is made from the other arguments.
        gradient_accumulation_steps: Micro-batches per step; by default "auto", the Accelerator's.
        gradient_clipping: Largest gradient norm, clipped by DeepSpeed in each step. By default none:
            `clip_grad_norm_` clips too.
        zero_stage: What is sharded: 0 nothing, 1 optimizer states, 2 (the default) gradients too, 3
            parameters too.
        is_train_batch_min: Whether "auto" batch sizes are those of the loader with the smallest batches, of
            several that are prepared together (or with the largest).
        offload_optimizer_device: Where optimizer states are offloaded to: "none", "cpu" or "nvme" (stage 3).
        offload_param_device: The same for parameters (stage 3).
        offload_optimizer_nvme_path: The folder for "nvme".
        offload_param_nvme_path: The same for parameters.
        zero3_init_flag: Stage 3: whether transformers shards a model while it builds it. By default, if a
            configuration is passed.
        zero3_save_16bit_model: Stage 3: whether `get_state_dict` gathers all weights.
        transformer_moe_cls_names: Classes of mixture-of-experts layers, separated by commas, that stage 3
            gathers as one unit.
        enable_msamp: MS-AMP is not supported: True is an error.
        msamp_opt_level: MS-AMP's optimization level, which is ignored with a warning.

    Attributes:
        deepspeed_config: The configuration as a dict; `prepare` fills in "auto" settings.

    Raises:
        ValueError: If a value is unknown, two of them contradict each other, or a path is missing.
    """

    hf_ds_config: Any = from_env("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    gradient_accumulation_steps: int | None = from_env("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    gradient_clipping: float | None = from_env("ACCELERATE_GRADIENT_CLIPPING")
    zero_stage: int | None = from_env("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = from_env("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE")
    offload_param_device: str | None = from_env("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE")
    offload_optimizer_nvme_path: str | None = from_env("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH")
    offload_param_nvme_path: str | None = from_env("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH")
    zero3_init_flag: bool | None = from_env("ACCELERATE_DEEPSPEED_ZERO3_INIT")
    zero3_save_16bit_model: bool | None = from_env("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL")
    transformer_moe_cls_names: str | None = from_env("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")
    enable_msamp: bool | None = None
    msamp_opt_level: Literal["O1", "O2"] | None = None

    def __post_init__(self) -> None:
        # Without defaults: a setting that is neither passed nor set by the launcher is the configuration's.
        user_set = read_environment(self, defaults=False)
        if self.enable_msamp:
            raise ValueError(
                "enable_msamp=True: MS-AMP is not supported. Leave it out, and train in bf16, or in fp8 with "
                "torchao: mixed_precision='fp8', kwargs_handlers=[AORecipeKwargs()] and fsdp_version=2."
            )
        self._filled: dict[str, Any] = {}
        self._selected = False
        self.dschf: HfDeepSpeedConfig | None = None
        config = self.hf_ds_config
        # Other classes with the same methods are accepted: transformers has its own.
        self.hf_ds_config = config if hasattr(config, "get_value") else HfDeepSpeedConfig(config or {})
        self._merge(config is not None, user_set)
        self._read_back()
        self._set_init(config is not None)
        if "transformer_moe_cls_names" not in user_set:  # a list in the environment
            self.transformer_moe_cls_names = ",".join(self.transformer_moe_cls_names or ()) or None
        warn_of_unused(self)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration; `prepare` fills in "auto" settings."""
        config: dict[str, Any] = self.hf_ds_config.config
        return config

    @deepspeed_config.setter
    def deepspeed_config(self, config: dict[str, Any]) -> None:
        self.hf_ds_config.config = config

    def _merge(self, has_config: bool, user_set: set[str]) -> None:
        """Put the fields, set by the user or by the launcher, into the configuration, or compare them."""
        from_file = {*env.get("ACCELERATE_CONFIG_DS_FIELDS")} - user_set
        if not has_config:
            stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") if self.zero_stage is None else self.zero_stage
            put(self.deepspeed_config, _KEYS["zero_stage"], stage)
        mismatches: list[str] = []
        for name, key in sorted(_KEYS.items(), key=lambda item: item[0] not in user_set):  # the user's first
            value, existing = getattr(self, name), self.hf_ds_config.get_value(key)
            if value is None:
                continue
            if existing in (None, AUTO):
                # What DeepSpeed does without the setting.
                if value != "none":
                    put(self.deepspeed_config, key, value)
            # All differences are collected, so that one run shows them all.
            elif existing != value and value != AUTO:
                place = "in the config file of accel launch" if name in from_file else "here"
                mismatches.append(
                    f"- {key}={existing!r} in DeepSpeed's configuration, {name}={value!r} {place}"
                )
        _raise(mismatches)
        if not has_config:
            for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
                self.deepspeed_config.setdefault(key, AUTO)

    def _read_back(self) -> None:
        """Set the fields from the configuration."""
        get = self.hf_ds_config.get_value
        for name, key in _KEYS.items():
            # Not "auto", which `prepare` fills in.
            value = get(key)
            setattr(self, name, None if value == AUTO else value)
        # A configuration without the section means stage 0, whatever the environment's default is.
        self.zero_stage = get(_KEYS["zero_stage"], 0)
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage={self.zero_stage!r}; DeepSpeed has the stages 0, 1, 2 and 3.")
        # The stages from which each is sharded.
        for what, least in (("optimizer", 1), ("param", 3)):
            self._check_offload(what, least)
        self.zero3_save_16bit_model = bool(self.zero3_save_16bit_model)

    def _check_offload(self, what: str, least: int) -> None:
        device = getattr(self, f"offload_{what}_device") or "none"
        setattr(self, f"offload_{what}_device", device)
        if device not in _DEVICES:
            raise ValueError(f"offload_{what}_device={device!r}; it takes {', '.join(map(repr, _DEVICES))}.")
        # DeepSpeed offloads to NVMe only at stage 3.
        needed = 3 if device == "nvme" else least
        if device != "none" and (self.zero_stage or 0) < needed:
            raise ValueError(
                f"offload_{what}_device={device!r} needs zero_stage={needed}"
                f"{'' if needed == 3 else ' or more'}, and it is {self.zero_stage}."
            )
        if device == "nvme" and getattr(self, f"offload_{what}_nvme_path") is None:
            raise ValueError(f"offload_{what}_device='nvme' needs offload_{what}_nvme_path, a folder on it.")

    def _set_init(self, has_config: bool) -> None:
        wanted = self.zero3_init_flag
        if wanted and self.zero_stage != 3:
            warn(
                f"zero3_init_flag=True is ignored: with zero_stage={self.zero_stage} parameters are not "
                "sharded. Leave it out, or set zero_stage=3.",
            )
        default = has_config if wanted is None else bool(wanted)
        self.zero3_init_flag = default and self.zero_stage == 3

    # What it decides in the train plan

    def configured_precision(self) -> str | None:
        """The precision that the configuration enables, if any."""
        return next((kind for kind in ("bf16", "fp16") if self.get_value(f"{kind}.enabled") is True), None)

    def configured_steps(self) -> int | None:
        """The accumulation steps of the configuration, if it has a number."""
        steps: Any = self.gradient_accumulation_steps
        return steps if isinstance(steps, int) else None

    # Reading and filling in

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """A setting of the configuration by its dotted name, or `default` if it is missing."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a setting is "auto", to be filled in."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fill in a setting if it is "auto"; else compare it.

        Args:
            ds_key_long: Its dotted name.
            mismatches: A list to which a difference is added.
            must_match: Whether to compare.
            **kwargs: Values by dotted names.

        Raises:
            ValueError: If it is "auto" and has no value in `kwargs`.
        """
        section, name = find(self.deepspeed_config, ds_key_long)
        if section is None or name not in section:
            return
        if section[name] == AUTO:
            if ds_key_long not in kwargs:
                raise ValueError(
                    f"{ds_key_long} is 'auto' in DeepSpeed's configuration, and no prepared object has "
                    "a value for it. Set it to a value."
                )
            section[name] = self._filled[ds_key_long] = kwargs[ds_key_long]
            return
        differs = ds_key_long in kwargs and section[name] != kwargs[ds_key_long]
        if must_match and differs and mismatches is not None:
            mismatches.append(f"- {ds_key_long}={section[name]!r}, and here it is {kwargs[ds_key_long]!r}")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill in the "auto" settings of the configuration, and compare the rest.

        Args:
            prefix: Dotted name of the section to go through, with a dot at its end; "" for all.
            mismatches: A list to which differences are added; by default they are raised.
            config: The section; by default the full configuration.
            must_match: Whether to compare.
            **kwargs: Values by dotted names.

        Raises:
            ValueError: If settings differ, or are "auto" and have no value; the message lists all of them.
        """
        found: list[str] = [] if mismatches is None else mismatches
        for name, value in (self.deepspeed_config if config is None else config).items():
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{name}.", found, value, must_match, **kwargs)
            elif value == AUTO and prefix + name not in kwargs:
                found.append(f"- {prefix}{name} is 'auto', and no prepared object has a value for it")
            else:
                self.fill_match(prefix + name, found, must_match, **kwargs)
        if mismatches is None:
            _raise(found)

    def forget_filled(self) -> None:
        """Reset filled-in settings to "auto", unless they have changed since."""
        for name, value in self._filled.items():
            section, last = find(self.deepspeed_config, name)
            # Another value was set by the user after `prepare`.
            if section is not None and section.get(last) == value:
                section[last] = AUTO
        self._filled.clear()

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Enable DeepSpeed's precision, or check that the configuration has the same.

        Parameters are kept in it, and the optimizer has a copy of them in fp32. A configuration with
        `torch_autocast` keeps fp32 parameters and computes in lower precision.

        Args:
            mixed_precision: "bf16", "fp16" or "no".

        Raises:
            ValueError: If the configuration sets another one.
        """
        casts = self.hf_ds_config.is_true("torch_autocast.enabled")
        mismatches: list[str] = []
        for kind in ("fp16", "bf16"):
            wanted = mixed_precision == kind and not casts
            key = f"{kind}.enabled"
            existing = self.get_value(key)
            if existing in (None, AUTO):
                put(self.deepspeed_config, key, wanted)
                self._filled[key] = wanted
            elif existing != wanted:
                mismatches.append(
                    f"- {key}={existing!r} in DeepSpeed's configuration, mixed_precision={mixed_precision!r} "
                    "here"
                )
        _raise(mismatches)

    # ZeRO-3 while building, experts

    def is_zero3_init_enabled(self) -> bool:
        """Whether transformers shards a model while it builds it."""
        return bool(self.zero3_init_flag)

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """A context in which transformers shards models while it builds them, or not.

        Args:
            enable: Whether it does.
        """
        before = self.zero3_init_flag
        self.zero3_init_flag = enable and self.zero_stage == 3
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_deepspeed_weakref(self) -> None:
        """Register the configuration with transformers, which then shards models while it builds them.

        It keeps a weak reference to `dschf`, so the configuration lives as long as this plugin. With
        `zero3_init_flag=False` none is registered.
        """
        # Kept here, as transformers only has a weak reference.
        self.dschf = show_to_transformers(self.deepspeed_config) if self.zero3_init_flag else None
        if self.dschf is None:
            show_to_transformers(None)

    def set_moe_leaf_modules(self, model: torch.nn.Module) -> None:
        """Make stage 3 gather each of the model's mixture-of-experts layers as one unit.

        Batches use different experts, so the order in which parameters are needed changes.

        Args:
            model: The model.

        Raises:
            ValueError: If it has no module of a class that `transformer_moe_cls_names` names.
        """
        if not self.transformer_moe_cls_names:
            return
        names = [name.strip() for name in self.transformer_moe_cls_names.split(",")]
        classes = {type(module).__name__: type(module) for module in model.modules()}
        missing = [name for name in names if name not in classes]
        if missing:
            raise ValueError(
                f"transformer_moe_cls_names names {', '.join(missing)}, of which {type(model).__name__} has "
                f"no module. Its classes: {', '.join(sorted(classes))}."
            )
        deepspeed = require("deepspeed", "deepspeed")
        deepspeed.utils.set_z3_leaf_modules(model, [classes[name] for name in names])

    # Selection among several plugins

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make this plugin the active one; `AcceleratorState.select_deepspeed_plugin` calls it.

        Raises:
            RuntimeError: If anything else does, as the state would not be updated.
        """
        if not _from_accelerator_state:
            raise RuntimeError(
                "A DeepSpeedPlugin is selected by its name: call "
                "accelerator.state.select_deepspeed_plugin(name)."
            )
        self.selected = True

    @property
    def selected(self) -> bool:
        """Whether this is the active plugin."""
        return self._selected

    @selected.setter
    def selected(self, selected: bool) -> None:
        self._selected = selected
        if selected:
            self.set_deepspeed_weakref()


def _raise(mismatches: list[str]) -> None:
    if mismatches:
        raise ValueError(
            "DeepSpeed's configuration and the settings here differ:\n"
            + "\n".join(mismatches)
            + "\nMake them the same, or set them to 'auto' in the configuration."
        )
