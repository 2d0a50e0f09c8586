"""Dataclasses that customise a run; torch is imported on first use."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from accel_state import env
from accel_state.enums import DynamoBackend
from accel_state.env.fields import from_env, read_environment
from accel_state.logging.suggestion import did_you_mean

if TYPE_CHECKING:
    import torch

    from accel_state.literals import DynamoBackendName

_Activity = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]

_ACTIVITIES = ("cpu", "xpu", "mtia", "cuda", "hpu")
_SCHEDULE_KEYS = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")


class KwargsHandler:
    """Base of the dataclasses whose fields are keyword arguments of another function."""

    def to_dict(self) -> dict[str, Any]:
        """Return a deep copy of all fields by name."""
        # Not dataclasses.asdict, which would turn nested dataclasses into dictionaries.
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return a deep copy of the fields whose values differ from the defaults of the class."""
        defaults: dict[str, Any] = {}
        if dataclasses.is_dataclass(self):
            # A default factory gives another object each time.
            defaults = {field.name: _default(field) for field in dataclasses.fields(self)}
        return {
            name: value
            for name, value in self.to_dict().items()
            if name not in defaults or value != defaults[name]
        }


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@dataclasses.dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`.

    Args:
        backend: Communication backend; as long as it is left at "nccl", the device's own backend is used.
        init_method: URL of the rendezvous; the environment's by default.
        timeout: How long an operation may take; None leaves it to the backend (10 minutes for nccl, 30 for
            the others).

    Raises:
        TypeError: If the timeout is not a `timedelta`.
        ValueError: If the timeout is not positive.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        # The backend has its own default, which differs between nccl and gloo.
        if self.timeout is None:
            return
        if not isinstance(self.timeout, timedelta):
            raise TypeError(
                f"timeout must be a datetime.timedelta, not {self.timeout!r}; "
                f"for seconds, write timedelta(seconds={self.timeout!r})."
            )
        if self.timeout <= timedelta(0):
            raise ValueError(f"timeout must be longer than nothing, not {self.timeout!r}.")


@dataclasses.dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`.

    Args:
        activities: What to record: some of "cpu", "xpu", "mtia", "cuda", "hpu"; by default all that the
            machine has.
        schedule_option: Arguments of `torch.profiler.schedule`, in steps: "active" (needed), "wait" and
            "warmup" (0 by default), "repeat", "skip_first" and, where torch has it, "skip_first_wait".
            By default all is recorded.
        on_trace_ready: Called with the profiler each time that a recording is complete.
        record_shapes: Record the shapes of the operators' inputs.
        profile_memory: Record allocations.
        with_stack: Record file and line of each operator.
        with_flops: Estimate floating point operations.
        with_modules: Record the module hierarchy.
        output_trace_dir: Folder into which each process writes a Chrome trace, `profile_<rank>.json`; further
            recordings of a schedule are `profile_<rank>_2.json` and so on.
        summary: How many rows to print on the main process at the end: the operators with the most self
            time, as means over all processes. None prints nothing.

    `output_trace_dir` and `summary` are for `Accelerator.profile`; `build` ignores them.

    Raises:
        ValueError: If an activity, a key or value of the schedule, or the number of rows is not allowed.
    """

    activities: list[_Activity] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None
    summary: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        rows = self.summary
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise ValueError(f"summary counts rows of a table: it must be 1 or more, or None, not {rows!r}.")
        for activity in self.activities or ():
            if activity not in _ACTIVITIES:
                raise ValueError(
                    f"{activity!r} is not an activity of the profiler; allowed: {', '.join(_ACTIVITIES)}."
                    f"{did_you_mean(activity, _ACTIVITIES)}"
                )
        if self.schedule_option is not None:
            _check_schedule(self.schedule_option)

    def build(self) -> torch.profiler.profile:
        """Make the profiler.

        Returns:
            A profiler, not started yet.

        Raises:
            ValueError: If this version of torch does not have one of the activities.
        """
        import torch

        schedule = None
        if self.schedule_option is not None:
            # torch has no default for either.
            schedule = torch.profiler.schedule(**{"wait": 0, "warmup": 0, **self.schedule_option})
        return torch.profiler.profile(
            activities=self._profiler_activities(),
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def _profiler_activities(self) -> list[torch.profiler.ProfilerActivity] | None:
        from torch.profiler import ProfilerActivity

        if self.activities is None:
            return None
        # The activities depend on the version of torch.
        known = ProfilerActivity.__members__
        for activity in self.activities:
            if activity.upper() not in known:
                names = ", ".join(name.lower() for name in known)
                raise ValueError(f"This version of torch cannot profile {activity!r}; it knows {names}.")
        return [known[activity.upper()] for activity in self.activities]


def _check_schedule(schedule: dict[str, int]) -> None:
    for key, value in schedule.items():
        if key not in _SCHEDULE_KEYS:
            raise ValueError(
                f"{key!r} is not a key of schedule_option; allowed: {', '.join(_SCHEDULE_KEYS)}."
                f"{did_you_mean(key, _SCHEDULE_KEYS)}"
            )
        if not isinstance(value, int) or value < (1 if key == "active" else 0):
            least = "1 or more" if key == "active" else "0 or more"
            raise ValueError(f"schedule_option[{key!r}] counts steps: it must be {least}, not {value!r}.")
    if "active" not in schedule:
        raise ValueError(
            f"schedule_option {schedule!r} records nothing: add 'active', the number of steps to record."
        )


@dataclasses.dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated.

    Args:
        num_steps: Micro-batches per optimizer step; None for the Accelerator's own setting.
        adjust_scheduler: Count the calls of a scheduler inside a window in its `_step_count`, torch's number
            of calls. The learning rate does not depend on it: a schedule moves with optimizer steps, and its
            length is given in these.
        sync_with_dataloader: End the window at the end of the loader, full or not.
        sync_each_batch: Synchronise gradients at each micro-batch: more communication, less memory.
        step_scheduler_per_process: Move schedules once per process at each optimizer step, for schedules
            whose length was chosen for one process. When False, one optimizer step is one move, on any
            number of processes.

    Raises:
        ValueError: If num_steps is not a positive integer.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    step_scheduler_per_process: bool = dataclasses.field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        steps = self.num_steps
        # bool is an int to isinstance, and True would pass for 1.
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ValueError(f"num_steps counts micro-batches per optimizer step: 1 or more, not {steps!r}.")


@dataclasses.dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of `torch.compile`.

    What is left at None is read from ACCELERATE_DYNAMO_BACKEND, _MODE, _USE_FULLGRAPH, _USE_DYNAMIC and
    _USE_REGIONAL_COMPILATION.

    Args:
        backend: A `DynamoBackend` or its name in any letter case; "NO" compiles nothing.
        mode: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs".
        fullgraph: Raise on graph breaks.
        dynamic: Trace with dynamic shapes; None lets torch decide.
        options: Options of the backend; torch takes either these or a mode.
        disable: Make `torch.compile` do nothing.
        use_regional_compilation: Compile each repeated block once, rather than the full model.

    Raises:
        ValueError: If the backend or the mode is unknown, or both a mode and options are passed.
    """

    backend: DynamoBackend | DynamoBackendName | None = from_env("ACCELERATE_DYNAMO_BACKEND")
    mode: str | None = from_env("ACCELERATE_DYNAMO_MODE")
    fullgraph: bool | None = from_env("ACCELERATE_DYNAMO_USE_FULLGRAPH")
    dynamic: bool | None = from_env("ACCELERATE_DYNAMO_USE_DYNAMIC")
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = from_env("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")

    def __post_init__(self) -> None:
        user_set = read_environment(self)
        self.backend = DynamoBackend(self.backend)  # an unknown name raises
        if self.options is not None and "mode" in user_set and self.mode != "default":
            raise ValueError(
                f"torch.compile takes a mode or options, not both; got mode={self.mode!r} and "
                f"options={self.options!r}. Leave one out."
            )
        # The table of the environment has the only list of them.
        modes = env.VARIABLES["ACCELERATE_DYNAMO_MODE"].choices
        if self.mode not in modes:
            raise ValueError(
                f"{self.mode!r} is not a mode of torch.compile; allowed: {', '.join(modes)}."
                f"{did_you_mean(self.mode, modes)}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return a deep copy of all fields by name, with the backend's name as torch spells it."""
        fields = super().to_dict()
        # torch.compile looks backends up by their names in lower case.
        fields["backend"] = str(fields["backend"]).lower()
        return fields

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for `torch.compile`: the fields which differ from its own defaults."""
        fields = self.to_dict()
        del fields["use_regional_compilation"]
        # torch.compile raises if it gets both, even with the default mode.
        if fields["options"] is not None:
            del fields["mode"]
        unset = {"mode": "default", "fullgraph": False, "dynamic": None, "options": None, "disable": False}
        return {name: value for name, value in fields.items() if name == "backend" or value != unset[name]}
