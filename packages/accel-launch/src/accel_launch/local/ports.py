"""Reserve the port of a run, so that no other process gets it before rank 0 listens on it."""

from __future__ import annotations

import errno
import socket

from accel_launch.errors import LaunchError

DEFAULT_PORT = 29500
"""The default rendezvous port: torch's."""


def reserve_port(port: int | None, source: str = "") -> socket.socket:
    """Bind a port without listening on it.

    While the socket is open the kernel does not assign the port to a process that requests a free one, but a
    server that sets SO_REUSEADDR, as torch's TCPStore does, can bind and listen on it: two sockets with that
    option share a port as long as neither listens.

    Args:
        port: The port; None or 0 for a free one.
        source: What requested the port, for the error.

    Returns:
        The bound socket; `getsockname()[1]` is the port. Keep it open until the run is over.

    Raises:
        LaunchError: If the port is in use or may not be used.
    """
    try:
        return _bind(port or 0)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = "is in use on this machine"
        elif error.errno == errno.EACCES:
            reason = "may not be used: ports below 1024 are for the administrator"
        else:
            reason = f"cannot be used: {error.strerror}"
        where = f" (from {source})" if source else ""
        raise LaunchError(
            f"Port {port}{where} {reason}. Give another --main_process_port, or 0 for a free one."
        ) from None


def _bind(port: int) -> socket.socket:
    try:
        # The wildcard address of both protocols is what torch's TCPStore binds.
        return _bound(socket.AF_INET6, port)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        return _bound(socket.AF_INET, port)


def _bound(family: socket.AddressFamily, port: int) -> socket.socket:
    port_socket = socket.socket(family, socket.SOCK_STREAM)
    try:
        port_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # On by default on some systems, where IPv4 would stay free for others.
            port_socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Not followed by listen(): connections are refused, as if the port were free, until rank 0 listens.
        port_socket.bind(("", port))
    except OSError:
        port_socket.close()
        raise
    return port_socket
