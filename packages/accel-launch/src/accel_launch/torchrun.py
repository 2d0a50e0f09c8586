"""Start torch.distributed.run: several machines, elastic runs, restarts."""

from __future__ import annotations

import socket
import sys

from accel_launch.plan import Plan
from accel_launch.ports import reserve_port
from accel_state import env

__all__ = ["torchrun_command", "torchrun_environment", "torchrun_port"]

_DEFAULT_PORT = 29500


def torchrun_port(plan: Plan) -> tuple[int, socket.socket | None]:
    """Return the rendezvous port, and on one machine the socket that reserves it.

    Args:
        plan: What to start.

    Raises:
        LaunchError: If the port is in use on this machine and the run is on this machine alone.
    """
    port = plan.settings["main_process_port"]
    if plan.machines != (1, 1):
        return port.value or _DEFAULT_PORT, None
    held = reserve_port(port.value, port.detail if port.given else "")
    return held.getsockname()[1], held


def torchrun_command(plan: Plan, port: int) -> list[str]:
    """Return the command.

    Args:
        plan: What to start.
        port: The rendezvous port.
    """
    value = plan.settings.value
    low, high = plan.machines
    address = value("main_process_ip") if high > 1 else "127.0.0.1"
    options = {
        "--nnodes": str(high) if low == high else f"{low}:{high}",
        "--nproc_per_node": str(plan.processes),
        "--max_restarts": str(value("max_restarts")),
        "--monitor_interval": str(value("monitor_interval")),
        "--role": value("role"),
        # torchrun writes log files only for streams that it tees or hides.
        "--tee": "3" if value("log_dir") is not None and value("tee") == "0" else value("tee"),
        "--log_dir": value("log_dir"),
        "--rdzv_conf": value("rdzv_conf"),
    }
    if value("rdzv_backend") == "static":
        options |= {
            "--node_rank": str(value("machine_rank")),
            "--master_addr": address,
            "--master_port": str(port),
        }
    else:
        options |= {
            "--rdzv_backend": value("rdzv_backend"),
            "--rdzv_endpoint": f"{address}:{port}",
            "--rdzv_id": f"accel-{port}",
        }
    flags = [f"{name}={text}" for name, text in options.items() if text not in (None, "")]
    flags += [f"--{name}" for name in ("module", "no_python") if value(name)]
    return [sys.executable, "-m", "torch.distributed.run", *flags, plan.script, *plan.arguments]


def torchrun_environment(plan: Plan) -> dict[str, str]:
    """Return the environment of torchrun and, through it, of the workers.

    Args:
        plan: What to start.
    """
    environ = dict(plan.environ)
    env.put(environ, "ACCELERATE_NUM_PROCESSES", plan.settings.value("num_processes"))
    if plan.machines[0] != plan.machines[1]:
        # With the shared store, a run that loses the machine that hosts it cannot go on with fewer.
        environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return environ
