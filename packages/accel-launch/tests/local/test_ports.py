from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from accel_launch.errors import LaunchError
from accel_launch.local.ports import reserve_port


def port_of(port_socket: socket.socket) -> int:
    port: int = port_socket.getsockname()[1]
    return port


def listen(port: int) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen()
    return server


def test_a_reserved_port_can_be_listened_on() -> None:
    with reserve_port(None) as port_socket, listen(port_of(port_socket)) as server:
        client = socket.create_connection(("127.0.0.1", port_of(port_socket)), timeout=5)
        server.accept()[0].close()
        client.close()


def test_nobody_else_is_given_a_reserved_port() -> None:
    with reserve_port(None) as port_socket, ExitStack() as others:
        taken = []
        for _ in range(2000):
            other = others.enter_context(socket.socket())
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
            taken.append(port_of(other))

        assert port_of(port_socket) not in taken


def test_many_reservations_differ() -> None:
    with ExitStack() as stack:
        ports = [port_of(stack.enter_context(reserve_port(None))) for _ in range(200)]

    assert len(set(ports)) == 200


def test_a_port_of_choice() -> None:
    with reserve_port(None) as free:
        port = port_of(free)
    with reserve_port(port) as port_socket:
        assert port_of(port_socket) == port


def test_a_port_in_use_is_rejected_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = port_of(server)
        with pytest.raises(LaunchError, match=rf"Port {port} \(from --main_process_port\) is in use.*or 0"):
            reserve_port(port, "--main_process_port")
