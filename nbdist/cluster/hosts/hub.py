"""The hub: the notebook's side of the workers on other hosts.

A *keeper* is the process on another host that starts the workers there. The hub admits keepers at its entrance (an
address of this host), knows which keepers have room for workers, and passes requests and messages between the notebook
and each keeper. The hub's agent and the keepers are an RPC world of their own. Keepers do not know each other::

    keeper1 ─┐
    keeper2 ─┼─ RPC ── the hub's agent          and beside it, in the same process:
    keeper3 ─┘                                  the notebook's agent, in the world of the workers
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from nbdist.channel.entrance import Entrance
from nbdist.channel.secret import Secret
from nbdist.cluster.hosts import admission
from nbdist.cluster.hosts.invitations import Invitation, Invitations
from nbdist.cluster.jupyter.waiting_output import Parcel
from nbdist.cluster.undoing import undone_by
from nbdist.errors import ProtocolError, SecurityError, VersionMismatch
from nbdist.rpc.agent import Agent
from nbdist.rpc.futures import Future
from nbdist.rpc.options import RpcBackendOptions
from nbdist.rpc.start import start_agent
from nbdist.rpc.world.shared_store import ENTRANCE, STORE, Texts
from nbdist.wire.messages import Record

_ANSWERS_WITHIN = 30.0  # seconds for a keeper's answer, if the call names no other limit
# Seconds from the admission of a keeper to its first call of `arrive`. Then its use of the invitation is given back. A
# keeper imports torch before it asks for admission, so it needs only a few of these seconds.
_ARRIVES_WITHIN = 60.0
_LARGEST_TRIAL = 1 << 23  # the most bytes that one trial (which measures the connection) may have sent back
_CONNECTS_WITHIN = 0.5  # seconds to connect to a trial's port: the entrance answers nobody else meanwhile
_CONNECTING_COUNTS = 1 << 22  # bytes that a connection counts for, so that an invitation allows few of them a minute
_WARNINGS = 10  # the most refused newcomers (keepers that ask for admission) that the log names in a minute
_NAME = "hub"

_log = logging.getLogger("nbdist.cluster")


@dataclass(eq=False)
class KeeperMember:
    """A keeper that has joined: its agent, its host, and its workers."""

    record: Record
    token: str  # of the invitation with which it joined
    room: int  # the number of workers that it may have
    address: str  # of its host
    host: str
    workers: set[str] = field(default_factory=set)  # ended workers included
    prepared: Future[Any] | None = None  # its answer once it has imported the modules to preload
    code: bytes = b""  # the digest of the Python files that it got last
    sending_code: threading.Lock = field(default_factory=threading.Lock)  # held while it gets them


class _Coming(NamedTuple):
    """A keeper that was admitted and has not joined yet."""

    token: str
    workers: int
    until: float  # by `time.monotonic`


class Hub:
    """The hub of one cluster.

    Args:
        host: The address at which other hosts reach this one.
        folder: The run directory.
        ports: The first and the last port that the entrance may use; None for any.
        on_arrival: Called when a keeper has joined.
        on_gone: Called as ``on_gone(member, why)`` when a keeper is lost; ``why`` is a text to follow its name.
        on_end: Called as ``on_end(worker, how, last_words)`` when a worker's process has ended.
        on_parcels: Called as ``on_parcels(worker, batch)`` with messages of a worker's kernel.

    The hub's agent calls all four in its threads. The first two must be quick.
    """

    METHODS = ("arrive", "end", "deliver")  # those that keepers call

    def __init__(
        self,
        host: str,
        folder: Path,
        ports: tuple[int, int] | None,
        *,
        on_arrival: Callable[[], object],
        on_gone: Callable[[KeeperMember, str], object],
        on_end: Callable[[str, int | str, str], object],
        on_parcels: Callable[[str, list[Parcel]], object],
    ) -> None:
        self.host = host
        self.secret = secrets.token_hex(32)  # new for each start of the cluster; all members have it
        self._shared = Secret(self.secret.encode(), shared_off_host=True)
        self.members: list[KeeperMember] = []  # those that are not lost; changed under `lock`
        self.lock = threading.RLock()
        self.came: set[str] = set()  # the tokens with which keepers have joined, lost ones included
        self._on_arrival, self._on_gone, self._on_end, self._on_parcels = on_arrival, on_gone, on_end, on_parcels
        self._texts = Texts(self._shared)
        self.invitations = Invitations()  # guarded by `lock`
        self._ids = itertools.count(1)
        self._warned: deque[float] = deque()  # when the last minute's warnings came, by `time.monotonic`
        # The keepers that were admitted and have not joined yet, by the id that each got. Guarded by `lock`.
        self._coming: dict[int, _Coming] = {}
        options = RpcBackendOptions(
            secret=self.secret, host=host, channel="zeromq", rpc_timeout=_ANSWERS_WITHIN, arena_bytes=0
        )
        self.agent: Agent = start_agent(_NAME, 0, None, options, present=[], directory=folder)
        """The hub's own agent, which keepers reach."""
        self.agent.named.publish("hub", self, *self.METHODS)
        self.agent.on_lost(self._lost)
        with undone_by(self.agent.close, "the entrance could not open"):  # the agent and its threads would stay
            self.entrance = Entrance(host, self._shared.curve(ENTRANCE), self._answer, ports)
        place = self.entrance.address.removeprefix("tcp://")
        self._texts.serve_at(place)
        self.meeting = f"nbdist://{place}/members"
        """The ``init_method`` of the RPC world of the workers."""

    def invite(self, seconds: float, uses: int) -> Invitation:
        """Return a new invitation for ``uses`` workers, valid for ``seconds``; UsageError unless both are positive."""
        with self.lock:
            token = self.invitations.invite(time.time(), seconds, uses)
        until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(time.time() + seconds, 1 << 37)))
        return Invitation(self.entrance.address, self._shared.curve(ENTRANCE).public.decode(), token, uses, until)

    def revoke(self) -> int:
        """Make all invitations invalid; return how many were valid."""
        with self.lock:
            return self.invitations.revoke()

    def call(self, member: KeeperMember, method: str, *arguments: Any, timeout: float = -1.0) -> Future[Any]:
        """Call a method of a keeper; return the future of its result."""
        return self.agent.at(member.record.name, "keeper").call(method, *arguments, timeout=timeout)

    def close(self) -> None:
        """Close the entrance and leave the keepers, which end if they have not yet."""
        with contextlib.ExitStack() as steps:
            steps.callback(self.agent.close, "has ended its cluster")
            self.entrance.close()

    def has_lost(self, member: KeeperMember) -> bool:
        """Return whether a keeper is lost. Returns False as long as the hub's agent has not noticed the loss."""
        return self.agent.member(member.record.incarnation) is None

    # -- the entrance -------------------------------------------------------------------------

    def _answer(self, request: bytes) -> bytes:
        """Answer a request at the entrance, in its thread. Raises an error for bytes that nbdist never sends."""
        # Anybody may send a request, so nothing is unpickled.
        kind, content = request[:1], request[1:]
        if kind == STORE:
            return self._texts.answer(content)
        if kind == admission.TRIAL:
            return self._answer_trial(msgspec.msgpack.decode(content, type=admission.Trial))
        if kind not in (admission.NEWCOMER, admission.QUESTION):
            raise ProtocolError("a request at the entrance is none of nbdist's")
        newcomer = msgspec.msgpack.decode(content, type=admission.Newcomer)
        try:
            with self.lock:
                self._forget_the_late()
                workers = max(1, newcomer.workers)
                # Check the token first, so that a stranger does not learn the versions.
                self.invitations.check(newcomer.token, time.time(), workers)
                if kind == admission.QUESTION:
                    return msgspec.msgpack.encode(admission.describe_the_notebook(newcomer, self.agent.me.addresses))
                admission.check_versions(newcomer)
                self.invitations.use(newcomer.token, time.time(), workers)
                id = next(self._ids)
                self._coming[id] = _Coming(newcomer.token, workers, time.monotonic() + _ARRIVES_WITHIN)
        except (SecurityError, VersionMismatch) as error:
            self._warn_of(newcomer, error)
            return msgspec.msgpack.encode(admission.Denied(str(error), isinstance(error, VersionMismatch)))
        return msgspec.msgpack.encode(admission.Admitted(id, self.secret, self.agent.me))

    def _warn_of(self, newcomer: admission.Newcomer, error: Exception) -> None:
        now = time.monotonic()
        while self._warned and self._warned[0] < now - 60.0:
            # Not every refusal, since anybody may send requests.
            self._warned.popleft()
        if len(self._warned) < _WARNINGS:
            self._warned.append(now)
            _log.warning("a worker of %.80r was refused: %s", newcomer.host, error)

    def _answer_trial(self, trial: admission.Trial) -> bytes:
        """Return the answer to a trial: bytes, and whether a port can be reached. Runs in the entrance's thread."""
        wanted = min(max(0, trial.wanted), _LARGEST_TRIAL)
        nbytes = len(trial.padding) + wanted + (_CONNECTING_COUNTS if trial.port else 0)
        try:
            with self.lock:
                self.invitations.try_out(trial.token, time.time(), nbytes)
        except SecurityError as error:
            return msgspec.msgpack.encode(admission.Denied(str(error), False))
        unreached = ""
        if trial.port:
            try:
                host = str(ipaddress.ip_address(trial.host))  # a name may take long to look up
                socket.create_connection((host, trial.port), _CONNECTS_WITHIN).close()
            except (OSError, OverflowError, ValueError) as error:
                unreached = str(error) or type(error).__name__
        return msgspec.msgpack.encode(admission.TrialAnswer(time.time(), bytes(wanted), unreached))

    def _forget_the_late(self) -> None:
        """Give back the uses of keepers that were admitted and did not join in time. The caller holds the lock."""
        for id in [id for id, coming in self._coming.items() if coming.until < time.monotonic()]:
            coming = self._coming.pop(id)
            self.invitations.give_back(coming.token, coming.workers)

    # -- keepers ------------------------------------------------------------------------------

    def arrive(self, id: int, incarnation: int, address: str, host: str) -> None:
        """Note that a keeper has joined: the one that got ``id`` when it was admitted."""
        record = self.agent.member(incarnation)
        with self.lock:
            self._forget_the_late()
            if (coming := self._coming.pop(id, None)) is None:
                raise SecurityError("this keeper came too late after it had been let in: start it again")
            if record is None:  # the keeper is lost already
                self.invitations.give_back(coming.token, coming.workers)
                return
            self.came.add(coming.token)
            member = KeeperMember(record, coming.token, coming.workers, address, host)
            self.members.append(member)
            lost = self.has_lost(member)  # a moment ago: `_lost` did not find it in `members`
            if lost:
                self.members.remove(member)
        if lost:  # outside of the lock: the launcher takes its own lock before this one
            self._on_gone(member, self.agent.fate(incarnation) or "is gone")
        else:
            self._on_arrival()

    def end(self, worker: str, how: int | str, last_words: str) -> None:
        """Note that a worker's process has ended."""
        self._on_end(worker, how, last_words)

    def deliver(self, worker: str, batch: Sequence[Parcel]) -> None:
        """Pass messages of a worker's kernel on to the notebook."""
        self._on_parcels(worker, list(batch))

    def _lost(self, record: Record, why: str) -> None:
        """Forget a keeper that is lost. The agent calls this, so it must be quick."""
        with self.lock:
            member = next((each for each in self.members if each.record.incarnation == record.incarnation), None)
            if member is None:
                return
            self.members.remove(member)
        self._on_gone(member, why)
