"""Finds the network interface that has an address, and the address by which this host reaches another one."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from nbdist.errors import UsageError

__all__ = ["interface_of", "own_address_towards"]

_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""


def own_address_towards(host: str, port: int) -> str:
    """Return this host's address on the way to ``host``. Sends nothing.

    Raises UsageError if there is no way there.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"this host cannot reach {host}: {error.strerror}. Name an address of this host that the notebook can "
            "reach, with --host"
        ) from error


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address, such as ``eth0``; None if Linux shows no such interface."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    if wanted.version == 6:
        with contextlib.suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                digits, *_, name = line.split()
                if ipaddress.IPv6Address(int(digits, 16)) == wanted:
                    return name
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                found = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == str(wanted):
                    return name
    return None
