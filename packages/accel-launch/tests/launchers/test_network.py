from __future__ import annotations

import socket

import pytest

from accel_launch.launchers.network import (
    interface_of,
    is_listening,
    is_local,
    is_loopback,
    local_address,
    set_gloo_interface,
)


@pytest.mark.parametrize(
    ("host", "local", "loopback"),
    [
        ("127.0.0.1", True, True),
        ("127.0.1.1", True, True),
        ("localhost", True, True),
        ("192.0.2.1", False, False),  # reserved for documents
        ("no-such-host.invalid", False, False),
    ],
)
def test_whose_an_address_is(host: str, local: bool, loopback: bool) -> None:
    assert (is_local(host), is_loopback(host)) == (local, loopback)


def test_the_way_to_this_machine() -> None:
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert local_address("no-such-host.invalid") is None


def test_interfaces_are_found_by_their_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interface_of("::1") is None


def test_gloo_gets_the_interface_unless_the_user_has_named_one() -> None:
    environ: dict[str, str] = {}
    set_gloo_interface(environ, None)
    set_gloo_interface(environ, "192.0.2.1")
    assert environ == {}

    set_gloo_interface(environ, "127.0.0.1")
    assert environ == {"GLOO_SOCKET_IFNAME": "lo"}

    named = {"GLOO_SOCKET_IFNAME": "mine"}
    set_gloo_interface(named, "127.0.0.1")
    assert named == {"GLOO_SOCKET_IFNAME": "mine"}


def test_servers_are_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert is_listening("127.0.0.1", port)
    assert not is_listening("127.0.0.1", port)
