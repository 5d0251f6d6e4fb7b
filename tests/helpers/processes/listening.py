"""Find where processes listen, by the inodes of their own sockets: needs no tool and no guess by name."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

import psutil

_LISTENS = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""The state, in /proc/net, of a TCP socket that listens, and of a UDP socket that anybody may send to."""

_ACCEPTS = 0x10000
"""A flag, in /proc/net/unix, of a socket that listens."""


def family(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    root = psutil.Process(pid)
    return [root.pid, *(child.pid for child in root.children(recursive=True))]


def free_port() -> int:
    """Return a port on which nothing listens now, for a program that cannot choose one itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(pids: Iterable[int]) -> set[str]:
    """Return where processes listen.

    A port reads ``127.0.0.1:80`` or ``[::]:80``, a unix socket ``/path``, an abstract unix socket ``@name``.
    """
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    found = set()
    for name, state in _LISTENS.items():
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and fields[9] in inodes:
                found.add(_address(fields[1]))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if fields[6] in inodes and int(fields[3], 16) & _ACCEPTS:
            found.add(fields[7] if len(fields) > 7 else "unix socket without a name")
    return found


def reachable(addresses: Iterable[str]) -> set[str]:
    """Return the addresses that other machines reach, and the unix sockets that other users of this machine reach.

    A unix socket is safe if its path is gone, or has a folder that is closed to others. An abstract one has no folder,
    so it is not safe.
    """
    return {address for address in addresses if not _is_closed(address)}


def ports(addresses: Iterable[str]) -> list[int]:
    """Return the TCP and UDP ports among addresses."""
    return sorted(int(address.rpartition(":")[2]) for address in addresses if address[0] not in "/@u")


def _is_closed(address: str) -> bool:
    if address.startswith("/"):
        return not os.path.exists(address) or any(
            os.stat(folder).st_mode & 0o077 == 0 for folder in Path(address).parents
        )
    if address[0] in "@u":
        return False
    return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback


def _sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets; none if the process has gone."""
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the file that lists the folder is in the list, too
                kind, _, inode = os.readlink(file).partition(":[")
                if kind == "socket":
                    found.add(inode.rstrip("]"))
    return found


def _address(text: str) -> str:
    """Translate ``0100007F:0050`` of /proc/net, which writes 32-bit words in the machine's order."""
    address, port = text.split(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(words) == 1:
        return f"{socket.inet_ntop(socket.AF_INET, packed)}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, packed)}]:{int(port, 16)}"
