"""Finds the network interface that has an address, and the address by which this host reaches another one."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from nbdist.errors import UsageError

_SIOCGIFCONF = 0x8912  # Linux's request for all IPv4 addresses, an interface's second and third included
# One address in the answer (``struct ifreq``): its label, such as ``eth0:1``, family, port and address.
_ENTRY = struct.Struct("16sHH4s16x" if struct.calcsize("P") == 8 else "16sHH4s8x")
_LOOPBACK = "lo"  # the interface of all of 127.0.0.1 to 127.255.255.254, of which it lists only the first


def own_address_towards(address: str) -> str:
    """Return this host's address on the way to ``tcp://host:port``. Raises UsageError if there is no way there."""
    name, _, port = address.removeprefix("tcp://").rpartition(":")
    host = name.strip("[]")
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing: it is a datagram socket
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"this host cannot reach {host}: {error.strerror}. Check that address and the network; if they are right, "
            "name this host's own address with --host"
        ) from error


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address, such as ``eth0``; None if Linux shows no such interface."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    with contextlib.suppress(OSError):
        for name, found in _addresses_of_version_4() if wanted.version == 4 else _addresses_of_version_6():
            if found == wanted:
                return name
    return _LOOPBACK if wanted.version == 4 and wanted.is_loopback else None


def _addresses_of_version_6() -> Iterator[tuple[str, ipaddress.IPv6Address]]:
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, *_, name = line.split()
        yield name, ipaddress.IPv6Address(int(digits, 16))


def _addresses_of_version_4() -> Iterator[tuple[str, ipaddress.IPv4Address]]:
    room = 64
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        while True:
            answer = array.array("B", bytes(_ENTRY.size * room))
            request = struct.pack("iP", len(answer), answer.buffer_info()[0])
            (used,) = struct.unpack_from("i", fcntl.ioctl(asking, _SIOCGIFCONF, request))
            if used < len(answer):  # else there may be more
                break
            room *= 2
    for label, _, _, found in _ENTRY.iter_unpack(answer.tobytes()[:used]):
        yield label.split(b"\0")[0].decode().partition(":")[0], ipaddress.IPv4Address(found)
