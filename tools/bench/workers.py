"""Runs a function in one or several fresh processes, and brings back what rank 0 returned."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["end_group", "quiet_environment", "run_workers"]

TIMEOUT_S = 300.0
# The folder from which this module is imported under its present name, so that workers find it too.
IMPORT_ROOT = Path(__file__).parents[__spec__.name.count(".")]


def quiet_environment(home: Path, device: str = "cpu") -> dict[str, str]:
    """Return an environment in which children run with one thread, and with no user's config.

    Args:
        home: An empty folder, where the launchers look for their config files.
        device: "cpu" hides other devices.
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        # Bytecode is kept, as it is of every installed package: compiling is no part of an import's cost.
        if not key.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PYTHONDONTWRITEBYTECODE"))
    }
    fixed = {
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(home),
        "PYTHONWARNINGS": "ignore",
    }
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {**kept, **fixed, **hidden}


def run_workers(function: str, size: int, **arguments: Any) -> Any:
    """Call a function in `size` new processes that can form one group.

    Args:
        function: "module:name" of a function of this package, called as name(rank, size, **arguments).
        size: Number of processes.
        arguments: Values that JSON supports; `device="cuda"` lets the processes see CUDA devices.

    Returns:
        What the function returned on rank 0, by way of JSON.

    Raises:
        RuntimeError: If a process fails or does not end in time; the message has its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        port = _free_port()
        command = [sys.executable, "-m", __spec__.name, function, str(result), json.dumps(arguments)]
        with _started(command, size, port, Path(folder), arguments.get("device", "cpu")) as processes:
            _wait(processes, Path(folder), function)
        return json.loads(result.read_text())


def end_group() -> None:
    """Destroy the process group of a worker once gloo has let go of the last tensors.

    Otherwise torch 2.13 aborts or hangs at times; see `accel_state.process.gloo_threads`.
    """
    # Here, as this module is imported by the parent too, which needs no torch.
    import torch.distributed as dist

    from accel_state.process.gloo_threads import wait_for_gloo_threads

    wait_for_gloo_threads()
    dist.destroy_process_group()


@contextmanager
def _started(
    command: list[str], size: int, port: int, folder: Path, device: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            environment = quiet_environment(folder, device)
            if device == "cpu":
                environment["ACCELERATE_USE_CPU"] = "true"
            if size > 1:
                ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
                environment |= {key: str(value) for key, value in ranks.items()}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with (folder / f"rank{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(command, cwd=IMPORT_ROOT, env=environment, stdout=log, stderr=log)
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, function: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while any(process.poll() is None for process in processes):
        late = time.monotonic() > deadline
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        if late or failed:
            break
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    if any(codes) or None in codes:
        logs = "\n".join(path.read_text() for path in sorted(folder.glob("rank*.log")))
        raise RuntimeError(
            f"{function}: exit codes {codes} (None: still running), and the output was:\n{logs}"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(function: str, result: str, arguments: str) -> None:
    module, name = function.split(":")
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    package = __spec__.name.rpartition(".")[0]
    returned = getattr(importlib.import_module(f"{package}.{module}"), name)(
        rank, size, **json.loads(arguments)
    )
    if rank == 0:
        Path(result).write_text(json.dumps(returned))


if __name__ == "__main__":
    _main(*sys.argv[1:])
