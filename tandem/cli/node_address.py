"""Find this machine's IPv4 address, and test whether a port is free.

This module uses no cluster library.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

from tandem.errors import TandemError

OUTSIDE = "192.0.2.1"  # an address reserved for documentation; only its route is looked up, no packet is sent
SIOCGIFADDR = 0x8915


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of a network interface; None without an address or interface."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def own_address(interface: str | None, towards: str = OUTSIDE) -> str:
    """Return this machine's IPv4 address.

    If an interface is given, the result is its address. Otherwise it is the address with the route to
    `towards`, or else the only address.

    Args:
        interface: a network interface, or None.
        towards: an IPv4 address that this machine must reach.

    Raises:
        TandemError: the interface has no address, or there are several addresses to choose from.
    """
    known = {name: found for _, name in socket.if_nameindex() if (found := address_of(name)) is not None}
    listed = ", ".join(f"{name} ({address})" for name, address in known.items())
    if interface is not None:
        if interface not in known:
            raise TandemError(
                f"no interface {interface!r} has an IPv4 address here; these have one: {listed}"
            )
        return known[interface]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):  # no route leads there
        probe.connect((towards, 9))
        address: str = probe.getsockname()[0]
        return address
    outer = [address for name, address in known.items() if name != "lo"]
    if len(outer) != 1:
        raise TandemError(f"no route leads out of this machine; choose an --interface of {listed}")
    return outer[0]


def is_free(port: int) -> bool:
    """Return whether this machine can listen on the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
