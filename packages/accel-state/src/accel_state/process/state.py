"""The state of this process: its ranks, its device, and its process group.

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
from accel_state.process.ranks import device_index, find_ranks
from accel_state.process.shared_dict import shared_dict


class PartialState(ProcessMethods):
    """Ranks, device and process group of this process; the first instance joins or creates the group.

    All instances share one state. The number of processes comes from the environment (torchrun's variables,
    then MPI's); one process needs no launcher and no group.

    Args:
        cpu: Run on the CPU, whatever other hardware there is.
        **kwargs: Options of `torch.distributed.init_process_group` (backend, init_method, timeout ...). A
            second instance with options that differ from the existing group's warns that they are ignored.

    Raises:
        TypeError: If an option is unknown.
        ValueError: If the environment's numbers do not fit each other or the hardware, if it has no address
            of rank 0, or if `cpu=True` comes after the process took another device.
    """

    _shared_state: ClassVar[dict[str, Any]] = shared_dict()

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        options = rendezvous.check_options(kwargs)
        if self.initialized:
            _check_consistent(self.process, cpu, options)
        else:
            _initialize(cpu, options)

    @property
    def process(self) -> ProcessInfo:
        """The ranks, device and backend of this process."""
        return PartialState._process_info()

    @property
    def initialized(self) -> bool:
        """Whether the state exists (not before the first instance, nor after a reset)."""
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
        """Destroy a process group; a no-op for one process.

        Rank and size are kept, so that `is_main_process` still works. Waiting for other ranks raises from
        then on; `PartialState._reset_state()` and a new PartialState start again.

        Args:
            group: The group; None for the default one and all others with it.
        """
        PartialState._destroy_group(group)

    @classmethod
    def _process_info(cls) -> ProcessInfo:
        """Return the process info, or raise AttributeError when there is none."""
        process: ProcessInfo | None = PartialState._shared_state.get("process")
        if process is None:
            raise AttributeError(_RESET)
        return process

    @classmethod
    def _fork_launched(cls) -> bool:
        PartialState._process_info()
        return bool(PartialState._shared_state["fork_launched"])

    @classmethod
    def _destroy_group(cls, group: Any) -> None:
        """Destroy a process group without creating a state."""
        rendezvous.destroy(group)
        process: ProcessInfo | None = PartialState._shared_state.get("process")
        # Only the backend changes, and only if the default group was destroyed: rank and size are kept.
        if process is not None and not rendezvous.has_group():
            PartialState._shared_state["process"] = replace(process, backend=None)

    @classmethod
    def _set_debug(cls, value: bool) -> None:
        process = replace(PartialState._process_info(), debug=bool(value))
        PartialState._shared_state["process"] = process
        hooks.joined(process)

    @classmethod
    def _reset_state(cls) -> None:
        """Forget the state of this process. The process group stays, and the next PartialState joins it."""
        PartialState._shared_state.clear()

    def __repr__(self) -> str:
        return describe(self)


_RESET = (
    "The state of the process does not exist, because PartialState._reset_state() was called after this "
    "handle was made (AcceleratorState._reset_state(reset_partial_state=True) does so too). Make a new "
    "PartialState or Accelerator."
)


def current_process() -> ProcessInfo:
    """Return the info of this process, without side effects.

    Returns:
        That of PartialState; without one, that of an initialised `torch.distributed`; else one process on the
        default device.
    """
    process: ProcessInfo | None = PartialState._shared_state.get("process")
    if process is not None:
        return process
    if not rendezvous.has_group():
        # Even if RANK and WORLD_SIZE are set, a process without a process group works alone.
        alone = CPUInformation(0, 1, 0, 1)
        spec = detect()
        return _make_process_info(spec, alone, default_device())
    # A group that PartialState did not create is not cached: it may be destroyed before the next call.
    spec, ranks = _find_hardware(False, {})
    return _make_process_info(spec, ranks, spec.device(device_index(spec, ranks)))


def wait_for_everyone() -> None:
    """Wait until every process has reached this call; a no-op for one process.

    Raises:
        RuntimeError: If the process group has been destroyed.
    """
    wait(current_process())


def _initialize(cpu: bool, options: dict[str, Any]) -> None:
    # First: a launcher must learn of any failure from here on.
    failure.record_uncaught()
    spec, ranks = _find_hardware(cpu, options)
    device = spec.device(device_index(spec, ranks))
    # Before the group is created, as NCCL uses the current device.
    spec.set_device(device.index)
    if ranks.world_size > 1:
        rendezvous.start(spec, ranks, device, options)
    process = _make_process_info(spec, ranks, device)
    if env.get("ACCELERATE_CPU_AFFINITY"):
        set_numa_affinity(process.local_rank)
    set_tracebacks()
    # Last: the state exists only if everything above has worked.
    PartialState._shared_state.update(process=process, fork_launched=env.get("FORK_LAUNCHED"))
    hooks.joined(process)


def _find_hardware(cpu: bool, options: dict[str, Any]) -> tuple[DeviceSpec, CPUInformation]:
    spec = detect(cpu)
    ranks = find_ranks(spec, options)
    if ranks.world_size > 1 and spec.backend is None:
        warn(
            f"{spec.type} runs one process only, but there are {ranks.world_size}: running on the CPU. Set "
            "ACCELERATE_USE_CPU=true to request that, or start one process.",
        )
        # No error: Apple's GPU, of which there is one, has no communication backend.
        spec = DEVICES["cpu"]
    return spec, ranks


def _make_process_info(spec: DeviceSpec, ranks: CPUInformation, device: torch.device) -> ProcessInfo:
    alone = ranks.world_size == 1
    return ProcessInfo(
        *ranks,
        device=device,
        backend=rendezvous.backend_for(device) if rendezvous.has_group() else None,
        distributed_type=spec.single_type if alone else spec.distributed_type,
        debug=env.get("ACCELERATE_DEBUG_MODE"),
    )


def _check_consistent(process: ProcessInfo, cpu: bool, options: dict[str, Any]) -> None:
    if cpu and process.device.type != DEVICES["cpu"].type:
        raise ValueError(
            f"cpu=True, but this process is on {process.device} already. Pass cpu=True where the first "
            "PartialState or Accelerator is made (or set ACCELERATE_USE_CPU=true), or call "
            "AcceleratorState._reset_state(reset_partial_state=True) before."
        )
    if options and process.world_size > 1 and rendezvous.has_group():
        rendezvous.warn_ignored(options)
