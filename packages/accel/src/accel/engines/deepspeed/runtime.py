"""Import DeepSpeed on first use, for one kind of device, and start it with the process group."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from accel.engines.common.single_process_group import ensure_process_group
from accel_state import env
from accel_state.accelerator_state import AcceleratorState
from accel_state.enums import DistributedType
from accel_state.imports.packages import require
from accel_state.process import rendezvous

if TYPE_CHECKING:
    from types import ModuleType

    from accel_state.process.info import ProcessInfo

_Function = TypeVar("_Function", bound=Callable[..., Any])

_group: weakref.ref[Any] | None = None  # the default group that DeepSpeed's own groups belong to


def load(device: torch.device) -> ModuleType:
    """Import DeepSpeed for a device.

    Args:
        device: This process's device.

    Raises:
        ImportError: If it is not installed; the message says how to install it.
        RuntimeError: If it was imported before, for another kind of device.
    """
    # It chooses the device on import, once and for all; a CPU process may also have GPUs.
    chosen = {"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {}
    with env.patch_environment(**chosen), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from the libraries that it imports
        deepspeed = require("deepspeed", "deepspeed")
        found = import_deepspeed("accelerator").get_accelerator().device_name()
    if found != device.type:
        raise RuntimeError(
            f"DeepSpeed was imported before, and uses {found}; this process's device is {device}. Set "
            f"DS_ACCELERATOR={device.type}, or import DeepSpeed after the Accelerator was made."
        )
    if device.type == "cpu":
        _leave_shared_memory_out()
    return deepspeed


def import_deepspeed(name: str) -> Any:
    """A module of DeepSpeed.

    Args:
        name: Its name, without "deepspeed." before it.
    """
    return import_module(f"deepspeed.{name}")


def _leave_shared_memory_out() -> None:
    """Make CPU processes communicate only through gloo.

    DeepSpeed would compile an extension (shared memory between them) at the start of the first run, which
    takes minutes, needs a compiler, and hangs every later run if it is interrupted. One that was installed
    with DeepSpeed is used.
    """
    if not import_deepspeed("git_version_info").installed_ops.get("deepspeed_shm_comm"):
        import_deepspeed("ops").__compatible_ops__["deepspeed_shm_comm"] = False


@contextlib.contextmanager
def started(process: ProcessInfo) -> Iterator[ModuleType]:
    """DeepSpeed, with a process group and the environment variables that its launcher would set.

    Args:
        process: This process.
    """
    deepspeed = load(process.device)
    # DeepSpeed would look for MPI, or start its own group.
    ensure_process_group(process)
    _follow_group()
    if not env.is_set("LOCAL_RANK"):
        env.set("LOCAL_RANK", process.local_rank)  # not restored: ZeRO-3 reads it in the first steps too
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):  # of torch functions that it uses
            warnings.simplefilter("ignore", kind)
        yield deepspeed


def _follow_group() -> None:
    """Make DeepSpeed forget the groups of a destroyed process group."""
    global _group
    now = dist.group.WORLD
    # A weak reference, so that end_training() can free the group.
    if _group is not None and _group() is not now:
        forget_groups()
    _group = weakref.ref(now)
    # Before, not after: DeepSpeed's groups are torch's, which are destroyed with the default one.
    rendezvous.before_destroy(forget_groups)


def forget_groups() -> None:
    """Make DeepSpeed forget all groups; it creates them again on demand."""
    groups, comm = (
        cast("Any", sys.modules.get(f"deepspeed.{name}")) for name in ("utils.groups", "comm.comm")
    )
    if groups is None or comm is None:
        return
    # deepspeed.comm.destroy_process_group would destroy the default process group as well.
    groups._release_process_group_references()
    comm.cdb = None


def deepspeed_required(func: _Function) -> _Function:
    """Restrict a function to runs in which DeepSpeed is the engine.

    Args:
        func: The function.

    Returns:
        The same function, which raises a ValueError under another engine.
    """

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if AcceleratorState._shared_state:
            kind = AcceleratorState().distributed_type
            if kind != DistributedType.DEEPSPEED:
                raise ValueError(
                    f"{func.__name__} needs DeepSpeed, and the engine here is that of {kind.value}. Pass a "
                    "DeepSpeedPlugin to the Accelerator (accel launch --use_deepspeed)."
                )
        return func(*args, **kwargs)

    return cast("_Function", checked)


def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> contextlib.AbstractContextManager[Any]:
    """A context in which parameters sharded by ZeRO-3 are gathered; otherwise it does nothing.

    Args:
        params: A parameter, several, or a module.
        modifier_rank: The rank whose changes to them are kept; None if they are only read.
        fwd_module: The module in whose forward they are used, if it is not their own.
        enabled: Whether to do anything.
    """
    plugin = AcceleratorState().deepspeed_plugin if AcceleratorState._shared_state else None
    if plugin is None or plugin.zero_stage != 3:
        return contextlib.nullcontext()
    deepspeed = require("deepspeed", "deepspeed")
    context: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        params, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled
    )
    return context
