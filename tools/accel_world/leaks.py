"""What a test must leave as it found it: each aspect is captured before, restored and named after.

Nothing here imports torch or accel: the state of a library that is not loaded is not checked.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "ASPECTS",
    "Aspect",
    "Snapshot",
    "capture",
    "children",
    "own_children",
    "reset_singletons",
    "restore",
]

PATIENCE_S = 4.0  # how long an ending thread or child may take
SINGLETONS = (
    ("accel_state.gradient", "GradientState"),
    ("accel_state.accelerator_state", "AcceleratorState"),
    ("accel_state.process.state", "PartialState"),
)
own_children: set[int] = set()  # ids of processes that belong to the plugin, not to a test
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
# Prefixes: pytest, torch and OpenMP set these themselves, at any time.
VOLATILE_VARIABLES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "KMP_")


@dataclass(frozen=True)
class Aspect:
    """One kind of thing a test can leave behind."""

    name: str
    capture: Callable[[], Any]
    restore: Callable[[Any], list[str]]  # takes what was captured, puts it back, says what had changed


Snapshot = list[tuple[Aspect, Any]]


def capture(aspects: Iterable[Aspect] | None = None) -> Snapshot:
    """Note the present state of every aspect."""
    return [(aspect, aspect.capture()) for aspect in (ASPECTS if aspects is None else aspects)]


def restore(snapshot: Snapshot) -> dict[str, list[str]]:
    """Put everything back and return what had changed, by the aspect's name."""
    found = {aspect.name: aspect.restore(before) for aspect, before in snapshot}
    return {name: changes for name, changes in found.items() if changes}


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(VOLATILE_VARIABLES)}


def _restore_environment(before: dict[str, str]) -> list[str]:
    after = _environment()
    if after == before:
        return []
    changes = [f"{key} set to {after[key]!r}" for key in sorted(after.keys() - before.keys())]
    changes += [f"{key} removed" for key in sorted(before.keys() - after.keys())]
    changes += [
        f"{key} changed to {after[key]!r}"
        for key in sorted(after.keys() & before.keys())
        if after[key] != before[key]
    ]
    for key in after.keys() - before.keys():
        del os.environ[key]
    os.environ.update(before)
    return changes


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _restore_folder(before: str | None) -> list[str]:
    after = _folder()
    if after == before or before is None:
        return []
    os.chdir(before)
    return [f"changed to {after}"]


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _restore_threads(before: set[threading.Thread]) -> list[str]:
    left = _threads() - before
    if left:
        gc.collect()  # a loader or an executor that is garbage stops its threads
        for thread in left:
            thread.join(PATIENCE_S)
    return [f"thread {thread.name!r} still runs" for thread in left if thread.is_alive()]


def children() -> set[int]:
    """Return the ids of this process's running children (zombies and Python's own helpers left out)."""
    pids = {pid for listing in Path("/proc/self/task").glob("*/children") for pid in _read_pids(listing)}
    return {pid for pid in pids - own_children - _helpers() if _runs(pid)}


def _read_pids(listing: Path) -> list[int]:
    try:
        return [int(pid) for pid in listing.read_text().split()]
    except FileNotFoundError:  # the thread ended meanwhile
        return []


def _helpers() -> set[int | None]:
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    server = sys.modules.get("multiprocessing.forkserver")
    return {
        tracker._resource_tracker._pid if tracker else None,
        server._forkserver._forkserver_pid if server else None,
    }


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _restore_children(before: set[int]) -> list[str]:
    left = children() - before
    if left:
        gc.collect()
        until = time.monotonic() + PATIENCE_S
        while (left := children() - before) and time.monotonic() < until:
            time.sleep(0.01)
    return [f"process {pid} still ran: {_end(pid)}" for pid in sorted(left)]


def _end(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (OSError, ChildProcessError):
        return "ended"
    return command.strip()[:200]


def _signal_handlers() -> dict[str, Any]:
    return {name: signal.getsignal(getattr(signal, name)) for name in SIGNALS}


def _restore_signal_handlers(before: dict[str, Any]) -> list[str]:
    changed = {name: now for name, now in _signal_handlers().items() if now != before[name]}
    for name in changed:
        signal.signal(getattr(signal, name), before[name])
    return [f"{name} is handled by {handler!r}" for name, handler in changed.items()]


def _groups() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _restore_groups(before: bool) -> list[str]:
    if before or not _groups():
        return []
    sys.modules["torch.distributed"].destroy_process_group()
    return ["torch.distributed was left initialised"]


def _singletons() -> set[str]:
    return {cls.__name__ for cls in _singleton_classes() if getattr(cls, "_shared_state", None)}


def _singleton_classes() -> list[Any]:
    modules = [(sys.modules.get(module), name) for module, name in SINGLETONS]
    return [getattr(module, name) for module, name in modules if hasattr(module, name)]


def reset_singletons() -> None:
    """Forget accel's process-wide state, whichever of it is loaded."""
    for cls in _singleton_classes():
        if hasattr(cls, "_reset_state"):
            cls._reset_state()


def _restore_singletons(before: set[str]) -> list[str]:
    left = _singletons() - before
    if left:
        reset_singletons()
    return [f"{name} was left initialised (call its _reset_state())" for name in sorted(left)]


def _torch_settings() -> dict[str, Any] | None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):  # not there, or half imported
        return None
    return {
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "deterministic mode": torch.get_deterministic_debug_mode(),
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "grad mode": torch.is_grad_enabled(),
    }


def _restore_torch_settings(before: dict[str, Any] | None) -> list[str]:
    after = _torch_settings()
    if before is None or after is None or after == before:
        return []
    torch = sys.modules["torch"]
    changed = [name for name in before if after[name] != before[name]]
    torch.set_default_dtype(before["default dtype"])
    torch.set_num_threads(before["number of threads"])
    torch.set_deterministic_debug_mode(before["deterministic mode"])
    compiler = sys.modules.get("torch._inductor.config")  # use_deterministic_algorithms sets it too
    if compiler is not None:
        compiler.deterministic = before["deterministic mode"] > 0  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = before["cudnn.deterministic"]
    torch.backends.cudnn.benchmark = before["cudnn.benchmark"]
    torch.set_grad_enabled(before["grad mode"])
    return [f"{name} changed from {before[name]} to {after[name]}" for name in changed]


# Singletons come before the process group, which they may own; the environment comes last.
ASPECTS = (
    Aspect("accel state", _singletons, _restore_singletons),
    Aspect("process group", _groups, _restore_groups),
    Aspect("threads", _threads, _restore_threads),
    Aspect("child processes", children, _restore_children),
    Aspect("signal handlers", _signal_handlers, _restore_signal_handlers),
    Aspect("torch settings", _torch_settings, _restore_torch_settings),
    Aspect("working folder", _folder, _restore_folder),
    Aspect("environment", _environment, _restore_environment),
)
