"""The settings of FSDP, both versions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed import fsdp
from torch.distributed.fsdp import wrap

from accel.engines.common.checks import warn_of_ignored
from accel_state import env
from accel_state.env.fields import from_env, read_environment
from accel_state.logging.warning import warn

FSDP_SHARDING_STRATEGY = list(env.VARIABLES["FSDP_SHARDING_STRATEGY"].choices)
"""Names of the strategies of version 1."""
FSDP_AUTO_WRAP_POLICY = list(env.VARIABLES["FSDP_AUTO_WRAP_POLICY"].choices)
"""Names of the policies that say which modules are sharded by themselves."""

_DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32, "NO": torch.float32}
_DTYPES["FP8"] = torch.bfloat16  # of all but the layers that compute in fp8
_DTYPES |= {"BFLOAT16": torch.bfloat16, "FLOAT16": torch.float16, "FLOAT32": torch.float32}


def _is_version_1(plugin: Any) -> bool:
    return bool(choice("fsdp_version", plugin.fsdp_version, {1: 1, 2: 2}) == 1)


@dataclasses.dataclass
class FullyShardedDataParallelPlugin:
    """Train under fully sharded data parallelism: parameters, gradients and optimizer states in parts.

    What is left at None is read from its FSDP_* variable, which the launcher's flags set, and then has the
    default given here. Names are taken in capitals and small letters.

    Args:
        fsdp_version: 1 (the default) for torch's FullyShardedDataParallel, 2 for `fully_shard`.
        sharding_strategy: Version 1: the old name of `reshard_after_forward`.
        reshard_after_forward: Version 2: whether gathered parameters are freed after the forward pass and
            gathered again in backward (True by default). Version 1: a ShardingStrategy or its name;
            "FULL_SHARD" by default.
        backward_prefetch: Version 1: when the next parameters are gathered in backward: "BACKWARD_PRE",
            "BACKWARD_POST" or "NO_PREFETCH" (the default).
        mixed_precision_policy: Dtypes of parameters, gradient reduction and outputs: a MixedPrecisionPolicy
            (version 2) or MixedPrecision (version 1), a dict of its arguments, or a dtype's short name such
            as "bf16". By default that of the Accelerator's mixed_precision.
        auto_wrap_policy: Which modules are sharded by themselves, and so gathered one at a time:
            "transformer_based_wrap", "size_based_wrap", "no_wrap" (the default: all in one piece), or a
            function such as those of `torch.distributed.fsdp.wrap`.
        cpu_offload: Keep parameters, gradients and optimizer states on the CPU.
        ignored_modules: Modules whose parameters are not sharded: the modules, or a regular expression that
            the whole of a module's name has to match.
        state_dict_type: What `save_state` writes: "FULL_STATE_DICT" (version 1's default),
            "SHARDED_STATE_DICT" (version 2's) or "LOCAL_STATE_DICT" (version 1 alone).
        state_dict_config: Version 1: torch's options of the state dict's type.
        optim_state_dict_config: Version 1: the same for optimizers.
        limit_all_gathers: Version 1: let the CPU run ahead by two gathers at most.
        use_orig_params: Version 1: keep the original parameters visible, as optimizers with several
            parameter groups and partly frozen models need it.
        param_init_fn: Version 1: initialises modules that are on the meta device.
        sync_module_states: Take parameters and buffers from rank 0; by default True in version 2, and in
            version 1 where cpu_ram_efficient_loading needs it.
        forward_prefetch: Version 1: gather the next parameters in forward before they are needed.
        activation_checkpointing: Recompute the activations of every wrapped module in backward.
        activation_checkpointing_offload: Keep what activation checkpointing saves on the CPU.
        cpu_ram_efficient_loading: Only rank 0's weights are used; others may have the model on meta.
        transformer_cls_names_to_wrap: Classes that "transformer_based_wrap" wraps; by default those that the
            model names in `_no_split_modules`. Without any, all is in one piece, and a warning says so.
        min_num_params: Smallest module that "size_based_wrap" wraps, in parameters.

    Raises:
        ValueError: If a value is not known, or not of this version; the message says what is.
    """

    fsdp_version: int | None = from_env("FSDP_VERSION")
    sharding_strategy: Any = from_env("FSDP_SHARDING_STRATEGY", when=_is_version_1)
    reshard_after_forward: Any = from_env("FSDP_RESHARD_AFTER_FORWARD")
    backward_prefetch: Any = from_env("FSDP_BACKWARD_PREFETCH", when=_is_version_1)
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = from_env("FSDP_AUTO_WRAP_POLICY")
    cpu_offload: Any = from_env("FSDP_OFFLOAD_PARAMS")
    ignored_modules: Iterable[torch.nn.Module] | str | None = from_env("FSDP_IGNORED_MODULES")
    state_dict_type: Any = from_env("FSDP_STATE_DICT_TYPE")
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = from_env("FSDP_USE_ORIG_PARAMS", when=_is_version_1)
    param_init_fn: Callable[[torch.nn.Module], None] | None = None
    sync_module_states: bool | None = from_env("FSDP_SYNC_MODULE_STATES", when=_is_version_1)
    forward_prefetch: bool | None = from_env("FSDP_FORWARD_PREFETCH")
    activation_checkpointing: bool | None = from_env("FSDP_ACTIVATION_CHECKPOINTING")
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = from_env("FSDP_CPU_RAM_EFFICIENT_LOADING")
    transformer_cls_names_to_wrap: list[str] | None = from_env("FSDP_TRANSFORMER_CLS_TO_WRAP")
    min_num_params: int | None = from_env("FSDP_MIN_NUM_PARAMS")

    def __post_init__(self) -> None:
        # A launcher's values are ignored in silence, a user's with a warning.
        user_set = read_environment(self)
        self.fsdp_version = 1 if _is_version_1(self) else 2
        if "transformer_cls_names_to_wrap" not in user_set:
            self.transformer_cls_names_to_wrap = list(self.transformer_cls_names_to_wrap or ()) or None
        if isinstance(self.transformer_cls_names_to_wrap, str):
            names = self.transformer_cls_names_to_wrap.split(",")  # as transformers' Trainer gives them
            self.transformer_cls_names_to_wrap = [name.strip() for name in names]
        self.activation_checkpointing_offload = bool(self.activation_checkpointing_offload)
        self._set_sharding(user_set)
        self._set_first_version(user_set)
        self._set_policy()
        self.set_cpu_offload()
        self.set_state_dict_type()
        if self.mixed_precision_policy is not None:
            self._read_precision()
        warn_of_unused(self)

    def _set_sharding(self, user_set: set[str]) -> None:
        # torch's _HYBRID_SHARD_ZERO2 is known with and without its underscore.
        strategies = {item.name.lstrip("_"): item for item in fsdp.ShardingStrategy}
        strategies |= {item.name: item for item in fsdp.ShardingStrategy}
        if self.fsdp_version == 1:
            names = ("reshard_after_forward", "sharding_strategy")
            both = [getattr(self, name) for name in names if name in user_set]
            if not both:
                # The launcher has a flag for version 2 there, whatever the version is.
                named = str(self.reshard_after_forward).upper()
                both = [named if named in strategies else self.sharding_strategy]
            chosen, *others = (choice(f"{names[0]} of fsdp_version=1", item, strategies) for item in both)
            if others not in ([], [chosen]):
                raise ValueError(
                    f"reshard_after_forward={chosen.name} and sharding_strategy={others[0].name} say the "
                    "same in fsdp_version=1, and differ. Leave one out."
                )
            self.sharding_strategy = self.reshard_after_forward = chosen
            return
        # The user's: the variable is read in version 1 alone.
        if self.sharding_strategy is not None:
            strategy = choice("sharding_strategy", self.sharding_strategy, strategies)
            if strategy.name not in ("FULL_SHARD", "SHARD_GRAD_OP"):
                raise ValueError(
                    f"sharding_strategy={strategy.name} is version 1's. In fsdp_version=2 set "
                    "reshard_after_forward=True or False, and for replicas of shards give "
                    "ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)."
                )
            if "reshard_after_forward" not in user_set:
                self.reshard_after_forward = strategy.name == "FULL_SHARD"
        # Version 2 has reshard_after_forward in its place.
        self.sharding_strategy = None
        words = {"TRUE": True, "FALSE": False, "1": True, "0": False}
        value = self.reshard_after_forward
        self.reshard_after_forward = choice(
            "reshard_after_forward of fsdp_version=2", True if value is None else value, words
        )

    def _set_first_version(self, user_set: set[str]) -> None:
        """Read the settings that version 2 does not have, and warn of those that it ignores."""
        if self.fsdp_version == 2:
            unused = ("backward_prefetch", "use_orig_params", "param_init_fn", "state_dict_config")
            ignored = [name for name in (*unused, "optim_state_dict_config") if name in user_set]
            if self.forward_prefetch is True and "forward_prefetch" in user_set:
                ignored.append("forward_prefetch")
            if ignored:
                warn(
                    f"fsdp_version=2 ignores {', '.join(ignored)}: they are settings of version 1. Leave "
                    "them out.",
                )
            # A value that has no effect is not shown.
            self.backward_prefetch = self.use_orig_params = None
            if self.sync_module_states is None:
                self.sync_module_states = True
            return
        prefetches = {item.name: item for item in fsdp.BackwardPrefetch} | {"NO_PREFETCH": None}
        self.backward_prefetch = choice("backward_prefetch", self.backward_prefetch, prefetches)
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            if "sync_module_states" in user_set:
                warn(
                    "sync_module_states=False is ignored: with cpu_ram_efficient_loading only rank 0 has the "
                    "weights. Leave it out.",
                )
            self.sync_module_states = True

    def _set_policy(self) -> None:
        if callable(self.auto_wrap_policy):
            return
        known = {
            "TRANSFORMER_BASED_WRAP": wrap.transformer_auto_wrap_policy,
            "SIZE_BASED_WRAP": wrap.size_based_auto_wrap_policy,
            "NO_WRAP": None,
        }
        self.auto_wrap_policy = choice("auto_wrap_policy", self.auto_wrap_policy, known)

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Complete the policy for a model: its classes by name, and the smallest size.

        Args:
            model: The model.

        Raises:
            ValueError: If the model has no module of a class that is named.
        """
        if self.auto_wrap_policy is wrap.transformer_auto_wrap_policy:
            classes = find_classes(model, self.transformer_cls_names_to_wrap)
            if not classes:
                self.auto_wrap_policy = None
                return
            self.auto_wrap_policy = functools.partial(
                wrap.transformer_auto_wrap_policy, transformer_layer_cls=classes
            )
        elif self.auto_wrap_policy is wrap.size_based_auto_wrap_policy:
            self.auto_wrap_policy = functools.partial(
                wrap.size_based_auto_wrap_policy, min_num_params=self.min_num_params or 1
            )

    def set_cpu_offload(self) -> None:
        """Make `cpu_offload` the object that this version of FSDP takes."""
        if isinstance(self.cpu_offload, str):
            self.cpu_offload = env.str_to_bool(self.cpu_offload, to_bool=True)
        if self.fsdp_version == 2 and not isinstance(self.cpu_offload, fsdp.OffloadPolicy | fsdp.CPUOffload):
            self.cpu_offload = fsdp.CPUOffloadPolicy() if self.cpu_offload else fsdp.OffloadPolicy()
        elif self.fsdp_version == 1 and isinstance(self.cpu_offload, bool):
            self.cpu_offload = fsdp.CPUOffload(offload_params=self.cpu_offload)
        self.validate_cpu_offload()

    def validate_cpu_offload(self) -> None:
        """Check that `cpu_offload` is of this version's class.

        Raises:
            ValueError: If it is not.
        """
        wanted = fsdp.OffloadPolicy if self.fsdp_version == 2 else fsdp.CPUOffload
        if not isinstance(self.cpu_offload, wanted):
            raise ValueError(
                f"cpu_offload={self.cpu_offload!r}: fsdp_version={self.fsdp_version} takes True, False or "
                f"{'a CPUOffloadPolicy' if self.fsdp_version == 2 else 'a CPUOffload'}."
            )

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose what `save_state` writes.

        Args:
            state_dict_type: A StateDictType or its name; None keeps the one that is set, or takes the
                version's default.

        Raises:
            ValueError: If it is not known.
        """
        chosen = self.state_dict_type if state_dict_type is None else state_dict_type
        if chosen is None:
            chosen = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
        kinds = {item.name: item for item in fsdp.StateDictType}
        if self.fsdp_version == 2:
            # These are flat parameters, which version 2 does not have.
            del kinds["LOCAL_STATE_DICT"]
        self.state_dict_type = choice("state_dict_type", chosen, kinds)
        if self.fsdp_version == 2:
            return
        if self.state_dict_type is fsdp.StateDictType.FULL_STATE_DICT:
            # Else every process would have the full state, on its device.
            full = {"offload_to_cpu": True, "rank0_only": True}
            self.state_dict_config = self.state_dict_config or fsdp.FullStateDictConfig(**full)
            self.optim_state_dict_config = self.optim_state_dict_config or fsdp.FullOptimStateDictConfig(
                **full
            )
        elif self.state_dict_type is fsdp.StateDictType.SHARDED_STATE_DICT:
            self.state_dict_config = self.state_dict_config or fsdp.ShardedStateDictConfig(
                offload_to_cpu=True
            )
            self.optim_state_dict_config = self.optim_state_dict_config or fsdp.ShardedOptimStateDictConfig(
                offload_to_cpu=True
            )

    def set_mixed_precision(
        self, mixed_precision: str, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Fill the policy in from a precision.

        Parameters are cast to it for computing. Gradients are reduced in it in version 1, as that has no
        other default, and in fp32 in version 2, so that their sum does not depend on the number of processes.

        Args:
            mixed_precision: "bf16", "fp16", "fp8" (bf16 in all but the layers that compute in fp8) or "no".
            buffer_autocast: Version 1: cast buffers too.
            override: Replace a policy that is set.

        Raises:
            ValueError: If the precision is not known.
        """
        if self.mixed_precision_policy is not None and not override:
            return
        dtype = choice("mixed_precision", mixed_precision, _DTYPES)
        if self.fsdp_version == 2:
            is_mixed = dtype is not torch.float32
            self.mixed_precision_policy = fsdp.MixedPrecisionPolicy(
                param_dtype=dtype if is_mixed else None, reduce_dtype=torch.float32 if is_mixed else None
            )
        else:
            buffers = dtype if buffer_autocast else torch.float32
            # As in version 2, every wrapped module gets its inputs in the dtype of its parameters.
            self.mixed_precision_policy = fsdp.MixedPrecision(
                param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=buffers, cast_forward_inputs=True
            )

    def _read_precision(self) -> None:
        policy = self.mixed_precision_policy
        if isinstance(policy, str):
            self.set_mixed_precision(policy, override=True)
        elif isinstance(policy, dict):
            kind = fsdp.MixedPrecisionPolicy if self.fsdp_version == 2 else fsdp.MixedPrecision
            # torch's MixedPrecision has private fields too.
            known = {field.name for field in dataclasses.fields(kind) if field.name[0] != "_"}
            if unknown := sorted(set(policy) - known):
                raise ValueError(
                    f"mixed_precision_policy has unknown {', '.join(unknown)}; "
                    f"fsdp_version={self.fsdp_version} knows {', '.join(sorted(known))}."
                )
            values = {
                name: choice(f"mixed_precision_policy[{name!r}]", value, _DTYPES)
                if isinstance(value, str)
                else value
                for name, value in policy.items()
            }
            self.mixed_precision_policy = kind(**values)
        self.validate_mixed_precision_policy()

    def validate_mixed_precision_policy(self) -> None:
        """Check that `mixed_precision_policy` is of this version's class.

        Raises:
            ValueError: If it is not.
        """
        kind = fsdp.MixedPrecisionPolicy if self.fsdp_version == 2 else fsdp.MixedPrecision
        if not isinstance(self.mixed_precision_policy, kind):
            raise ValueError(
                f"mixed_precision_policy={self.mixed_precision_policy!r}: "
                f"fsdp_version={self.fsdp_version} takes a {kind.__name__}, a dict of its arguments, or a "
                "dtype's name such as 'bf16'."
            )


def choice(field: str, value: Any, choices: dict[Any, Any]) -> Any:
    """Return the value of a name in any case; a value of `choices` is returned unchanged.

    Args:
        field: The setting, for the message.
        value: The name, or its number in `choices`, or a value.
        choices: Values by name.

    Raises:
        ValueError: If it is not among them.
    """
    # By identity: True equals 1, but is not a version.
    if any(value is item for item in choices.values()):
        return value
    name = value.upper() if isinstance(value, str) else value
    if isinstance(name, str) and name.isdigit():  # old configurations number the choices from 1
        number = int(name)
        name = (
            number if number in choices else list(choices)[number - 1] if 0 < number <= len(choices) else name
        )
    if isinstance(name, bool) or name not in choices:
        raise ValueError(f"{field} is {value!r}; allowed: {', '.join(str(item) for item in choices)}.")
    return choices[name]


def warn_of_unused(plugin: Any) -> None:
    """Warn of unused settings, each with the reason, and reset them.

    Args:
        plugin: The plugin, complete.
    """
    policy = getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy)  # of a complete one
    # The values without an argument; those of the environment are ignored without a warning.
    classes = list(env.get("FSDP_TRANSFORMER_CLS_TO_WRAP")) or None
    size = env.get("FSDP_MIN_NUM_PARAMS")
    unset: dict[str, tuple[Any, str]] = {}
    if plugin.fsdp_version == 2 and not plugin.limit_all_gathers:
        unset["limit_all_gathers"] = True, "fsdp_version=2 always does"
    if plugin.fsdp_version == 2 and plugin.cpu_ram_efficient_loading and plugin.sync_module_states is False:
        unset["sync_module_states"] = True, "with cpu_ram_efficient_loading only rank 0 has the weights"
    if plugin.activation_checkpointing_offload and not plugin.activation_checkpointing:
        unset["activation_checkpointing_offload"] = False, "activation_checkpointing is not set"
    if policy is not wrap.size_based_auto_wrap_policy and plugin.min_num_params not in (None, size):
        unset["min_num_params"] = size, "auto_wrap_policy is not 'size_based_wrap'"
    class_names = plugin.transformer_cls_names_to_wrap
    if policy is not wrap.transformer_auto_wrap_policy and class_names not in (None, classes):
        unset["transformer_cls_names_to_wrap"] = classes, "auto_wrap_policy is not 'transformer_based_wrap'"
    for name in ("state_dict_config", "optim_state_dict_config"):
        config = getattr(plugin, name)
        # Local state dicts have neither option; a sharded one has the first alone.
        if not getattr(config, "offload_to_cpu", True) or not getattr(config, "rank0_only", True):
            unset[name] = None, "states are gathered to the CPU, full ones on the first process of a machine"
    warn_of_ignored(plugin, {name: reason for name, (_, reason) in unset.items()})
    for name, (value, _) in unset.items():
        setattr(plugin, name, value)


_CLASSES_KEY = "fsdp_transformer_layer_cls_to_wrap in the config file of accel launch, or its flag"


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type[torch.nn.Module] | None:
    """The class of a module, or of one inside of it, by its name.

    Args:
        module: The module.
        name: The class's name, without its module.

    Returns:
        The class; None if no module has it.
    """
    return next((type(item) for item in module.modules() if type(item).__name__ == name), None)


def find_classes(model: torch.nn.Module, names: Iterable[str] | None) -> set[type[torch.nn.Module]]:
    """Return the classes of the layers to wrap; none, with a warning, if no names are set.

    Args:
        model: The model.
        names: Their names; None for those in the model's `_no_split_modules`.

    Raises:
        ValueError: If the model has no module of a class that is named.
    """
    by_name = {type(module).__name__: type(module) for module in model.modules()}
    wanted = names or getattr(model, "_no_split_modules", None)
    if not wanted:
        warn(
            f"{type(model).__name__} is sharded, and gathered, in one piece: auto_wrap_policy is "
            "TRANSFORMER_BASED_WRAP, and neither the settings nor the model (_no_split_modules) name its "
            f"layer classes. Name them in transformer_cls_names_to_wrap=[...] ({_CLASSES_KEY}).",
        )
        return set()
    # A model's own list may name layers that this configuration of it does not have.
    missing = sorted(set(wanted) - set(by_name)) if names else []
    classes = {by_name[name] for name in wanted if name in by_name}
    if missing or not classes:
        raise ValueError(
            f"transformer_cls_names_to_wrap names {', '.join(missing or sorted(wanted))}, and "
            f"{type(model).__name__} has modules of these classes: {', '.join(sorted(by_name))}. Correct the "
            f"names ({_CLASSES_KEY})."
        )
    return classes
