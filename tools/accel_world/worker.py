"""A worker of the persistent world: it runs one function per call, as one rank."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from accel_world import leaks
from accel_world.functions import find_function
from accel_world.groups import num_gloo_threads, release_groups
from accel_world.messages import Call, Reply, Setup
from accel_world.start_method import fork_by_default

__all__ = ["main"]

FATAL_LEAKS = ("threads", "child processes")  # everything else is put back without a word
MOST_GLOO_THREADS = 16  # DeepSpeed keeps the groups that it has made
_unraised: list[str] = []  # exceptions of threads and finalizers during the present call
_frozen_modules = 0  # how many there were when they were last taken out of collections


def main(descriptor: int, setup: Setup) -> None:
    """Serve calls from the test process on this socket until it closes."""
    sys.path[:] = setup.sys_path
    fork_by_default()
    faulthandler.enable()
    stack_file = open(setup.stack_file, "w")  # noqa: SIM115 - open as long as the process lives
    sys.unraisablehook = lambda hook: _note(hook.exc_value, f"ignored in {hook.object!r}")
    threading.excepthook = lambda hook: _note(hook.exc_value, f"in thread {hook.thread}")
    connection = Connection(descriptor)
    while True:
        call = _receive(connection)
        # Again for each call: Python cannot put this back after a run that had its own handler.
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        _serve(connection, call)


def _receive(connection: Connection) -> Any:
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        os._exit(0)  # not sys.exit: gloo's destructors can deadlock at interpreter exit


def _note(error: BaseException | None, where: str) -> None:
    text = "".join(traceback.format_exception(error)) if error else ""
    _unraised.append(f"Exception {where}:\n{text}")


def _serve(connection: Connection, call: Call) -> None:
    """Run one call and leave this process as it was before."""
    before = leaks.capture()
    _unraised.clear()
    with _warnings(call):
        try:
            reply = Reply(result=_run(call))
        except BaseException as error:
            reply = Reply(failure=_describe(error))
        _flush()
        connection.send_bytes(pickle.dumps(reply))
        _receive(connection)
        problems = _leave_world()
    left = leaks.restore(before)
    problems += [f"The function left {name}: {'; '.join(left[name])}" for name in FATAL_LEAKS if name in left]
    problems += _unraised
    worn = num_gloo_threads() > MOST_GLOO_THREADS
    _flush()
    connection.send_bytes(pickle.dumps(Reply(failure="\n".join(problems), left=True, worn=worn)))


def _flush() -> None:
    """Write out what was printed: the output is a file, which is read with each reply."""
    sys.stdout.flush()
    sys.stderr.flush()


def _run(call: Call) -> bytes:
    _set_environment(call.environment)
    function = find_function(call.function)
    args, kwargs = pickle.loads(call.arguments)
    _seed()
    if call.init:
        _join_world(call)
    result = function(*args, **kwargs)
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"{call.function} returned {type(result).__name__}, which cannot be pickled ({error}). Return "
            "plain values or tensors."
        ) from error


def _join_world(call: Call) -> None:
    import torch.distributed as dist

    # Longer than the pytest process waits, so that a stuck collective is reported with every rank's stack.
    timeout = datetime.timedelta(seconds=call.timeout_s + 60)
    store = dist.FileStore(call.store_file, call.size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.size, timeout=timeout)


def _leave_world() -> list[str]:
    import torch.distributed as dist

    from accel_state.process.gloo_threads import wait_for_gloo_threads

    try:
        leaks.reset_singletons()
        if dist.is_initialized():
            wait_for_gloo_threads()
            dist.destroy_process_group()
        # Also if the function has left the group itself. What is in a cycle with a group would be freed by a
        # loader's worker, forked later, and crash it: gloo's threads do not exist there.
        release_groups()
        _freeze_modules()
    except Exception as error:
        return [_describe(error)]
    _reset_libraries()
    return []


def _reset_libraries() -> None:
    """Reset the state that libraries keep per process, on which ranks with other calls would disagree."""
    # Groups are named by it: a rank that is ahead would hang under another name.
    sys.modules["torch.distributed.distributed_c10d"]._world.group_count = 0
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if offload is None:
        return
    # Stage 3 compares numbers of modules and parameters, which continue from model to model.
    offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    partition = sys.modules["deepspeed.runtime.zero.partition_parameters"]
    partition.Init.param_id = 0
    # Stage 3 replaces it for good. Its backward pass finishes weights before biases, and stage 2 adds
    # gradients up in the order in which each rank finishes them.
    linear = getattr(partition.InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if linear is not None:
        vars(sys.modules["torch.nn.functional"])["linear"] = linear


def _freeze_modules() -> None:
    """Exclude modules, which stay alive, from collections: traversing torch's compiler alone takes 0.3 s."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules:
        gc.freeze()
        _frozen_modules = len(sys.modules)


def _seed() -> None:
    import torch

    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _set_environment(variables: dict[str, str | None]) -> None:
    for key, value in variables.items():  # leaks.restore puts back what was there
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


@contextmanager
def _warnings(call: Call) -> Iterator[None]:
    """Install the warning filters of the test, which pytest made from its settings and marks."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in reversed(call.warning_filters):
            warnings.filterwarnings(action, _pattern(message), category, _pattern(module), line)
        yield


def _pattern(expression: Any) -> str:
    return str(getattr(expression, "pattern", expression) or "")


def _describe(error: BaseException) -> str:
    """Format the traceback from the test's function on; the frames of this file say nothing."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
