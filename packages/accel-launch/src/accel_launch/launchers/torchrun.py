"""Start torch.distributed.run: several machines, elastic runs, restarts."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping

from accel_launch.errors import LaunchError
from accel_launch.launchers.network import (
    is_listening,
    is_local,
    is_loopback,
    local_address,
    set_gloo_interface,
)
from accel_launch.local.ports import DEFAULT_PORT, reserve_port
from accel_launch.plan.plan import LauncherCommand, LaunchPlan
from accel_state import env

_DEFAULT_TIMEOUT_S = 600.0  # torch's own, for the static rendezvous
_NOTE_AFTER_S = 5.0
_RETRY_S = 0.2


def prepare(plan: LaunchPlan, base: Mapping[str, str]) -> LauncherCommand:
    """Return the torchrun that starts the workers.

    Args:
        plan: What to start.
        base: This process's environment.

    Raises:
        LaunchError: If this machine will listen on the port and it is in use.
    """
    port, port_socket = torchrun_port(plan)
    listens = port_socket is not None
    return LauncherCommand(
        torchrun_command(plan, port, listens),
        torchrun_environment(plan),
        f"torchrun with {plan.processes} processes on this machine",
        port_socket,
        wait=lambda: reach_machine_0(plan, port, listens),
    )


def torchrun_port(plan: LaunchPlan) -> tuple[int, socket.socket | None]:
    """Return the rendezvous port, and on the machine that will listen on it the socket that reserves it.

    Args:
        plan: What to start.

    Raises:
        LaunchError: If this machine will listen on the port and it is in use.
    """
    port = plan.settings["main_process_port"]
    number = port.value
    if plan.machines != (1, 1):
        number = number or DEFAULT_PORT
        if not _listens(plan, number):
            return number, None
    # Inherited by torchrun, whose store shares the port with it (see `reserve_port`).
    port_socket = reserve_port(number, port.detail if port.is_set else "")
    return port_socket.getsockname()[1], port_socket


def _listens(plan: LaunchPlan, port: int) -> bool:
    """Return whether this machine is known to be the one that the others connect to."""
    value = plan.settings.value
    if value("rdzv_backend") == "static":
        return bool(value("machine_rank") == 0)
    address = value("main_process_ip")
    is_c10d = bool(value("rdzv_backend") == "c10d")
    return is_c10d and is_local(address) and not is_listening(address, port)


def reach_machine_0(plan: LaunchPlan, port: int, listens: bool) -> None:
    """Wait on another machine than machine 0 until that one listens; say what is waited for.

    Args:
        plan: What to start.
        port: The rendezvous port.
        listens: Whether this is the machine that the others connect to.

    Raises:
        LaunchError: If the name of machine 0 cannot be resolved, or nothing listens within the rendezvous
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
    if plan.settings.value("rdzv_backend") in ("static", "c10d") and not listens:
        _await_server(address.value, port, rendezvous_timeout(plan))


def _await_server(host: str, port: int, timeout_s: float) -> None:
    began = time.monotonic()
    has_noted = False
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
        if waited >= _NOTE_AFTER_S and not has_noted:
            has_noted = True
            print(
                f"accel launch: waiting up to {timeout_s:g} s for machine 0 at {host}:{port} ({reason})",
                file=sys.stderr,
                flush=True,
            )
        # A refused connection comes back at once; without a pause this would be a busy loop.
        time.sleep(_RETRY_S)


def rendezvous_timeout(plan: LaunchPlan) -> float:
    """Return how long to wait for others, in seconds: `--rdzv_conf timeout=SECONDS`, 600 by default.

    Args:
        plan: What to start.

    Raises:
        LaunchError: If it is not a number.
    """
    settings = dict(pair.partition("=")[::2] for pair in plan.settings.value("rdzv_conf").split(",") if pair)
    text = settings.get("timeout", str(_DEFAULT_TIMEOUT_S))
    try:
        return float(text)
    except ValueError:
        raise LaunchError(f"--rdzv_conf timeout={text} is not allowed; allowed: seconds.") from None


def torchrun_command(plan: LaunchPlan, port: int, listens: bool) -> list[str]:
    """Return the command.

    Args:
        plan: What to start.
        port: The rendezvous port.
        listens: Whether this is the machine that the others connect to.
    """
    value = plan.settings.value
    low, high = plan.machines
    address = value("main_process_ip") if high > 1 else "127.0.0.1"
    options: dict[str, str | None] = {
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
            # Equal on all machines, which know nothing else in common.
            "--rdzv_id": f"accel-{port}",
        }
        if high > 1:
            options |= _place_in_network(plan, listens)
    flags = [f"{name}={text}" for name, text in options.items() if text]
    flags += [f"--{name}" for name in ("module", "no_python") if value(name)]
    return [sys.executable, "-m", "torch.distributed.run", *flags, plan.script, *plan.arguments]


def _place_in_network(plan: LaunchPlan, listens: bool) -> dict[str, str | None]:
    """Return what torchrun would otherwise guess from the machine's host name."""
    address, conf = plan.settings.value("main_process_ip"), plan.settings.value("rdzv_conf")
    # Named, as a host name may lead to 127.0.1.1, where no other machine arrives.
    options = {"--local_addr": address if is_local(address) else local_address(address)}
    # Several agents on one machine agree among themselves which of them is the host.
    if plan.settings.value("rdzv_backend") == "c10d" and "is_host" not in conf and not is_loopback(address):
        is_host = f"is_host={str(listens).lower()}"
        options["--rdzv_conf"] = f"{conf},{is_host}" if conf else is_host
    return options


def torchrun_environment(plan: LaunchPlan) -> dict[str, str]:
    """Return the environment of torchrun and, through it, of the workers.

    Args:
        plan: What to start.
    """
    environ = dict(plan.environ)
    env.put(environ, "ACCELERATE_NUM_PROCESSES", plan.settings.value("num_processes"))
    if plan.machines[1] > 1:
        set_gloo_interface(environ, local_address(plan.settings.value("main_process_ip")))
    if plan.settings.value("max_restarts") or plan.machines[0] != plan.machines[1]:
        # One store for all attempts would give a fast worker the others' addresses of the attempt before.
        environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return environ
