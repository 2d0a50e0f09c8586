"""Start workers from a notebook or a test: the function runs in forked processes.

torch is imported when a launch function is called.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_launch.errors import LaunchError
from accel_launch.launchers.elastic import (
    HANDLED,
    elastic_summary,
    log_lines_dropped,
    set_handlers,
    signal_handlers_kept,
)
from accel_launch.local.ports import reserve_port
from accel_launch.local.system import require_posix
from accel_launch.plan.machine import Machine
from accel_state import env
from accel_state.logging.warning import warn
from accel_state.process import hooks


class PrepareForLaunch:
    """Makes a function one worker of a run: sets its rank, then calls it.

    Args:
        launcher: The function.
        distributed_type: The kind of distributed run; anything but NO sets the rank.
        debug: The workers are on the CPU of this machine and connect through a file.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = str(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> Any:
        """Run the function as one worker.

        Args:
            index: The worker's rank on this machine, from 0.
            *args: Arguments for the function.

        Returns:
            What the function returns.
        """
        values: dict[str, str] = {}
        env.put(values, "FORK_LAUNCHED", True)
        if self.debug or self.distributed_type != "NO":
            env.put(values, "RANK", index)
            env.put(values, "LOCAL_RANK", index)
        if self.debug:
            _one_thread()
        with env.patch_environment(**values):
            return self.launcher(*args)


def _one_thread() -> None:
    """OpenMP hangs in a fork whose parent has used its threads, unless the fork uses none."""
    import torch

    torch.set_num_threads(1)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run a function in several processes on the CPU, to try distributed code.

    Args:
        function: The function.
        args: Its arguments.
        num_processes: Number of processes.

    Raises:
        LaunchError: If the number is below 1, or this process has a state or process group already; always on
            Windows.
        torch.multiprocessing.ProcessRaisedException: If a worker raises; it holds the worker's traceback.
        torch.multiprocessing.ProcessExitedException: If a worker ends otherwise.
    """
    if num_processes < 1:
        raise LaunchError(f"num_processes={num_processes}; give at least 1.")
    require_posix("debug_launcher", "Call the function itself for one process.")
    _check_uninitialized(num_processes)
    from torch.multiprocessing.spawn import start_processes

    with tempfile.TemporaryDirectory() as folder, reserve_port(None) as port_socket:
        values = _world(num_processes, port_socket.getsockname()[1])
        env.put(values, "ACCELERATE_USE_CPU", True)
        env.put(values, "ACCELERATE_DEBUG_RDV_FILE", str(Path(folder) / "rendezvous"))
        with env.patch_environment(**values):
            start_processes(  # type: ignore[no-untyped-call]
                PrepareForLaunch(function, debug=True),
                args=tuple(args),
                nprocs=num_processes,
                # Forked: a function that was defined in a notebook has no module
                # that a new process could import.
                start_method="fork",
            )


def _world(size: int, port: int) -> dict[str, str]:
    values: dict[str, str] = {}
    env.put(values, "WORLD_SIZE", size)
    env.put(values, "LOCAL_WORLD_SIZE", size)
    env.put(values, "MASTER_ADDR", "127.0.0.1")
    env.put(values, "MASTER_PORT", port)
    return values


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> Any:
    """Train from a notebook: run a function in several processes, or in this one if one is requested.

    The processes are forked, so that functions defined in the notebook can be used; the accelerator must not
    be initialised before, so make the Accelerator inside the function.

    Args:
        function: The training function.
        args: Its arguments.
        num_processes: Processes on this machine; one per visible GPU, else one, if None.
        mixed_precision: no, fp16, bf16 or fp8.
        use_port: Port of rank 0; "0" for a free one (on one machine).
        master_addr: Address of machine 0.
        node_rank: Rank of this machine.
        num_nodes: Number of machines.
        rdzv_backend: Rendezvous of torch.distributed: static, c10d, etcd.
        rdzv_endpoint: host:port of the rendezvous; master_addr and use_port if empty.
        rdzv_conf: Further rendezvous settings.
        rdzv_id: Name of the run.
        max_restarts: How often failing workers are started again.
        monitor_interval: Seconds between looks at the workers.
        log_line_prefix_template: Shown before each line of a worker, e.g. "[${rank}]: ".

    Returns:
        What the function returned on rank 0; None on other machines, and None with a warning if it cannot be
        pickled.

    Raises:
        LaunchError: If the numbers do not fit, the port is in use, or this process has initialised an
            accelerator, a state or a process group already; for several processes on Windows.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: If a worker fails; its text is the
            summary of `accel launch`: the first failing rank's traceback, and a line for each other rank.
    """
    # Found without torch, which must not touch an accelerator before the fork.
    gpus = len(Machine.detect().visible_gpus(env.raw("CUDA_VISIBLE_DEVICES")))
    size = max(gpus, 1) if num_processes is None else num_processes
    _check_numbers(size, gpus, node_rank, num_nodes)
    values: dict[str, str] = {}
    env.put(values, "ACCELERATE_MIXED_PRECISION", mixed_precision)
    # In this process: variables stay in the notebook, and a debugger works.
    if size == num_nodes == 1:
        with env.patch_environment(**values):
            return function(*args)
    require_posix(
        f"notebook_launcher with num_processes={size}, num_nodes={num_nodes}",
        "With one process it calls the function in this one; for several write a script and use torchrun.",
    )
    _check_uninitialized(size)
    if not gpus:
        env.put(values, "OMP_NUM_THREADS", 1)
    # Documented as text.
    port = int(use_port)
    port_socket = reserve_port(port, "use_port") if num_nodes == 1 else None
    try:
        endpoint = rdzv_endpoint or f"{master_addr}:{port_socket.getsockname()[1] if port_socket else port}"
        options = {
            "min_nodes": num_nodes,
            "max_nodes": num_nodes,
            "nproc_per_node": size,
            "run_id": rdzv_id,
            "rdzv_backend": rdzv_backend,
            "rdzv_endpoint": endpoint,
            # The static rendezvous reads the machine's rank there, as torchrun's --node_rank is put there.
            "rdzv_configs": {"rank": node_rank, **(rdzv_conf or {})},
            "max_restarts": max_restarts,
            "monitor_interval": monitor_interval,
            "log_line_prefix_template": log_line_prefix_template,
            "start_method": "fork",
        }
        # torch sets this one itself and leaves it behind; patching takes it away again.
        with (
            env.patch_environment(**values, TORCHELASTIC_SIGNALS_TO_HANDLE=",".join(HANDLED)),
            signal_handlers_kept() as handlers,
        ):
            return _elastic(options, _forked(function, handlers, one_thread=not gpus), args)
    finally:
        if port_socket is not None:
            port_socket.close()


def _check_numbers(size: int, gpus: int, node_rank: int, num_nodes: int) -> None:
    if size < 1 or num_nodes < 1:
        raise LaunchError(f"num_processes={size}, num_nodes={num_nodes}; give at least 1 of each.")
    if not 0 <= node_rank < num_nodes:
        raise LaunchError(
            f"node_rank={node_rank} with num_nodes={num_nodes}; ranks run from 0 to {num_nodes - 1}."
        )
    if gpus and size > gpus:
        raise LaunchError(f"num_processes={size}, but {gpus} GPUs are visible; give at most {gpus}.")


def _check_uninitialized(size: int) -> None:
    """Check that there is nothing here that cannot be forked or would not participate."""
    fix = (
        f"Restart the kernel, and make the Accelerator inside the function that runs in the {size} processes."
    )
    state = sys.modules.get("accel_state.process.state")
    if state is not None and state.PartialState._shared_state:
        raise LaunchError(f"An Accelerator or PartialState was made in this process already. {fix}")
    torch = sys.modules.get("torch")
    # Not imported: then nothing of it can be initialised.
    if torch is None:
        return
    if torch.cuda.is_initialized():
        raise LaunchError(f"CUDA is initialised in this process already, and does not survive a fork. {fix}")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise LaunchError(f"This process has a process group already. {fix}")


def _forked(
    function: Callable[..., Any], handlers: Mapping[str, Any], *, one_thread: bool
) -> Callable[..., Any]:
    """Return what torch's elastic agent calls in each worker, after it has set the ranks."""

    @functools.wraps(function)
    def worker(*args: Any) -> Any:
        set_handlers(handlers)  # the agent's would make an exception of each signal
        values: dict[str, str] = {}
        env.put(values, "FORK_LAUNCHED", True)
        # What the function starts must not write its own end there; the agent does afterwards.
        values["TORCHELASTIC_ERROR_FILE"] = ""
        if one_thread:
            _one_thread()
        try:
            with env.patch_environment(**values):
                result = function(*args)
        finally:
            hooks.leaves()  # the agent lets no process end before all have returned
        # Only rank 0's result is returned, so that the others need not be pickled.
        return _sendable(result) if env.get("RANK") == 0 else None

    # The agent reads these, and a partial or a callable object has none.
    worker.__name__ = getattr(function, "__name__", "worker")
    worker.__qualname__ = getattr(function, "__qualname__", "worker")
    return worker


@dataclass(frozen=True)
class _Unsendable:
    """Stands for a result that cannot leave its process."""

    reason: str


def _sendable(result: Any) -> Any:
    import pickle

    try:
        pickle.dumps(result)
    except Exception as error:
        return _Unsendable(f"{type(result).__name__}: {error}")
    return result


def _elastic(options: dict[str, Any], worker: Callable[..., Any], args: Sequence[Any]) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory() as folder:  # torch would leave its own one behind
        config = LaunchConfig(**options, logs_specs=DefaultLogsSpecs(log_dir=folder))
        try:
            # Nothing but these lines reports a failure that is followed by a restart.
            with contextlib.nullcontext() if options["max_restarts"] else log_lines_dropped():
                result = elastic_launch(config, worker)(*args).get(0)
        except ChildFailedError as error:
            size = options["nproc_per_node"] * options["max_nodes"]
            error.args = (elastic_summary(error.failures, Path(folder), size),)
            raise error.with_traceback(None) from None
    if isinstance(result, _Unsendable):
        warn(
            f"The function's result cannot be sent back from its process ({result.reason}); "
            "notebook_launcher returns None.",
            UserWarning,
        )
        return None
    return result
