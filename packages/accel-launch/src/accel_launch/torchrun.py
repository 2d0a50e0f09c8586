"""Start torch.distributed.run: several machines, elastic runs, restarts."""

from __future__ import annotations

import socket
import sys
import time

from accel_launch.errors import LaunchError
from accel_launch.plan import Plan
from accel_launch.ports import reserve_port
from accel_state import env

__all__ = ["reach_machine_0", "torchrun_command", "torchrun_environment", "torchrun_port"]

_DEFAULT_PORT = 29500
_DEFAULT_TIMEOUT_S = 600.0  # torch's own, for the static rendezvous
_NOTE_AFTER_S = 5.0
_RETRY_S = 0.2


def torchrun_port(plan: Plan) -> tuple[int, socket.socket | None]:
    """Return the rendezvous port, and on the machine that will listen on it the socket that reserves it.

    Args:
        plan: What to start.

    Raises:
        LaunchError: If this machine will listen on the port and it is in use.
    """
    port = plan.settings["main_process_port"]
    number = port.value
    if plan.machines != (1, 1):
        number = number or _DEFAULT_PORT
        if not _listens(plan):
            return number, None
    held = reserve_port(number, port.detail if port.given else "")
    return held.getsockname()[1], held


def _listens(plan: Plan) -> bool:
    """Tell whether this machine is known to be the one that the others connect to."""
    return bool(plan.settings.value("rdzv_backend") == "static" and plan.settings.value("machine_rank") == 0)


def reach_machine_0(plan: Plan, port: int) -> None:
    """Wait on another machine of a static rendezvous until machine 0 listens; say what is waited for.

    Args:
        plan: What to start.
        port: The rendezvous port.

    Raises:
        LaunchError: If the name of machine 0 means nothing here, or nobody listens within the rendezvous
            timeout (`--rdzv_conf timeout=SECONDS`, 600 by default).
    """
    if plan.machines == (1, 1):
        return
    address = plan.settings["main_process_ip"]
    try:
        socket.getaddrinfo(address.value, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"main_process_ip={address.value} (from {address.detail}) is not known here: {error.strerror}. "
            "Give the address of machine 0, or a host name that this machine can look up."
        ) from None
    if plan.settings.value("rdzv_backend") == "static" and not _listens(plan):
        _await_server(address.value, port, _rendezvous_timeout(plan))


def _await_server(host: str, port: int, timeout_s: float) -> None:
    began = time.monotonic()
    noted = False
    while True:
        waited = time.monotonic() - began
        try:
            socket.create_connection((host, port), timeout=max(min(5.0, timeout_s - waited), 0.01)).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        waited = time.monotonic() - began
        if waited >= timeout_s:
            raise LaunchError(
                f"Machine 0 could not be reached at {host}:{port} within {timeout_s:g} s ({reason}). Start "
                "the same command there with --machine_rank 0, check the address and the firewall, or wait "
                "longer with --rdzv_conf timeout=SECONDS."
            )
        if waited >= _NOTE_AFTER_S and not noted:
            noted = True
            print(
                f"accel launch: waiting up to {timeout_s:g} s for machine 0 at {host}:{port} ({reason})",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(_RETRY_S)


def _rendezvous_timeout(plan: Plan) -> float:
    settings = dict(part.partition("=")[::2] for part in plan.settings.value("rdzv_conf").split(",") if part)
    text = settings.get("timeout", str(_DEFAULT_TIMEOUT_S))
    try:
        return float(text)
    except ValueError:
        raise LaunchError(f"--rdzv_conf timeout={text} is not allowed; allowed: seconds.") from None


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
