"""This machine's place in the network: its own addresses, and the interface that leads to another machine.

Host names say little about it: many systems look their own name up as 127.0.1.1, and two machines may have
the same name. The kernel's routing table is asked instead; nothing is sent.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct

# Linux's ioctl for the address of an interface; Python has no name for it.
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # a datagram socket that is connected sends nothing


def is_local(host: str) -> bool:
    """Return whether a host name or address is one of this machine's.

    Args:
        host: The name or address.
    """
    for family, address in _addresses(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            # The kernel binds addresses of this machine alone.
            probe.bind((address, 0))
            return True
    return False


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can only be reached on this machine.

    Args:
        host: The name or address.
    """
    return any(ipaddress.ip_address(address).is_loopback for _, address in _addresses(host))


def is_listening(host: str, port: int) -> bool:
    """Return whether a server accepts a connection within a second.

    Args:
        host: Its name or address.
        port: Its port.
    """
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def local_address(host: str) -> str | None:
    """Return the address by which another machine sees this one.

    Args:
        host: The other machine's name or address.

    Returns:
        The address that packets to it leave from; None if there is no way to it.
    """
    for family, address in _addresses(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            # For a datagram socket this chooses a route and with it the address of this side.
            probe.connect((address, _ANY_PORT))
            return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address, such as eth0 (Linux).

    Args:
        address: An IPv4 address of this machine.

    Returns:
        The name; None if no interface has the address as its first, or the system does not say.
    """
    try:
        import fcntl

        wanted = socket.inet_aton(address)
    except (ImportError, OSError):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # struct ifreq: the name in 16 bytes, a sockaddr behind it whose address is at 20 to 24.
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                if fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24] == wanted:
                    return name
    return None


def set_gloo_interface(environ: dict[str, str], address: str | None) -> None:
    """Make gloo use the interface of an address, unless the environment names one.

    Args:
        environ: The environment of workers, which is changed.
        address: An IPv4 address of this machine; nothing happens for None.
    """
    # gloo would take the interface of the host name's address, which may be the loopback one.
    interface = None if address is None else interface_of(address)
    if interface is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return [(family, str(address[0])) for family, _, _, _, address in found]
