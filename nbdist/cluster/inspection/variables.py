"""Counts the memory of a worker's own variables, in bounded time; a row for each variable."""

from __future__ import annotations

import collections
from typing import Any

import msgspec

from nbdist.cluster.inspection.census import Census, CensusWalk
from nbdist.cluster.inspection.roots import NamedValue
from nbdist.rpc.references import inert
from nbdist.rpc.references.describing import describe_value
from nbdist.wire.messages import State

MOST_OBJECTS = 200_000
"""The most objects that are visited in all variables together, which takes less than a second."""
_OBJECTS_A_TURN = 5_000
"""Objects that are visited in one variable before the others have their turn, so that a huge one hides no other."""
_MOST_ROWS = 1_000
"""The most rows; the smallest variables share the last one."""


class Variable(msgspec.Struct, frozen=True):
    """A value, with all names by which the user of a worker knows it."""

    names: list[str]
    kind: str
    """The kind of the names, as in `Pin`: ``variable``, ``out`` or ``traceback``."""
    state: State
    """The value's type, shape and size."""
    entries: int | None
    """The number of entries of a built-in container; None for anything else."""
    nbytes: int
    """Bytes in the worker's memory, without those already counted for references, contexts and other variables."""
    gpu: int
    """Bytes on other devices, counted in the same way."""
    is_partial: bool
    """True if the value may hold more than was visited."""


def count(census: Census, named: list[NamedValue]) -> tuple[list[Variable], dict[int, list[NamedValue]]]:
    """Count the memory that these values hold; return a row for each value that holds any, the largest first.

    Visits `_OBJECTS_A_TURN` objects of one value, then of the next, round and round, until all are visited or
    `MOST_OBJECTS` were. The second result has, for each object that `Census.watched` numbers and that was met, the
    values that lead to it, by that number.
    """
    walks = [(each, CensusWalk(census, "variables", each.value)) for each in named]
    left = MOST_OBJECTS
    turn = collections.deque(walk for _, walk in walks)
    while turn and left > 0:
        walk = turn.popleft()
        left -= walk.go(min(_OBJECTS_A_TURN, left))
        if not walk.done:
            turn.append(walk)
    found = [_row(each, walk) for each, walk in walks if walk.nbytes or walk.gpu or not walk.done]
    leading: dict[int, list[NamedValue]] = {}
    for each, walk in walks:
        for number in walk.met:
            leading.setdefault(number, []).append(each)
    found.sort(key=lambda row: -row.nbytes - row.gpu)
    return _at_most(found), leading


def _row(named: NamedValue, walk: CensusWalk) -> Variable:
    state, entries = describe_value(named.value), _number_of_entries(named.value)
    is_partial = walk.is_partial or not walk.done
    return Variable(named.names, named.kind, state, entries, walk.nbytes, walk.gpu, is_partial)


def _at_most(rows: list[Variable]) -> list[Variable]:
    """Return at most `_MOST_ROWS` rows: if there are more, the smallest share the last row."""
    first, rest = rows[: _MOST_ROWS - 1], rows[_MOST_ROWS - 1 :]
    if len(rest) < 2:
        return rows
    nbytes, gpu = sum(row.nbytes for row in rest), sum(row.gpu for row in rest)
    names = [f"{rest[0].names[0]} and {len(rest) - 1} more"]
    return [*first, Variable(names, "variable", State("", "value"), None, nbytes, gpu, any(r.is_partial for r in rest))]


def _number_of_entries(value: Any) -> int | None:
    """Return the number of entries of a built-in container; None for anything else."""
    kinds: tuple[Any, ...] = (list, tuple, dict, set, frozenset, collections.deque)
    return next((int(kind.__len__(value)) for kind in kinds if inert.is_a(value, kind)), None)
