"""The members of a world: their names, ids and incarnations. Pure.

A new worker may take the name of a dead one, so the map from names to incarnations changes over time. The records of
former members are kept by incarnation, so that error messages can still name them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from nbdist.errors import NotUnique, UnknownWorker, UsageError, WorkerLost
from nbdist.wire.messages import Record

_NAME = re.compile(r"[A-Za-z0-9\-_:]*\Z")
_NAME_LENGTH = 128
RESTARTED = "was restarted"
"""The beginning of the ``why`` of a worker that its cluster restarts: another one will come under its name."""


class WorkerInfo:
    """The ``name`` and ``id`` of a worker. torch's programs know the class by this name, too.

    Raises UsageError for a name that is empty, too long, or has other characters than letters, digits, ``-``, ``_`` and
    ``:``; TypeError or ValueError for a name that is no str, or an id that is no number. Whether there is such a worker
    is not checked.

    Example:
        >>> rpc.WorkerInfo("worker1", 1)
        WorkerInfo(id=1, name=worker1)
    """

    __slots__ = ("id", "name")

    def __init__(self, name: str, id: int) -> None:
        if not name:
            raise UsageError("a worker name must be non-empty")
        if len(name) >= _NAME_LENGTH:
            raise UsageError(f"a worker name must be shorter than {_NAME_LENGTH} characters, not {len(name)}")
        if not _NAME.match(name):
            raise UsageError(f"Worker name must match [A-Za-z0-9-_:]*, but {name!r} does not")
        self.name = name
        self.id = int(id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerInfo) and (self.name, self.id) == (other.name, other.id)

    def __hash__(self) -> int:
        return hash((self.name, self.id))

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    def __reduce__(self) -> Any:
        return WorkerInfo, (self.name, self.id)


def lost_error(name: str, why: str) -> WorkerLost:
    """Return the error of a call or message to a lost worker, with what to do. ``why`` completes "worker1 ..."."""
    return WorkerLost(
        f"{name} {why}. Call another worker, or in a cluster start this one again: `%dist_restart {name}`"
    )


class Membership:
    """The living members of a world, and the names and fates of former members.

    A ``why`` completes a text such as "worker1 ...".
    """

    def __init__(self, me: Record) -> None:
        self.me = me
        self._living: dict[int, Record] = {me.incarnation: me}
        self._known: dict[int, Record] = {me.incarnation: me}  # present and former members: errors still name these
        self.names: dict[str, Record] = {me.name: me}
        """The living members by name."""
        self._ids: dict[int, Record] = {me.id: me}
        self._gone: dict[str | int, str] = {}  # a ``why`` for each name and id that no living member has
        self._fates: dict[int, str] = {}  # the same by incarnation, kept for ever
        self.get: Callable[[int], Record | None] = self._living.get
        """Returns the record of the living member with this incarnation; None if there is none."""
        self.ever: Callable[[int], Record | None] = self._known.get
        """Returns the record of a present or former member, by its incarnation; None if it was never a member."""
        self.fate: Callable[[int], str | None] = self._fates.get
        """Returns a ``why`` for a former member, even after a new one has taken its name; None for any other agent."""

    def add(self, record: Record) -> None:
        """Add a member. A second time changes nothing. Raises NotUnique if another living member has its name or id."""
        holder = self.holder(record)
        if holder is not None:
            taken = "name" if holder.name == record.name else "id"
            raise NotUnique(
                f"RPC worker {taken} is not unique: {record.name!r} (id {record.id}) cannot have it, because "
                f"{holder.name!r} (id {holder.id}) does. Choose another {'name' if taken == 'name' else 'rank'}"
            )
        self._living[record.incarnation] = self._known[record.incarnation] = record
        self.names[record.name] = self._ids[record.id] = record
        self._gone.pop(record.name, None)
        self._gone.pop(record.id, None)

    def holder(self, record: Record) -> Record | None:
        """Return another living member that has the name or the id of ``record``; None if there is none."""
        found = self.names.get(record.name) or self._ids.get(record.id)
        return None if found is None or found.incarnation == record.incarnation else found

    def remove(self, incarnation: int, why: str) -> Record | None:
        """Remove a member that is gone; return its record, or None if it is no member (any more)."""
        record = self._living.pop(incarnation, None)
        if record is not None:
            del self.names[record.name], self._ids[record.id]
            self._gone[record.name] = self._gone[record.id] = self._fates[incarnation] = why
        return record

    def find(self, to: str | int | WorkerInfo) -> Record:
        """Return the record of the living member with this name, id or `WorkerInfo`.

        Raises WorkerLost if it is a member no more, UnknownWorker if it never was one.
        """
        if isinstance(to, WorkerInfo):
            to = to.name
        if isinstance(to, str):
            record = self.names.get(to)
        elif isinstance(to, int) and not isinstance(to, bool):
            record = self._ids.get(to)
        else:
            raise UsageError(f"a worker is named by a str, an int or a WorkerInfo, not by {to!r}")
        if record is not None:
            return record
        why = self._gone.get(to)
        if why is None:
            raise UnknownWorker(f"unknown destination worker {to!r}; there are {', '.join(sorted(self.names))}")
        name = to if isinstance(to, str) else [known.name for known in self._known.values() if known.id == to][-1]
        raise lost_error(name, why)

    def why_gone(self, to: str | int | WorkerInfo) -> str | None:
        """Return what happened to a former member, as a ``why``.

        None if the member lives or there never was one, and also once a new member has taken that name or id.
        """
        return self._gone.get(to.name if isinstance(to, WorkerInfo) else to)

    def is_gone(self, incarnation: int) -> bool:
        """Return whether this incarnation is a former member. False for an incarnation that is not known yet."""
        return incarnation in self._known and incarnation not in self._living

    def name_of(self, incarnation: int) -> str:
        """Return the name to show for an incarnation, present or former; for an unknown one, a text that says so."""
        record = self._known.get(incarnation)
        return record.name if record is not None else f"an unknown worker ({incarnation:x})"

    def info_of(self, incarnation: int) -> WorkerInfo:
        """Return the WorkerInfo of an incarnation, present or former. Raises UnknownWorker if it was never a member."""
        record = self._known.get(incarnation)
        if record is None:
            raise UnknownWorker(f"this world has never had an incarnation {incarnation:x}")
        return WorkerInfo(record.name, record.id)

    def members(self) -> list[Record]:
        """Return the records of the living members, sorted by id."""
        return sorted(self._living.values(), key=lambda record: record.id)

    def others(self) -> list[Record]:
        """Return the records of the living members except this one, sorted by id."""
        return [record for record in self.members() if record.incarnation != self.me.incarnation]
