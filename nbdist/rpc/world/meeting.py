"""Opens the store at which members meet, by torch's URLs.

==========================  ==================================================================================
URL                         the store
==========================  ==================================================================================
``env://``, ``tcp://``      torch's TCPStore, served by rank 0 or by torchrun
``file://``                 a file of nbdist's own (`nbdist.rpc.world.meeting_file`)
``nbdist://``               the memory of a cluster's notebook (`nbdist.rpc.world.shared_store`)
another scheme              as torch, or a package that registered the scheme, opens it
==========================  ==================================================================================

The TCPStore is opened here, not by ``torch.distributed.rendezvous``, which waits up to 30 minutes for all clients.
"""

from __future__ import annotations

import datetime
import os
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed

from nbdist.channel.secret import Secret
from nbdist.channel.zeromq import in_brackets
from nbdist.errors import SecurityError
from nbdist.rpc.world import tcp_store
from nbdist.rpc.world.meeting_file import MeetingFile
from nbdist.rpc.world.roster import Store
from nbdist.rpc.world.shared_store import SharedStore, is_here

dist: Any = torch.distributed  # typed as Any: torch does not declare what this module exports

_EVERY_INTERFACE = ("0.0.0.0", "::")  # a server at these listens on every interface


class Meeting:
    """The place where members meet, and the rank of this member.

    ``scheme`` is ``"tcp"``, ``"file"``, ``"nbdist"`` or ``"other"``. ``place`` is a host, a path or a whole URL.
    ``name`` is the last part of an ``nbdist://`` URL.
    """

    def __init__(self, scheme: str, place: str, port: int, rank: int, name: str = "") -> None:
        self.scheme = scheme
        self.place = place
        self.port = port
        self.rank = rank
        self.name = name

    @property
    def is_torchruns(self) -> bool:
        """True if torchrun serves the store, so that no member has to serve it."""
        return self.scheme == "tcp" and tcp_store.is_torchruns(self.place, self.port)

    @property
    def serves(self) -> bool:
        """True if this member serves the store: rank 0 does, unless torchrun does."""
        return self.scheme == "tcp" and self.rank == 0 and not self.is_torchruns

    @property
    def keeps_list(self) -> bool:
        """True if the list of members is in the memory of this process. Then this process removes lost members."""
        return self.is_kept and is_here(self._address)

    @property
    def is_kept(self) -> bool:
        """True if a process of a cluster, its notebook, keeps the list of members: no other removes lost members."""
        return self.scheme == "nbdist"

    @property
    def _address(self) -> str:
        return f"{in_brackets(self.place)}:{self.port}"

    def is_off_host(self) -> bool:
        """Return whether the store is on another machine."""
        return self.scheme in ("tcp", "nbdist") and not tcp_store.is_own(self.place)

    def is_open(self) -> bool:
        """Return whether the store still exists. A member that leaves asks this before it writes to the store."""
        return self.scheme != "tcp" or self.serves or tcp_store.is_served(self.place, self.port)

    def open(self, timeout: float, secret: Secret) -> Store:
        """Open the store at which the members meet, each of whose operations takes ``timeout`` seconds at most."""
        if self.scheme != "tcp":
            tcp_store.end_server()  # the server of an earlier world
        if self.scheme == "file":
            return MeetingFile(self.place)
        if self.scheme == "nbdist":
            return SharedStore(self._address, self.name, secret, timeout)
        if self.scheme == "tcp":
            store = tcp_store.open_store(self.place, self.port, timeout, serve=self.serves)
        else:
            store, _, _ = next(dist.rendezvous(self.place, rank=self.rank))
        store.set_timeout(datetime.timedelta(seconds=timeout))
        return prefixed(store)


def prefixed(store: Any) -> Store:
    """Return a store of torch's that puts a prefix before each key, so that nbdist's key differs from other keys."""
    kept_apart: Store = dist.PrefixStore("nbdist", store)
    return kept_apart


def parse(init_method: str, rank: int, world_size: int | None) -> Meeting:
    """Return the meeting that an ``init_method`` describes. Raises ValueError, in torch's words, if a part is missing.

    If ``rank`` is negative, it is read from the URL, or for ``env://`` from the environment. ``world_size`` is not
    used.
    """
    url = urlparse(init_method)
    query = {key: values[0] for key, values in parse_qs(url.query).items()}

    def missing(what: str) -> ValueError:
        return ValueError(f"Error initializing torch.distributed using {url.scheme}:// rendezvous: {what}")

    def environment(name: str) -> str:
        if name not in os.environ:
            raise missing(f"environment variable {name} expected, but not set")
        return os.environ[name]

    if rank < 0 and "rank" in query:
        rank = int(query["rank"])
    if url.scheme == "env":
        if rank < 0:
            rank = int(environment("RANK"))
        host, port = environment("MASTER_ADDR"), int(environment("MASTER_PORT"))
        return Meeting("tcp", host, port, rank)
    if rank < 0:
        raise missing("rank parameter missing")
    if url.scheme in ("tcp", "nbdist"):
        if not url.hostname or not url.port:
            raise missing("port number missing")
        return Meeting(url.scheme, url.hostname, url.port, rank, url.path.strip("/"))
    if url.scheme == "file":
        path = url.netloc + url.path
        if not path:
            raise missing("path missing")
        return Meeting("file", path, 0, rank)
    return Meeting("other", init_method, 0, rank)


def settle(meeting: Meeting, shared: bool, host: str | None) -> None:
    """Check that other machines cannot reach the store without a secret, and choose the address of the store.

    Args:
        meeting: ``meeting.place`` changes in two cases: if it names every interface; or if it is a machine's name that
            means loopback on this machine, as on Debian, while members on other machines reach this one at ``host``.
        shared: whether the user gave the members a secret. Without one they use this user's own secret of this host.
        host: the address at which this member listens for members on other machines, if any.

    Raises SecurityError, whose text names the settings that are missing.
    """
    store_is_off_host = meeting.is_off_host()
    off_host = host is not None and not tcp_store.is_loopback(host)  # members on other hosts may join this one
    if (store_is_off_host or off_host) and not shared:
        raise SecurityError(
            "members on several hosts need a secret that all of them share. Put the same random text (at least 16 "
            "characters) in a file on each host, readable by you alone, and set NBDIST_SECRET_FILE to its path; or "
            "pass RpcBackendOptions(secret=...). And give each host's address with NBDIST_HOST or host=..."
        )
    if store_is_off_host and host is None:
        raise SecurityError(
            f"the members meet at {meeting.place}, which is another machine, but this one listens on loopback only: "
            "set NBDIST_HOST, or pass RpcBackendOptions(host=...), to the address where the others reach it"
        )
    if meeting.scheme != "tcp" or meeting.is_torchruns or store_is_off_host:
        return
    if meeting.place in _EVERY_INTERFACE:
        meeting.place = host if off_host and host is not None else "127.0.0.1"
    elif tcp_store.is_loopback(meeting.place):
        if off_host and host is not None and not tcp_store.says_loopback(meeting.place):
            meeting.place = host
    elif not shared:
        raise SecurityError(
            f"the members meet at {meeting.place}, which other machines reach, and anybody could write to the store "
            "there. On one machine, meet at 127.0.0.1 (MASTER_ADDR). Between machines, give all members a secret "
            "(NBDIST_SECRET_FILE, or RpcBackendOptions(secret=...))"
        )
