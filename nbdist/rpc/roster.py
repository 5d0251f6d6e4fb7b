"""The list of members that a store keeps while a world forms.

It is one value under one key, changed only by compare-and-set, so that all members see the same world. The
records in it are signed with the cluster's secret and decoded as plain data, never unpickled: a store may
be open to anybody (G6). Nothing in it is trusted to be current: whoever died without leaving stays listed,
and is found out by its process or by the handshake.
"""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from nbdist.channel.liveness import is_alive
from nbdist.channel.security import Secret
from nbdist.errors import NotUnique, RendezvousError, VersionMismatch
from nbdist.wire.messages import VERSION, Record

__all__ = ["Roster", "Store"]

_KEY = "nbdist/roster"
_POLL = 0.01
_MISSING_NAMED = 20
"""How many missing ranks an error names."""
_MIXED = "RPC group mixes statically and dynamically initialized members which is not supported."


class Store(Protocol):
    """What a roster needs of a store: a `MeetingFile`, or one of torch's."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set ``key`` to ``desired`` if it is ``expected``; its value then."""
        ...


class _Document(msgspec.Struct):
    gathering: list[bytes] = []
    formed: list[bytes] = []
    left: list[bytes] = []
    dynamic: list[bytes] = []


class Roster:
    """The members, as far as the store knows."""

    def __init__(self, reach: Callable[[], Store], secret: Secret, host: str) -> None:
        self._reach = reach
        self._secret = secret
        self._host = host
        self._store = reach()

    # -- joining ------------------------------------------------------------------------------

    def form(self, me: Record, deadline: float) -> list[Record]:
        """Wait until a fixed world is complete; its members."""
        size = me.world_size
        assert size is not None  # a fixed world has a size
        while True:
            text, document = self._read(deadline)
            formed = self._records(document.formed)
            if any(record.incarnation == me.incarnation for record in formed):
                return self._checked([*formed, *self._records(document.left)])
            if any(self._seems_alive(record) for record in self._records(document.dynamic)):
                raise RendezvousError(_MIXED)
            gathering = [record for record in self._records(document.gathering) if self._seems_alive(record)]
            if not any(record.incarnation == me.incarnation for record in gathering):
                gathering = [*self._without_twin(gathering, me), me]
                if len({record.id for record in gathering}) == size:  # each is from 0 to size - 1
                    document.formed, gathering = [self._sealed(record) for record in gathering], []
                    document.left = []
                document.gathering = [self._sealed(record) for record in gathering]
                self._write(text, document)
                continue
            if time.monotonic() > deadline:
                self.leave(me)
                came = {record.id: record.name for record in gathering}
                absent = list(itertools.islice((rank for rank in range(size) if rank not in came), _MISSING_NAMED))
                more = size - len(came) - len(absent)
                missing = ", ".join(map(str, absent)) + (f" and {more} more" if more else "")
                raise RendezvousError(
                    f"{me.name}: the RPC world of {size} did not form; no sign of rank {missing}; "
                    f"there were {', '.join(f'{name} (rank {rank})' for rank, name in sorted(came.items()))}"
                )
            time.sleep(_POLL)

    def _without_twin(self, gathering: list[Record], me: Record) -> list[Record]:
        for record in gathering:
            if record.world_size != me.world_size:
                raise RendezvousError(
                    f"{record.name} expects a world of {record.world_size}, {me.name} one of {me.world_size}"
                )
            if record.id == me.id and (record.host, record.pid) != (me.host, me.pid):
                raise NotUnique(f"rank {me.id} is not unique: {record.name!r} has it, and {me.name!r} wants it")
        return [record for record in gathering if record.id != me.id]

    @staticmethod
    def _checked(world: list[Record]) -> list[Record]:
        names: dict[str, int] = {}
        for record in world:
            if record.name in names:
                raise NotUnique(
                    f"RPC worker name {record.name!r} is not unique: ranks {names[record.name]} and {record.id} "
                    "have both taken it"
                )
            names[record.name] = record.id
        return sorted(world, key=lambda record: record.id)

    def join(self, me: Record, deadline: float) -> list[Record]:
        """Enter a dynamic world; those who seem to be there already."""
        while True:
            text, document = self._read(deadline)
            gathering = self._records(document.gathering)
            # Who has formed a fixed world and did not leave in order stands for it, dead or alive.
            if document.formed or any(self._seems_alive(record) for record in gathering):
                raise RendezvousError(_MIXED)
            present = [record for record in self._records(document.dynamic) if self._seems_alive(record)]
            if any(record.incarnation == me.incarnation for record in present):
                return [record for record in present if record.incarnation != me.incarnation]
            for record in present:
                if record.name == me.name or record.id == me.id:
                    raise NotUnique(
                        f"RPC worker name or id is not unique: {record.name!r} (id {record.id}) is there, and "
                        f"{me.name!r} (id {me.id}) wants in"
                    )
            document.dynamic = [self._sealed(record) for record in [*present, me]]
            if self._write(text, document):
                return present

    def leave(self, *leaving: Record) -> None:
        """Strike members off; the store may be gone already, and then there is nothing to do."""
        gone = {record.incarnation for record in leaving}
        try:
            while True:
                text, document = self._read(0.0)
                # Who leaves a fixed world stays known to those of it who have not read yet who was in it.
                departed = [r for r in self._records(document.formed) if r.incarnation in gone]
                for name in ("gathering", "formed", "dynamic"):
                    records = self._records(getattr(document, name))
                    setattr(document, name, [self._sealed(r) for r in records if r.incarnation not in gone])
                document.left = [*document.left, *map(self._sealed, departed)] if document.formed else []
                if self._write(text, document):
                    return
        except Exception:  # torch's stores raise what they like when their server has gone
            return

    def close(self) -> None:
        """Release the store; call no other method afterwards."""
        del self._store

    def wait_for_others(self, me: Record, deadline: float) -> None:
        """Wait until the other members of this fixed world have left, or died; at most until the deadline."""
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
        while True:
            try:
                text = self._store.compare_set(_KEY, "", "").decode(errors="replace")
                break
            except Exception as error:
                # Its server may be going, with the rank 0 of a world that ends; the next one's is about to come.
                if time.monotonic() > deadline:
                    raise RendezvousError(f"the store cannot be reached: {error}") from error
                time.sleep(_POLL)
                self._store = self._reach()
        if not text:
            return text, _Document()
        try:
            return text, msgspec.msgpack.decode(base64.b64decode(text), type=_Document)
        except (msgspec.MsgspecError, ValueError) as error:
            raise RendezvousError(
                f"what the store has under {_KEY!r} is not a list of members ({error}): another program uses the same "
                "store, or its file is damaged. Meet at another path or port, or remove the file"
            ) from error

    def _write(self, before: str, document: _Document) -> bool:
        text = base64.b64encode(msgspec.msgpack.encode(document)).decode() if document != _Document() else ""
        try:
            return self._store.compare_set(_KEY, before, text).decode() == text
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, ConnectionError):
                raise  # of a file, on a full disk say: to ask again does not help
            return False  # as in `_read`, which comes next and knows how long to be patient

    def _sealed(self, record: Record) -> bytes:
        return self._secret.sign(msgspec.msgpack.encode((record.version, msgspec.msgpack.encode(record))))

    def _records(self, sealed: list[bytes]) -> list[Record]:
        return [self._opened(data) for data in sealed]

    def _opened(self, data: bytes) -> Record:
        version, inner = msgspec.msgpack.decode(self._secret.verify(data), type=tuple[int, bytes])
        if version != VERSION:
            raise VersionMismatch(f"a member speaks version {version} of nbdist's protocol, this one {VERSION}")
        return msgspec.msgpack.decode(inner, type=Record)

    def _seems_alive(self, record: Record) -> bool:
        return record.host != self._host or is_alive(record.pid, record.started)
