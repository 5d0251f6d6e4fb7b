"""What a worker's own variables hold: a row for each, found within bounded time, whatever they are."""

from __future__ import annotations

import collections
from typing import Any

import msgspec

from nbdist.cluster.census import Census, Walk
from nbdist.cluster.roots import Named
from nbdist.rpc import inert
from nbdist.rpc.describing import describe_value
from nbdist.wire.messages import State

__all__ = ["MOST_OBJECTS", "Variable", "count"]

MOST_OBJECTS = 200_000
"""So many objects a look meets in a worker's variables at most, which takes less than a second."""
_TURN = 5_000
"""Objects that one variable may meet before the others have their turn: one that is huge hides no other."""
_MOST_ROWS = 1_000


class Variable(msgspec.Struct, frozen=True):
    """One value under the names by which the user of a worker knows it."""

    names: list[str]
    kind: str
    """Of a `Pin`: ``variable``, ``out`` or ``traceback``."""
    state: State
    entries: int | None
    """Of a built-in container."""
    nbytes: int
    """In the worker's memory; without what values of references, contexts and earlier variables hold as well."""
    gpu: int
    """On other devices."""
    is_partial: bool
    """Whether it may hold more than was met."""


def count(census: Census, named: list[Named]) -> tuple[list[Variable], dict[int, list[Named]]]:
    """Count what these values hold. Returns a row for each that holds anything, the largest first.

    Returns also, by the numbers of `Census.watched`, which values lead there.
    """
    walks = [(each, Walk(census, "variables", each.value)) for each in named]
    left = MOST_OBJECTS
    turn = collections.deque(walk for _, walk in walks)
    while turn and left > 0:
        walk = turn.popleft()
        left -= walk.go(min(_TURN, left))
        if not walk.done:
            turn.append(walk)
    found = [
        Variable(
            each.names,
            each.kind,
            describe_value(each.value),
            _entries(each.value),
            walk.nbytes,
            walk.gpu,
            walk.is_partial or not walk.done,
        )
        for each, walk in walks
        if walk.nbytes or walk.gpu or not walk.done
    ]
    leading: dict[int, list[Named]] = {}
    for each, walk in walks:
        for number in walk.met:
            leading.setdefault(number, []).append(each)
    found.sort(key=lambda row: -row.nbytes - row.gpu)
    return _at_most(found), leading


def _at_most(rows: list[Variable]) -> list[Variable]:
    """Put the smallest of too many into one row."""
    first, rest = rows[: _MOST_ROWS - 1], rows[_MOST_ROWS - 1 :]
    if len(rest) < 2:
        return rows
    nbytes, gpu = sum(row.nbytes for row in rest), sum(row.gpu for row in rest)
    names = [f"{rest[0].names[0]} and {len(rest) - 1} more"]
    return [*first, Variable(names, "variable", State("", "value"), None, nbytes, gpu, any(r.is_partial for r in rest))]


def _entries(value: Any) -> int | None:
    for kind in (list, tuple, dict, set, frozenset, collections.deque):
        if inert.is_a(value, kind):
            return int(kind.__len__(value))
    return None
