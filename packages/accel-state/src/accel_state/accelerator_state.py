"""How a run is trained: precision and engine plugins, as one Accelerator was made with them.

States with different settings live side by side in one process. The newest one is what a bare
`AcceleratorState()` reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from accel_state import env
from accel_state.devices.table import device_spec
from accel_state.enums import DistributedType, PrecisionType
from accel_state.process import rendezvous
from accel_state.process.info import ProcessInfo
from accel_state.process.methods import ProcessMethods, describe
from accel_state.process.shared_dict import ThreadLocalSharedDict, shared_dict
from accel_state.process.state import PartialState

__all__ = ["AcceleratorState", "ThreadLocalSharedDict", "do_nothing", "is_initialized"]

# The plugin that requests each engine, and the environment's switch where no Accelerator decides.
_ENGINES = (
    (DistributedType.DEEPSPEED, "deepspeed_plugin", "ACCELERATE_USE_DEEPSPEED"),
    (DistributedType.FSDP, "fsdp_plugin", "ACCELERATE_USE_FSDP"),
    (DistributedType.MEGATRON_LM, "megatron_lm_plugin", "ACCELERATE_USE_MEGATRON_LM"),
)


@dataclass
class _Settings:
    mixed_precision: str
    engine: DistributedType | None  # None: the process's distributed type
    dynamo_plugin: Any
    deepspeed_plugin: Any  # one, or a dictionary of them by name
    fsdp_plugin: Any
    torch_tp_plugin: Any
    megatron_lm_plugin: Any
    parallelism_config: Any
    selected: str | None = None  # the active one of several DeepSpeed plugins

    def differs(self, provided: dict[str, Any]) -> bool:
        if provided["mixed_precision"] not in (None, self.mixed_precision):
            return True
        plugins = {name: value for name, value in provided.items() if name != "mixed_precision"}
        # By identity: an equal plugin is another object, which the user may still change.
        return any(value is not None and value is not getattr(self, name) for name, value in plugins.items())

    @cached_property
    def device_mesh(self) -> Any:
        if self.parallelism_config is None:
            return None
        # On first use: creating a mesh is a collective, and most runs have none.
        return self.parallelism_config.get_device_mesh(PartialState._process_info().device.type)


class AcceleratorState(ProcessMethods):
    """The settings that an Accelerator was made with, and the facts of the process.

    Without arguments: a handle on the newest state, which is made from the environment if there is none. With
    an argument that differs from the newest state: a new state, the newest from then on. Handles on older
    states keep theirs.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8"; by default ACCELERATE_MIXED_PRECISION, then "no".
        cpu: Run on the CPU whatever else there is.
        dynamo_plugin: How models are compiled.
        deepspeed_plugin: Train under DeepSpeed; one plugin, or several by name, of which the first is active.
        fsdp_plugin: Train under fully sharded data parallelism.
        torch_tp_plugin: Settings of tensor parallelism.
        megatron_lm_plugin: Train under Megatron-LM.
        parallelism_config: The dimensions of the device mesh.
        _from_accelerator: Make a new state in any case, whose engine no switch of the environment chooses.
        **kwargs: Options of `torch.distributed.init_process_group`; see `PartialState`.

    Raises:
        TypeError: If an option is unknown.
        ValueError: If the precision is unknown or the hardware does not have it, if plugins of two engines
            are given, or as `PartialState`.
    """

    _shared_state: ClassVar[dict[str, Any]] = shared_dict()

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        provided = {
            "mixed_precision": None if mixed_precision is None else _precision(mixed_precision),
            "dynamo_plugin": dynamo_plugin,
            "deepspeed_plugin": deepspeed_plugin,
            "fsdp_plugin": fsdp_plugin,
            "torch_tp_plugin": torch_tp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
            "parallelism_config": parallelism_config,
        }
        # Read first: a failure below must leave the newest state unchanged.
        newest: _Settings | None = AcceleratorState._shared_state.get("newest")
        if _from_accelerator and _group_is_gone():
            PartialState._reset_state()  # a second training after end_training() needs a group again
        # Before the settings are checked: what is allowed depends on the device.
        process = PartialState(cpu, **kwargs).process
        if newest is None or _from_accelerator or newest.differs(provided):
            newest = AcceleratorState._shared_state["newest"] = _settings(
                provided, process, reads_environment=not _from_accelerator
            )
        # In the handle: a handle on an older state keeps that state.
        self._made_with = newest

    @property
    def process(self) -> ProcessInfo:
        """This process."""
        return PartialState._process_info()

    @property
    def _settings(self) -> _Settings:
        if not is_initialized():
            raise AttributeError(_RESET)
        return self._made_with

    @property
    def initialized(self) -> bool:
        """Whether there is a state (not before the first one, nor after a reset)."""
        return is_initialized()

    @property
    def fork_launched(self) -> bool:
        """Whether a launch function forked this process."""
        return PartialState._fork_launched()

    @property
    def mixed_precision(self) -> str:
        """The mixed precision: "no", "fp16", "bf16" or "fp8"."""
        return self._settings.mixed_precision

    @property
    def distributed_type(self) -> DistributedType:
        """The engine, where a plugin requests one; else the kind of distributed run."""
        return self._settings.engine or self.process.distributed_type

    @property
    def dynamo_plugin(self) -> Any:
        """The `dynamo_plugin` argument: how models are compiled."""
        return self._settings.dynamo_plugin

    @property
    def fsdp_plugin(self) -> Any:
        """The `fsdp_plugin` argument."""
        return self._settings.fsdp_plugin

    @property
    def torch_tp_plugin(self) -> Any:
        """The `torch_tp_plugin` argument."""
        return self._settings.torch_tp_plugin

    @property
    def megatron_lm_plugin(self) -> Any:
        """The `megatron_lm_plugin` argument."""
        return self._settings.megatron_lm_plugin

    @property
    def parallelism_config(self) -> Any:
        """The `parallelism_config` argument: the dimensions of the device mesh."""
        return self._settings.parallelism_config

    @property
    def device_mesh(self) -> Any:
        """The device mesh of `parallelism_config`, built on first use; None without one."""
        return self._settings.device_mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded with `fully_shard` (FSDP version 2)."""
        plugin = self.fsdp_plugin
        return self.distributed_type == DistributedType.FSDP and getattr(plugin, "fsdp_version", None) == 2

    @property
    def deepspeed_plugins(self) -> dict[str, Any] | None:
        """The DeepSpeed plugins by name; a single plugin is called "default". None without any."""
        plugin = self._settings.deepspeed_plugin
        return plugin if plugin is None or isinstance(plugin, dict) else {"default": plugin}

    @property
    def deepspeed_plugin(self) -> Any:
        """The active DeepSpeed plugin; None without any."""
        plugins = self.deepspeed_plugins
        if plugins is None:
            return None
        return plugins[self._settings.selected or next(iter(plugins))]

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return one of the DeepSpeed plugins.

        Args:
            name: Its name in the dictionary of plugins.

        Returns:
            The plugin.

        Raises:
            ValueError: If there is none of this name.
        """
        plugins = self.deepspeed_plugins or {}
        if name not in plugins:
            raise ValueError(
                f"There is no DeepSpeed plugin {name!r}; there are: {', '.join(plugins) or 'none'}. Give "
                "deepspeed_plugin={name: plugin, ...} to the Accelerator."
            )
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Make one of the DeepSpeed plugins the active one.

        Args:
            name: Its name in the dictionary that was given; None for the first.

        Raises:
            ValueError: If there is none of this name, or none at all.
        """
        plugins = self.deepspeed_plugins or {}
        chosen = next(iter(plugins), "") if name is None else name
        self.get_deepspeed_plugin(chosen)
        _select(self._settings, chosen)

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy a process group; see `PartialState.destroy_process_group`.

        Args:
            group: The group; None for the default one and all others with it.
        """
        PartialState._destroy_group(group)

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Forget the newest state. Until another one is made, handles have no settings (AttributeError).

        Args:
            reset_partial_state: Forget the facts of the process too.
        """
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        if not is_initialized():
            return f"{type(self).__name__}(reset)"
        return f"{describe(self)}\nMixed precision type: {self.mixed_precision}\n"


_RESET = (
    "The settings of the Accelerator are not there, because AcceleratorState._reset_state() was called after "
    "this handle was made. Make a new AcceleratorState or Accelerator."
)


def is_initialized() -> bool:
    """Return whether there is an AcceleratorState."""
    return bool(AcceleratorState._shared_state)


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing.

    Args:
        *args: Ignored.
        **kwargs: Ignored.
    """


def _group_is_gone() -> bool:
    process: ProcessInfo | None = PartialState._shared_state.get("process")
    return process is not None and process.world_size > 1 and not rendezvous.has_group()


def _settings(provided: dict[str, Any], process: ProcessInfo, *, reads_environment: bool) -> _Settings:
    # The environment comes last: an argument has been looked at before.
    provided = {
        **provided,
        "mixed_precision": provided["mixed_precision"] or env.get("ACCELERATE_MIXED_PRECISION"),
    }
    _check_precision(provided["mixed_precision"], process)
    settings = _Settings(engine=_engine(provided, process, reads_environment), **provided)
    plugins = provided["deepspeed_plugin"]
    if isinstance(plugins, dict):
        if not plugins:
            raise ValueError("deepspeed_plugin is an empty dictionary; give at least one plugin, or None.")
        _select(settings, next(iter(plugins)))
    return settings


def _select(settings: _Settings, name: str) -> None:
    settings.selected = name
    plugins = settings.deepspeed_plugin
    if isinstance(plugins, dict):
        for other, plugin in plugins.items():
            plugin.selected = other == name


def _precision(value: str) -> str:
    try:
        return str(PrecisionType(value))
    except ValueError:
        raise ValueError(
            f"mixed_precision={value!r} is unknown; allowed: {', '.join(PrecisionType.list())}."
        ) from None


def _check_precision(precision: str, process: ProcessInfo) -> None:
    # fp8 is not autocast's: the library that runs it checks the hardware.
    hardware = device_spec(process.device)
    # "no" needs nothing.
    if precision not in (PrecisionType.BF16, PrecisionType.FP16) or hardware.has_autocast(precision):
        return
    # What the type and this device support: not every GPU computes in bf16.
    others = [other for other in sorted(hardware.autocast_dtypes) if hardware.has_autocast(other)]
    raise ValueError(
        f"mixed_precision={precision!r} is not available on {process.device}; allowed here: "
        f"{', '.join(['no', *others])}. Pass one of these to the Accelerator, to ACCELERATE_MIXED_PRECISION "
        "or to accel launch --mixed_precision."
    )


def _engine(
    provided: dict[str, Any], process: ProcessInfo, reads_environment: bool
) -> DistributedType | None:
    plugins = [(kind, name) for kind, name, _ in _ENGINES if provided[name] is not None]
    requested = plugins
    # A plugin argument wins over every switch of the environment.
    if not plugins and reads_environment:
        requested = [(kind, flag) for kind, _, flag in _ENGINES if env.get(flag)]
    if len(requested) > 1:
        raise ValueError(
            f"{' and '.join(name for _, name in requested)} request different engines, and a model is "
            "trained by one. Leave all but one out."
        )
    # XLA shards by itself: a plugin configures that, and does not select another engine.
    if not requested or process.distributed_type == DistributedType.XLA:
        return None
    return requested[0][0]
