"""Opens the store at which members meet, by torch's URLs.

``env://`` and ``tcp://`` are torch's TCPStore, opened here rather than by ``torch.distributed.rendezvous``, which waits
up to half an hour for all clients. ``file://`` is a file of our own (`nbdist.rpc.meeting_file`). Other schemes, which
others may have registered, go to torch.
"""

from __future__ import annotations

import datetime
import os
import socket
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed

from nbdist.errors import SecurityError
from nbdist.rpc.meeting_file import MeetingFile
from nbdist.rpc.roster import Store

__all__ = ["Meeting", "parse", "prefixed", "require_shared_secret"]

dist: Any = torch.distributed  # which does not declare what it exports


class Meeting:
    """Where, and as which rank, to meet."""

    def __init__(self, scheme: str, place: str, port: int, rank: int) -> None:
        self.scheme = scheme
        self.place = place
        self.port = port
        self.rank = rank

    def is_off_host(self) -> bool:
        """Whether the store is on another machine."""
        return self.scheme == "tcp" and not _is_local(self.place)

    def open(self, timeout: float) -> Store:
        """Open the store at which the members meet; its operations take at most ``timeout`` seconds."""
        if self.scheme == "file":
            return MeetingFile(self.place)
        if self.scheme == "tcp":
            store: Any = dist.TCPStore(
                self.place,
                self.port,
                None,
                self.rank == 0,
                datetime.timedelta(seconds=timeout),
                wait_for_workers=False,
                multi_tenant=True,
            )
        else:
            store, _, _ = next(dist.rendezvous(self.place, rank=self.rank))
        store.set_timeout(datetime.timedelta(seconds=timeout))
        return prefixed(store)


def prefixed(store: Any) -> Store:
    """Keep the roster's key apart from the keys that others have in a store of torch's."""
    kept_apart: Store = dist.PrefixStore("nbdist", store)
    return kept_apart


def parse(init_method: str, rank: int, world_size: int | None) -> Meeting:
    """Read an ``init_method``; what is missing is a ValueError in torch's words."""
    url = urlparse(init_method)
    query = {key: values[0] for key, values in parse_qs(url.query).items()}

    def missing(what: str) -> ValueError:
        return ValueError(f"Error initializing torch.distributed using {url.scheme}:// rendezvous: {what}")

    if rank < 0 and "rank" in query:
        rank = int(query["rank"])
    if url.scheme == "env":
        if rank < 0:
            rank = int(_environment("RANK", missing))
        host, port = _environment("MASTER_ADDR", missing), int(_environment("MASTER_PORT", missing))
        return Meeting("tcp", host, port, rank)
    if rank < 0:
        raise missing("rank parameter missing")
    if url.scheme == "tcp":
        if not url.hostname or not url.port:
            raise missing("port number missing")
        return Meeting("tcp", url.hostname, url.port, rank)
    if url.scheme == "file":
        path = url.netloc + url.path
        if not path:
            raise missing("path missing")
        return Meeting("file", path, 0, rank)
    return Meeting("other", init_method, 0, rank)


def _environment(name: str, missing: Any) -> str:
    value = os.environ.get(name)
    if value is None:
        raise missing(f"environment variable {name} expected, but not set")
    return value


def _is_local(host: str) -> bool:
    """Whether an address is one of this machine's: only such a one can be bound to."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def require_shared_secret(meeting: Meeting, shared: bool, host: str | None) -> None:
    """Off this host, members must share a secret; say how to give them one."""
    off_host = meeting.is_off_host() or (host is not None and not host.startswith(("127.", "::1", "localhost")))
    if off_host and not shared:
        raise SecurityError(
            "members on several hosts need a secret that all of them share. Put the same random text (at least 16 "
            "characters) in a file on each host, readable by you alone, and set NBDIST_SECRET_FILE to its path; or "
            "pass RpcBackendOptions(secret=...). And give each host's address with NBDIST_HOST or host=..."
        )
    if meeting.is_off_host() and host is None:
        raise SecurityError(
            f"the members meet at {meeting.place}, which is another machine, but this one listens on loopback only: "
            "set NBDIST_HOST, or pass RpcBackendOptions(host=...), to the address where the others reach it"
        )
