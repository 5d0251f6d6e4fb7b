"""The list of members in a store, through which the members of a world find each other.

The list is one value under one key, changed only by compare-and-set, so that all members see the same world. Its
records are signed with the members' secret and decoded as plain data, never unpickled, because anybody may be able to
write to the store. The list may be out of date: a member that died without leaving is still in it. Other members notice
that its process is gone, or that it does not answer the handshake.

The parts of the list (`_Document`), and how a record moves between them::

    fixed world      gathering ── the last member registers ──▶ formed ── leave ──▶ left
    dynamic world    dynamic ──── leave ──▶ (removed)
"""

from __future__ import annotations

import base64
import itertools
import random
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from nbdist.channel.process_watch import is_alive
from nbdist.channel.secret import Secret
from nbdist.errors import NotUnique, RendezvousError, VersionMismatch
from nbdist.wire.messages import VERSION, Record

_KEY = "nbdist/roster"  # of the list, in the store
_POLL = 0.01  # seconds between two reads of the store
# Seconds between two reads for each registered member, if that is more: each read gets the whole list.
_POLL_PER_MEMBER = 0.0005
_LONGEST_PAUSE = 5.0  # seconds before the next attempt to write the list after other members wrote it first
_MISSING_RANKS_SHOWN = 20  # in an error
# Forked workers must not draw the same pauses, and the user's seeds must not be used up.
_random = random.SystemRandom()
_MIXED_WORLDS_TEXT = "RPC group mixes statically and dynamically initialized members which is not supported."


class Store(Protocol):
    """The method of a store that a roster calls. `MeetingFile`, `SharedStore` and torch's stores have it."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set ``key`` to ``desired`` if its value is ``expected``; return the value that the key has then.

        If another process has changed the value meanwhile, nothing is set, and that value is returned.
        """
        ...


class _Document(msgspec.Struct):
    """The list of members in the store: their signed records, in four parts."""

    gathering: list[bytes] = []  # the members of a fixed world that have registered, until all have
    formed: list[bytes] = []  # the members of a complete fixed world that have not left
    left: list[bytes] = []  # the members that have left a fixed world in which others are still present
    dynamic: list[bytes] = []  # the members of a dynamic world


class Roster:
    """The list of members in a store, as one member reads and changes it.

    ``reach()`` opens the store; it is called again if the store's server has gone. ``host`` is this host's identity:
    the roster can check whether a process of this host is alive.
    """

    def __init__(self, reach: Callable[[], Store], secret: Secret, host: str) -> None:
        self._reach = reach
        self._secret = secret
        self._host = host
        self._store = reach()

    # -- joining ------------------------------------------------------------------------------

    def form(self, me: Record, deadline: float) -> list[Record]:
        """Register ``me`` in a fixed world; return the records of all its members, by id, once all have registered.

        The deadline is a time of `time.monotonic`. Raises RendezvousError, NotUnique, SecurityError or VersionMismatch,
        as `nbdist.rpc.init_rpc` does.
        """
        size = me.world_size
        assert size is not None  # a fixed world has a size
        tries = 0
        while True:
            text, document = self._read(deadline)
            formed = self._records(document.formed)
            if any(record.incarnation == me.incarnation for record in formed):
                return self._sorted_and_checked([*formed, *self._records(document.left)])
            if any(self._seems_alive(record) for record in self._records(document.dynamic)):
                raise RendezvousError(_MIXED_WORLDS_TEXT)
            gathering = [record for record in self._records(document.gathering) if self._seems_alive(record)]
            if not any(record.incarnation == me.incarnation for record in gathering):
                gathering = [*self._without_twin(gathering, me), me]
                if len({record.id for record in gathering}) == size:  # all ranks from 0 to size - 1 are there
                    document.formed, gathering = [self._signed(record) for record in gathering], []
                    document.left = []
                document.gathering = [self._signed(record) for record in gathering]
                if not self._write(text, document):
                    tries = self._let_others_write(tries, deadline)
                continue
            if time.monotonic() > deadline:
                self.leave(me)
                came = {record.id: record.name for record in gathering}
                absent_ranks = (rank for rank in range(size) if rank not in came)
                absent = list(itertools.islice(absent_ranks, _MISSING_RANKS_SHOWN))
                more = size - len(came) - len(absent)
                missing = ", ".join(map(str, absent)) + (f" and {more} more" if more else "")
                raise RendezvousError(
                    f"{me.name}: the RPC world of {size} did not form in time, with no sign of rank {missing}; "
                    f"there were {', '.join(f'{name} (rank {rank})' for rank, name in sorted(came.items()))}. "
                    "Start the missing ranks, or check that they meet at the same address"
                )
            time.sleep(max(_POLL, len(gathering) * _POLL_PER_MEMBER))

    def _without_twin(self, gathering: list[Record], me: Record) -> list[Record]:
        """Remove an earlier record of this process from ``gathering``, and return the rest."""
        for record in gathering:
            if record.world_size != me.world_size:
                raise RendezvousError(
                    f"{record.name} expects a world of {record.world_size}, {me.name} one of {me.world_size}: give "
                    "all members the same world_size"
                )
            if record.id == me.id and (record.host, record.pid) != (me.host, me.pid):
                raise NotUnique(
                    f"rank {me.id} is not unique: {record.name!r} has it, and {me.name!r} wants it. Give each process "
                    "its own rank"
                )
        return [record for record in gathering if record.id != me.id]

    @staticmethod
    def _sorted_and_checked(world: list[Record]) -> list[Record]:
        names: dict[str, int] = {}
        for record in world:
            if record.name in names:
                raise NotUnique(
                    f"RPC worker name {record.name!r} is not unique: ranks {names[record.name]} and {record.id} "
                    "have both taken it. Give each rank its own name"
                )
            names[record.name] = record.id
        return sorted(world, key=lambda record: record.id)

    def join(self, me: Record, deadline: float) -> list[Record]:
        """Register ``me`` in a dynamic world; return the members that seem to be alive. Raises as `form` does."""
        tries = 0
        while True:
            text, document = self._read(deadline)
            gathering = self._records(document.gathering)
            # A member of a fixed world that has not left in order counts as present, dead or alive.
            if document.formed or any(self._seems_alive(record) for record in gathering):
                raise RendezvousError(_MIXED_WORLDS_TEXT)
            present = [record for record in self._records(document.dynamic) if self._seems_alive(record)]
            if any(record.incarnation == me.incarnation for record in present):
                return [record for record in present if record.incarnation != me.incarnation]
            for record in present:
                if record.name == me.name or record.id == me.id:
                    raise NotUnique(
                        f"RPC worker name or id is not unique: {record.name!r} (id {record.id}) is in the world, and "
                        f"{me.name!r} (id {me.id}) wants to join it. Choose another name and rank"
                    )
            document.dynamic = [self._signed(record) for record in [*present, me]]
            if self._write(text, document):
                return present
            tries = self._let_others_write(tries, deadline)

    def leave(self, *leaving: Record) -> None:
        """Remove members from the list. Errors are ignored, such as that of a store that cannot be reached."""
        gone = {record.incarnation for record in leaving}
        try:
            while True:
                text, document = self._read(0.0)
                # Members of a fixed world that have not read the complete list yet find the record in `left`.
                departed = [r for r in self._records(document.formed) if r.incarnation in gone]
                for name in ("gathering", "formed", "dynamic"):
                    records = self._records(getattr(document, name))
                    setattr(document, name, [self._signed(r) for r in records if r.incarnation not in gone])
                document.left = [*document.left, *map(self._signed, departed)] if document.formed else []
                if self._write(text, document):
                    return
        except Exception:  # torch's stores raise all kinds of errors when their server has gone
            return

    def close(self) -> None:
        """Close the store; call no other method afterwards."""
        del self._store

    def wait_for_others(self, me: Record, deadline: float) -> None:
        """Wait until all other members of this fixed world have left or died, or until the deadline."""
        while time.monotonic() < deadline:
            try:
                _, document = self._read(0.0)
                formed = self._records(document.formed)
            except Exception:  # as in `leave`
                return
            ours = any(record.incarnation == me.incarnation for record in formed)
            if not ours or not any(r.incarnation != me.incarnation and self._seems_alive(r) for r in formed):
                return
            time.sleep(_POLL)

    # -- the store ----------------------------------------------------------------------------

    def _read(self, deadline: float) -> tuple[str, _Document]:
        """Read the list; return its text, for a later `_write`, and its contents. Retries until the deadline."""
        while True:
            try:
                text = self._store.compare_set(_KEY, "", "").decode(errors="replace")
                break
            except Exception as error:  # torch's stores raise errors of all kinds
                # Rank 0 of an earlier world may be closing its server, and the next world's server is about to start.
                if time.monotonic() > deadline:
                    raise RendezvousError(
                        f"the store cannot be reached: {error}. Check that the process which serves it (mostly rank 0) "
                        "runs, and that all members use the same address"
                    ) from error
                time.sleep(_POLL)
                self._store = self._reach()
        if not text:
            return text, _Document()
        try:
            return text, msgspec.msgpack.decode(base64.b64decode(text), type=_Document)
        except (msgspec.MsgspecError, ValueError) as error:
            raise RendezvousError(
                f"the store's value of {_KEY!r} is not a list of members ({error}): another program uses the same "
                "store, or its file is damaged. Meet at another path or port, or remove the file"
            ) from error

    def _write(self, before: str, document: _Document) -> bool:
        """Write the list if its text is still ``before``; return whether it was written. A full disk raises OSError."""
        text = base64.b64encode(msgspec.msgpack.encode(document)).decode() if document != _Document() else ""
        try:
            return self._store.compare_set(_KEY, before, text).decode() == text
        except Exception as error:  # torch's stores raise errors of all kinds
            if isinstance(error, OSError) and not isinstance(error, ConnectionError):
                raise  # for example, the disk is full: a retry would not help
            return False  # the caller then reads the list, and `_read` retries until the deadline

    @staticmethod
    def _let_others_write(tries: int, deadline: float) -> int:
        """Sleep after another member has written the list first; return ``tries``, the number of attempts, plus one."""
        # If many members join at once, one of them writes, and the others have read in vain: each sleeps for a random
        # time, whose limit doubles with each attempt (test_joins_at_the_same_moment_compete).
        longest = min(_POLL * 2 ** min(tries, 16), _LONGEST_PAUSE, max(_POLL, deadline - time.monotonic()))
        time.sleep(_random.uniform(0.0, longest))
        return tries + 1

    def _signed(self, record: Record) -> bytes:
        # The version stands outside of the record: a record of another version cannot be decoded
        # (test_another_version_is_named_before_anything_else_is_read).
        return self._secret.sign(msgspec.msgpack.encode((record.version, msgspec.msgpack.encode(record))))

    def _records(self, sealed: list[bytes]) -> list[Record]:
        return [self._record_in(data) for data in sealed]

    def _record_in(self, data: bytes) -> Record:
        version, inner = msgspec.msgpack.decode(self._secret.verify(data), type=tuple[int, bytes])
        if version != VERSION:
            raise VersionMismatch(
                f"a member uses version {version} of nbdist's protocol, this one {VERSION}: install the same nbdist "
                "everywhere"
            )
        return msgspec.msgpack.decode(inner, type=Record)

    def _seems_alive(self, record: Record) -> bool:
        return record.host != self._host or is_alive(record.pid, record.started)
