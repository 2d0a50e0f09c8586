"""The state of this process: who it is, which device it has, and the process group that it belongs to.

One frozen `ProcessInfo` is shared by all instances of `PartialState`; the first instance makes it.
Functions that need a rank or a size take a `ProcessInfo` and default to `current_process()`, which works
without any state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from accel_state import env
from accel_state.devices.affinity import set_numa_affinity
from accel_state.devices.table import DEVICES, DeviceSpec, default_device, detect, device_spec
from accel_state.env import CPUInformation
from accel_state.logging.tracebacks import set_tracebacks
from accel_state.logging.warning import warn
from accel_state.process import failure, hooks, rendezvous
from accel_state.process.info import ProcessInfo
from accel_state.process.methods import ProcessMethods, describe, wait
from accel_state.process.ranks import device_index, find_place
from accel_state.process.shared_dict import shared_dict


class PartialState(ProcessMethods):
    """The facts of this process; making the first one joins or makes the process group.

    All instances are handles on the same facts. The number of processes comes from the environment
    (torchrun's names, then MPI's); one process needs no launcher and no group.

    Args:
        cpu: Run on the CPU whatever else there is.
        **kwargs: Options of `torch.distributed.init_process_group` (backend, init_method, timeout ...). A
            second instance that asks for others than the live group has warns that they are ignored.

    Raises:
        TypeError: If an option is unknown.
        ValueError: If the environment's numbers do not fit each other or the hardware, if it does not say
            where rank 0 is, or if `cpu=True` comes after the process took another device.
    """

    _shared_state: ClassVar[dict[str, Any]] = shared_dict()

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        options = rendezvous.check_options(kwargs)
        if self.initialized:
            _check_same(self.process, cpu, options)
        else:
            _initialize(cpu, options)

    @property
    def process(self) -> ProcessInfo:
        """The facts of this process."""
        return PartialState._held()

    @property
    def initialized(self) -> bool:
        """Whether the facts are there (not before the first instance, nor after a reset)."""
        return bool(PartialState._shared_state)

    @property
    def fork_launched(self) -> bool:
        """Whether a launch function forked this process."""
        return PartialState._fork_launched()

    @property
    def default_device(self) -> torch.device:
        """The device of a process that runs alone: ACCELERATE_TORCH_DEVICE, else the first one found."""
        return default_device()

    def set_device(self) -> None:
        """Make the device of this process the current one."""
        device = self.process.device
        device_spec(device).set_device(device.index)

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy a process group; nothing for one process.

        Rank and size stay known, so that `is_main_process` still says who prints. Waiting for others is an
        error from then on; `PartialState._reset_state()` and a new PartialState begin anew.

        Args:
            group: The group; None for the default one and all others with it.
        """
        PartialState._destroy_group(group)

    @classmethod
    def _held(cls) -> ProcessInfo:
        """Return the facts, or raise AttributeError where there are none."""
        held: ProcessInfo | None = PartialState._shared_state.get("process")
        if held is None:
            raise AttributeError(_RESET)
        return held

    @classmethod
    def _fork_launched(cls) -> bool:
        PartialState._held()
        return bool(PartialState._shared_state["fork_launched"])

    @classmethod
    def _destroy_group(cls, group: Any) -> None:
        """Destroy a process group without making a state where there is none."""
        rendezvous.destroy(group)
        held: ProcessInfo | None = PartialState._shared_state.get("process")
        # Only backend changes: rank and size stay known. Another group than the default leaves all of it.
        if held is not None and not rendezvous.has_group():
            PartialState._shared_state["process"] = replace(held, backend=None)

    @classmethod
    def _set_debug(cls, value: bool) -> None:
        process = replace(PartialState._held(), debug=bool(value))
        PartialState._shared_state["process"] = process
        hooks.joined(process)

    @classmethod
    def _reset_state(cls) -> None:
        """Forget the facts of this process. The process group stays, and the next PartialState joins it."""
        PartialState._shared_state.clear()

    def __repr__(self) -> str:
        return describe(self)


_RESET = (
    "The state of the process is not there, because PartialState._reset_state() was called after this "
    "handle was made (AcceleratorState._reset_state(reset_partial_state=True) does so too). Make a new "
    "PartialState or Accelerator."
)


def current_process() -> ProcessInfo:
    """Return the facts of this process, and change nothing.

    Returns:
        What PartialState holds; without one, what an initialised `torch.distributed` says; else one process
        on the default device.
    """
    held: ProcessInfo | None = PartialState._shared_state.get("process")
    if held is not None:
        return held
    if not rendezvous.has_group():
        # RANK and WORLD_SIZE may be set: without a process group this process still works by itself.
        alone = CPUInformation(0, 1, 0, 1)
        spec = detect()
        return _facts(spec, alone, default_device())
    # A group that somebody else has made: nothing is kept, as it may end before the next question.
    spec, facts = _where(False, {})
    return _facts(spec, facts, spec.device(device_index(spec, facts)))


def wait_for_everyone() -> None:
    """Wait until every process has come here; nothing for one process.

    Raises:
        RuntimeError: If the process group has been destroyed.
    """
    wait(current_process())


def _initialize(cpu: bool, options: dict[str, Any]) -> None:
    # First of all: a launcher wants to know of whatever fails from here on.
    failure.record_uncaught()
    spec, facts = _where(cpu, options)
    device = spec.device(device_index(spec, facts))
    # Before the group is made, as NCCL takes the current device.
    spec.set_device(device.index)
    if facts.world_size > 1:
        rendezvous.start(spec, facts, device, options)
    process = _facts(spec, facts, device)
    if env.get("ACCELERATE_CPU_AFFINITY"):
        set_numa_affinity(process.local_rank)
    set_tracebacks()
    # Last: there is a state only when everything above has worked.
    PartialState._shared_state.update(process=process, fork_launched=env.get("FORK_LAUNCHED"))
    hooks.joined(process)


def _where(cpu: bool, options: dict[str, Any]) -> tuple[DeviceSpec, CPUInformation]:
    spec = detect(cpu)
    facts = find_place(spec, options)
    if facts.world_size > 1 and spec.backend is None:
        warn(
            f"{spec.type} runs one process only, but there are {facts.world_size}: running on the CPU. Set "
            "ACCELERATE_USE_CPU=true to ask for that, or start one process.",
        )
        # No error: Apple's GPU, of which there is one, has no communication backend.
        spec = DEVICES["cpu"]
    return spec, facts


def _facts(spec: DeviceSpec, facts: CPUInformation, device: torch.device) -> ProcessInfo:
    alone = facts.world_size == 1
    return ProcessInfo(
        *facts,
        device=device,
        backend=rendezvous.backend_for(device) if rendezvous.has_group() else None,
        distributed_type=spec.single_type if alone else spec.distributed_type,
        debug=env.get("ACCELERATE_DEBUG_MODE"),
    )


def _check_same(process: ProcessInfo, cpu: bool, options: dict[str, Any]) -> None:
    if cpu and process.device.type != DEVICES["cpu"].type:
        raise ValueError(
            f"cpu=True, but this process is on {process.device} already. Give cpu=True where the first "
            "PartialState or Accelerator is made (or set ACCELERATE_USE_CPU=true), or call "
            "AcceleratorState._reset_state(reset_partial_state=True) before."
        )
    if options and process.world_size > 1 and rendezvous.has_group():
        rendezvous.warn_ignored(options)
