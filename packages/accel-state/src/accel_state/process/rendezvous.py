"""Making, joining and ending the process group.

The group is made once per process from what the launcher wrote into the environment. A group that exists
already (made by the script, or before a reset of the state) is joined. Groups made here are destroyed when
the interpreter exits; those of others are left to their owners.
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

_FAILED_EXIT_S = 2.0  # how long destroying the group may hold up the exit of a failed process


@dataclass(frozen=True)
class _Made:
    group: weakref.ref[Any]  # a strong one would keep the threads of a destroyed group alive
    options: Mapping[str, Any]
    pid: int


_made: _Made | None = None
_beside: dict[str, tuple[weakref.ref[Any], Any]] = {}  # by use: the default group, and the one beside it


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


def start(spec: DeviceSpec, facts: CPUInformation, device: torch.device, options: Mapping[str, Any]) -> None:
    """Make the default process group, unless there is one already.

    Args:
        spec: The hardware.
        facts: This process's place in the run.
        device: This process's device.
        options: Checked options of `init_process_group`; they win over what the environment says.

    Raises:
        ValueError: If the environment does not say where rank 0 is, or the group there cannot serve the
            device.
    """
    _keep_garbage_from_children()
    if has_group():
        warn_ignored(options)
        _check_serves(device)
        wait_for_gloo_threads_at_exit()
        return
    if not dist.is_available():
        raise RuntimeError(
            f"WORLD_SIZE={facts.world_size}, but this build of torch has no distributed package. Install a "
            "build that has it, or start one process."
        )
    settings = _settings(spec, facts, device, options)
    # Vendors register their backend here, which must be there when the group is made.
    spec.prepare_group(facts.local_world_size)
    dist.init_process_group(**settings)
    _remember(options)


def _settings(
    spec: DeviceSpec, facts: CPUInformation, device: torch.device, options: Mapping[str, Any]
) -> dict[str, Any]:
    # What the user gives comes last, and wins.
    settings: dict[str, Any] = {"backend": spec.backend, **options}
    if settings["backend"] == "mpi":  # MPI itself knows ranks and addresses
        return settings
    settings.update(rank=facts.rank, world_size=facts.world_size)
    # A store that the user gives needs no address.
    if "store" not in settings:
        url = settings.pop("init_method", None) or _init_method(spec, settings["backend"])
        if url == spec.init_method:  # the backend's own rendezvous
            settings["init_method"] = url
        else:
            settings["store"] = open_store(url, facts.rank, facts.world_size, options.get("timeout"))
    if spec.binds_group and settings["backend"] == spec.backend and "device_id" not in settings:
        settings["device_id"] = spec.with_index(device)  # torch asks for a number
    return settings


def _init_method(spec: DeviceSpec, backend: str) -> str:
    # Workers of debug_launcher meet at a file, which needs no free port.
    file = env.get("ACCELERATE_DEBUG_RDV_FILE")
    if file:
        return f"file://{file}"
    # Not for another backend that the user chose: that one needs an address.
    if spec.init_method is not None and backend == spec.backend:
        return spec.init_method
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.is_set(name)]
    if missing:
        raise ValueError(
            f"The environment asks for several processes, but {' and '.join(missing)} is not set, so they "
            "cannot find each other. Start the script with accel launch or torchrun, or set MASTER_ADDR to "
            "the address of rank 0 and MASTER_PORT to a free port there (mpirun: -x MASTER_ADDR -x "
            "MASTER_PORT)."
        )
    return "env://"


def gloo_group(use: str) -> Any:
    """Return a process group of all processes for CPU tensors and objects. Every process must call it.

    Its collectives do not wait for those of the default group, nor for the device.

    Args:
        use: What it is for; each use has a group of its own, which is made at the first call.
    """
    default = dist.group.WORLD
    known = _beside.get(use)
    # Weak, so that a default group that was destroyed is freed; the groups beside it are then made anew.
    if known is None or known[0]() is not default:
        _beside[use] = known = weakref.ref(default), dist.new_group(backend="gloo")
    return known[1]


def warn_ignored(options: Mapping[str, Any]) -> None:
    """Warn about options that a live process group does not follow.

    Args:
        options: Checked options of `init_process_group`.
    """
    given = dict(options)
    # Both spellings: "gloo", and "cpu:gloo,cuda:nccl" for one of several devices.
    if given.get("backend") in (dist.get_backend(), dist.get_backend_config()):
        del given["backend"]
    if _is_ours():
        assert _made is not None
        given = {name: value for name, value in given.items() if _made.options.get(name) != value}
    if given:
        listed = ", ".join(f"{name}={value!r}" for name, value in given.items())
        warn(
            f"{listed} ignored: the process group is already there (backend {dist.get_backend_config()}). "
            "Give these settings where the first PartialState or Accelerator is made, or to "
            "init_process_group.",
        )


def _check_serves(device: torch.device) -> None:
    if backend_for(device) is None:
        raise ValueError(
            f"The process group that is there (backend {dist.get_backend_config()}) cannot serve {device}. "
            "Leave out cpu=True, or make the group with a backend for this device (gloo serves the CPU)."
        )


def backend_for(device: torch.device) -> str | None:
    """Return the backend with which the process group serves a device, or None when it does not.

    Args:
        device: The device.
    """
    return _backends().get(device.type)


def _backends() -> dict[str, str]:
    """Return the backends of the group by device type ("cpu:gloo,cuda:nccl" as torch writes it)."""
    return dict(part.split(":") for part in dist.get_backend_config().split(","))


def _remember(options: Mapping[str, Any]) -> None:
    global _made
    wait_for_gloo_threads_at_exit()
    atexit.unregister(_destroy_at_exit)
    atexit.register(_destroy_at_exit)  # at exit the last one runs first
    _made = _Made(weakref.ref(dist.group.WORLD), dict(options), os.getpid())


def _is_ours() -> bool:
    return (
        _made is not None and _made.pid == os.getpid() and has_group() and _made.group() is dist.group.WORLD
    )


def _destroy_at_exit() -> None:
    # gloo can deadlock in its destructor while the interpreter goes down, and NCCL warns about a leak.
    if not _is_ours():
        return
    if getattr(sys, "last_value", None) is None:
        destroy()
        return
    # An unhandled exception brought us here, so an operation that waits for the others may be under way, and
    # destroying would wait for it until the group's timeout. Whoever watches this process must see it end.
    # That end writes nothing out.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(_FAILED_EXIT_S, exit=True, file=nowhere)
        destroy()
        faulthandler.cancel_dump_traceback_later()


@cache  # it holds from the first call on
def _keep_garbage_from_children() -> None:
    """Have forked processes, as a loader's workers, never collect what they inherit.

    A process group in a reference cycle ends when the cycle is collected. In a child it then crashes, or
    waits for ever for its threads, which are not there. (To collect when the group is destroyed would not do:
    a script may hold a model, and the group with it, longer.)
    """
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=gc.freeze)


_before: dict[Callable[[], None], None] = {}


def before_destroy(function: Callable[[], None]) -> None:
    """Have something called before all process groups are destroyed; several times the same counts once.

    Args:
        function: What to call; it must not raise.
    """
    _before[function] = None


def destroy(group: Any = None) -> None:
    """Destroy a process group; nothing when there is none.

    Args:
        group: The group; None for the default one and all others with it.
    """
    global _made
    if not has_group():
        return
    if group is None:
        for function in _before:
            function()
        wait_for_gloo_threads()  # a model in DDP may keep the group alive longer
    dist.destroy_process_group(group)
    # One of several groups may have been destroyed, and ours still be there.
    if not dist.is_initialized():
        _made = None


def barrier(spec: DeviceSpec, device: torch.device) -> None:
    """Wait until every process has come here.

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
