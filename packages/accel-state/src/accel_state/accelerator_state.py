"""How a run is trained: precision and engine plugins, as one Accelerator was made with them.

States with different settings live side by side in one process. The newest one is what a bare
`AcceleratorState()` reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from accel_state.enums import DistributedType
from accel_state.process import rendezvous
from accel_state.process.info import ProcessInfo
from accel_state.process.methods import ProcessMethods, describe
from accel_state.process.shared_dict import ThreadLocalSharedDict, shared_dict
from accel_state.process.state import PartialState
from accel_state.train_plan import TrainPlan, make_train_plan, parse_precision

if TYPE_CHECKING:
    from accel_state.enums import PrecisionType
    from accel_state.literals import PrecisionName

__all__ = ["AcceleratorState", "ThreadLocalSharedDict", "do_nothing", "is_initialized"]


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
        _from_accelerator: Make a new state in any case.
        **kwargs: Options of `torch.distributed.init_process_group`; see `PartialState`.

    Raises:
        TypeError: If an option is unknown.
        ValueError: If the precision is unknown or the hardware does not have it, if plugins of two engines
            are given, or as `PartialState`.
    """

    _shared_state: ClassVar[dict[str, Any]] = shared_dict()

    def __init__(
        self,
        mixed_precision: PrecisionType | PrecisionName | None = None,
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
        passed = {
            "dynamo_plugin": dynamo_plugin,
            "deepspeed_plugin": deepspeed_plugin,
            "fsdp_plugin": fsdp_plugin,
            "torch_tp_plugin": torch_tp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
            "parallelism_config": parallelism_config,
        }
        precision = None if mixed_precision is None else parse_precision(mixed_precision)
        newest: _Shown | None = AcceleratorState._shared_state.get("newest")
        is_same = (
            newest is not None
            and precision in (None, newest.plan.mixed_precision)
            and not _from_accelerator
            # By identity: an equal plugin is another object, which may be changed later.
            and all(value is None or value is newest.get(name) for name, value in passed.items())
        )
        if is_same:
            PartialState(cpu, **kwargs)
        else:
            if _from_accelerator and _group_is_gone():
                PartialState._reset_state()
            plan = make_train_plan(mixed_precision=precision, **passed)
            newest = _show(plan, cpu, kwargs)
        assert newest is not None, "it is the same, or new"
        # In the handle: one on an older state keeps that state.
        self._shown_by_handle = newest

    @classmethod
    def _from_plan(
        cls, plan: TrainPlan, cpu: bool, process_group_options: dict[str, Any]
    ) -> AcceleratorState:
        """Join the process group, and make the newest state show a plan."""
        if _group_is_gone():
            PartialState._reset_state()  # a second training after end_training() needs a group again
        state = cls.__new__(cls)
        state._shown_by_handle = _show(plan, cpu, process_group_options)
        return state

    @property
    def process(self) -> ProcessInfo:
        """This process."""
        return PartialState._process_info()

    @property
    def _shown(self) -> _Shown:
        if not is_initialized():
            raise AttributeError(_RESET)
        return self._shown_by_handle

    @property
    def plan(self) -> TrainPlan:
        """How the Accelerator trains, and why."""
        return self._shown.plan

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
        return self.plan.mixed_precision

    @property
    def distributed_type(self) -> DistributedType:
        """The engine, if a plugin requests one; else how the processes of the run work together."""
        kind = self.plan.distributed_type
        assert kind is not None, "a plan that is shown has one"
        return kind

    @property
    def dynamo_plugin(self) -> Any:
        """How models are compiled."""
        return self.plan.dynamo

    @property
    def fsdp_plugin(self) -> Any:
        """The settings of fully sharded data parallelism."""
        return self.plan.plugins.get("fsdp_plugin")

    @property
    def torch_tp_plugin(self) -> Any:
        """The settings of tensor parallelism."""
        return self.plan.torch_tp_plugin

    @property
    def megatron_lm_plugin(self) -> Any:
        """The settings of Megatron-LM."""
        return self.plan.plugins.get("megatron_lm_plugin")

    @property
    def parallelism_config(self) -> Any:
        """The dimensions of the device mesh."""
        return self.plan.parallelism

    @property
    def device_mesh(self) -> Any:
        """The device mesh of `parallelism_config`, built on first access; None without one."""
        config = self.plan.parallelism
        # On first access: making a mesh is a collective, and most runs have none.
        return None if config is None else config.get_device_mesh(self.process.device.type)

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded with `fully_shard` (FSDP version 2)."""
        plugin = self.fsdp_plugin
        return self.distributed_type == DistributedType.FSDP and getattr(plugin, "fsdp_version", None) == 2

    @property
    def deepspeed_plugins(self) -> dict[str, Any] | None:
        """The DeepSpeed plugins by name; one that was given alone is called "default". None without any."""
        plugins = self.plan.plugins.get("deepspeed_plugin")
        return plugins if plugins is None or isinstance(plugins, dict) else {"default": plugins}

    @property
    def deepspeed_plugin(self) -> Any:
        """The active DeepSpeed plugin; None without any."""
        plugins = self.deepspeed_plugins
        if plugins is None:
            return None
        return plugins[self._shown.selected or next(iter(plugins))]

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
        _select(self._shown, chosen)

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


@dataclass
class _Shown:
    """The plan that a state shows, and the active one of several DeepSpeed plugins."""

    plan: TrainPlan
    selected: str | None = None

    def get(self, argument: str) -> Any:
        """What an argument of the state was decided to be."""
        others = {
            "dynamo_plugin": self.plan.dynamo,
            "torch_tp_plugin": self.plan.torch_tp_plugin,
            "parallelism_config": self.plan.parallelism,
        }
        return {**others, **self.plan.plugins}.get(argument)


def _show(plan: TrainPlan, cpu: bool, process_group_options: dict[str, Any]) -> _Shown:
    process = PartialState(cpu, **process_group_options).process
    shown = _Shown(plan.on(process))
    plugins = plan.plugins.get("deepspeed_plugin")
    if isinstance(plugins, dict):
        _select(shown, next(iter(plugins)))
    AcceleratorState._shared_state["newest"] = shown
    return shown


def _select(shown: _Shown, name: str) -> None:
    shown.selected = name
    plugins = shown.plan.plugins["deepspeed_plugin"]
    if isinstance(plugins, dict):
        for other, plugin in plugins.items():
            plugin.selected = other == name


def _group_is_gone() -> bool:
    process: ProcessInfo | None = PartialState._shared_state.get("process")
    return process is not None and process.world_size > 1 and not rendezvous.has_group()
