"""Creating, joining and destroying the process group.

The group is created once per process from what the launcher wrote into the environment. An existing group
(created by the script, or before a reset of the state) is joined. Groups created here are destroyed when the
interpreter exits; other groups are left to the code that created them.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from accel_state import env
from accel_state.devices.table import DeviceSpec
from accel_state.env import CPUInformation
from accel_state.logging.warning import warn
from accel_state.process.gloo_threads import wait_for_gloo_threads, wait_for_gloo_threads_at_exit
from accel_state.process.stores import open_store

_FAILED_EXIT_S = 2.0  # how long destroying the group may delay the exit of a failed process


@dataclass(frozen=True)
class _CreatedGroup:
    group: weakref.ref[Any]  # a strong one would keep the threads of a destroyed group alive
    options: Mapping[str, Any]
    pid: int


_created: _CreatedGroup | None = None
_gloo_groups: dict[str, tuple[weakref.ref[Any], Any]] = {}  # by use: the default group, and the gloo group


def has_group() -> bool:
    """Return whether this process has a default process group."""
    return dist.is_available() and dist.is_initialized()


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `init_process_group` that were set (those that are not None).

    Args:
        options: Options by name.

    Returns:
        The ones with a value.

    Raises:
        TypeError: If `init_process_group` has no such option.
    """
    if not options:  # also in a build of torch without its distributed package
        return {}
    allowed = [name for name in inspect.signature(dist.init_process_group).parameters if name[0] != "_"]
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise TypeError(
            f"PartialState got unknown option(s) {', '.join(unknown)}; it takes cpu and the options of "
            f"torch.distributed.init_process_group: {', '.join(sorted(allowed))}."
        )
    return {name: value for name, value in options.items() if value is not None}


def start(spec: DeviceSpec, ranks: CPUInformation, device: torch.device, options: Mapping[str, Any]) -> None:
    """Create the default process group, unless there is one already.

    Args:
        spec: The hardware.
        ranks: The ranks of this process.
        device: This process's device.
        options: Checked options of `init_process_group`; they override the environment.

    Raises:
        ValueError: If the environment has no address of rank 0, or the existing group does not support the
            device.
    """
    _freeze_garbage_in_children()
    if has_group():
        warn_ignored(options)
        _check_supports(device)
        wait_for_gloo_threads_at_exit()
        return
    if not dist.is_available():
        raise RuntimeError(
            f"WORLD_SIZE={ranks.world_size}, but this build of torch has no distributed package. Install a "
            "build that has it, or start one process."
        )
    settings = _settings(spec, ranks, device, options)
    # Vendors register their backend here, which must exist when the group is created.
    spec.prepare_group(ranks.local_world_size)
    dist.init_process_group(**settings)
    _remember(options)


def _settings(
    spec: DeviceSpec, ranks: CPUInformation, device: torch.device, options: Mapping[str, Any]
) -> dict[str, Any]:
    # The user's options come last, and win.
    settings: dict[str, Any] = {"backend": spec.backend, **options}
    if settings["backend"] == "mpi":  # MPI itself knows ranks and addresses
        return settings
    settings.update(rank=ranks.rank, world_size=ranks.world_size)
    # A user's store needs no address.
    if "store" not in settings:
        url = settings.pop("init_method", None) or _init_method(spec, settings["backend"])
        if url == spec.init_method:  # the backend's own rendezvous
            settings["init_method"] = url
        else:
            settings["store"] = open_store(url, ranks.rank, ranks.world_size, options.get("timeout"))
    if spec.binds_group and settings["backend"] == spec.backend and "device_id" not in settings:
        settings["device_id"] = spec.with_index(device)  # torch needs an index
    return settings


def _init_method(spec: DeviceSpec, backend: str) -> str:
    # Workers of debug_launcher rendezvous through a file, which needs no free port.
    file = env.get("ACCELERATE_DEBUG_RDV_FILE")
    if file:
        return f"file://{file}"
    # Not for another backend that the user chose, which needs an address.
    if spec.init_method is not None and backend == spec.backend:
        return spec.init_method
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.is_set(name)]
    if missing:
        raise ValueError(
            f"The environment requests several processes, but {' and '.join(missing)} is not set, so they "
            "cannot find each other. Start the script with accel launch or torchrun, or set MASTER_ADDR to "
            "the address of rank 0 and MASTER_PORT to a free port there (mpirun: -x MASTER_ADDR -x "
            "MASTER_PORT)."
        )
    return "env://"


def gloo_group(use: str) -> Any:
    """Return a process group of all processes for CPU tensors and objects. Every process must call it.

    Its collectives wait neither for those of the default group nor for the device.

    Args:
        use: What it is for; each use has its own group, created at the first call.
    """
    default = dist.group.WORLD
    cached = _gloo_groups.get(use)
    # Weak, so that a destroyed default group is freed; its gloo groups are then created again.
    if cached is None or cached[0]() is not default:
        _gloo_groups[use] = cached = weakref.ref(default), dist.new_group(backend="gloo")
    return cached[1]


def warn_ignored(options: Mapping[str, Any]) -> None:
    """Warn about options that the existing process group does not have.

    Args:
        options: Checked options of `init_process_group`.
    """
    ignored = dict(options)
    # Both spellings: "gloo", and "cpu:gloo,cuda:nccl" for one of several devices.
    if ignored.get("backend") in (dist.get_backend(), dist.get_backend_config()):
        del ignored["backend"]
    if _is_created_here():
        assert _created is not None
        ignored = {name: value for name, value in ignored.items() if _created.options.get(name) != value}
    if ignored:
        listed = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
        warn(
            f"{listed} ignored: the process group exists already (backend {dist.get_backend_config()}). "
            "Pass these settings where the first PartialState or Accelerator is made, or to "
            "init_process_group.",
        )


def _check_supports(device: torch.device) -> None:
    if backend_for(device) is None:
        raise ValueError(
            f"The existing process group (backend {dist.get_backend_config()}) does not support {device}. "
            "Leave out cpu=True, or create the group with a backend for this device (gloo supports the CPU)."
        )


def backend_for(device: torch.device) -> str | None:
    """Return the process group's backend for a device, or None when it has none.

    Args:
        device: The device.
    """
    return _backends().get(device.type)


def _backends() -> dict[str, str]:
    """Return the backends of the group by device type ("cpu:gloo,cuda:nccl" as torch writes it)."""
    return dict(entry.split(":") for entry in dist.get_backend_config().split(","))


def _remember(options: Mapping[str, Any]) -> None:
    global _created
    wait_for_gloo_threads_at_exit()
    atexit.unregister(_destroy_at_exit)
    atexit.register(_destroy_at_exit)  # at exit the last registered one runs first
    _created = _CreatedGroup(weakref.ref(dist.group.WORLD), dict(options), os.getpid())


def _is_created_here() -> bool:
    return (
        _created is not None
        and _created.pid == os.getpid()
        and has_group()
        and _created.group() is dist.group.WORLD
    )


def _destroy_at_exit() -> None:
    # gloo can deadlock in its destructor during interpreter shutdown, and NCCL warns about a leak.
    if not _is_created_here():
        return
    if getattr(sys, "last_value", None) is None:
        destroy()
        return
    # After an uncaught exception a collective that waits for the other ranks may be in progress, and
    # destroying would wait for it until the group's timeout. The launcher must see this process end.
    # faulthandler's exit flushes nothing.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(_FAILED_EXIT_S, exit=True, file=nowhere)
        destroy()
        faulthandler.cancel_dump_traceback_later()


@cache  # once per process
def _freeze_garbage_in_children() -> None:
    """Make forked processes, such as a loader's workers, never collect garbage that they inherit.

    A process group in a reference cycle is destroyed when the cycle is collected. In a forked child that
    crashes, or hangs waiting for threads that do not exist there. (Collecting when the group is destroyed is
    not enough: a script may keep a model, and with it the group, alive longer.)
    """
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=gc.freeze)


_before_destroy: dict[Callable[[], None], None] = {}


def before_destroy(function: Callable[[], None]) -> None:
    """Register a callback to run before all process groups are destroyed; registering twice is a no-op.

    Args:
        function: The callback; it must not raise.
    """
    _before_destroy[function] = None


def destroy(group: Any = None) -> None:
    """Destroy a process group; a no-op when there is none.

    Args:
        group: The group; None for the default one and all others with it.
    """
    global _created
    if not has_group():
        return
    if group is None:
        for function in _before_destroy:
            function()
        wait_for_gloo_threads()  # a model in DDP may keep the group alive longer
    dist.destroy_process_group(group)
    # Another group may have been destroyed, while the default one still exists.
    if not dist.is_initialized():
        _created = None


def barrier(spec: DeviceSpec, device: torch.device) -> None:
    """Wait until every process has reached this call.

    Args:
        spec: The hardware.
        device: This process's device.
    """
    if "barrier" in spec.calls:
        spec.calls["barrier"]()
    elif spec.binds_group and backend_for(device) == spec.backend:
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()
