"""Counts the memory of a worker's own variables, in bounded time; a row for each variable."""

from __future__ import annotations

import collections

import msgspec

from nbdist.cluster.inspection.census import Census, CensusWalk
from nbdist.cluster.inspection.pins import Pin
from nbdist.cluster.inspection.roots import NamedValue
from nbdist.rpc.references.describing import describe_value
from nbdist.wire.messages import State

MOST_OBJECTS = 200_000
"""The most objects that are visited in all variables together, which takes less than a second."""
_SMALL_BYTES = 100_000
"""Fewer bytes make a value small: the view puts small ones together, if they keep less than `_MANY_NODES`."""
_MANY_NODES = 100
"""Nodes of autograd graphs, whose own bytes nobody counts."""
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
    contents: str
    """The elements of a container by kind, the value of a number, and autograd graphs, in words."""
    main_part: str
    """Where in the value most of its bytes are, in words; "" if they are spread or few."""
    digest: int | None
    """For a small value, a number that differs if the numbers and texts in it do; None for a large one."""
    nbytes: int
    """Bytes in the worker's memory, without those already counted for references, contexts and other variables."""
    gpu: int
    """Bytes on other devices, counted in the same way."""
    is_partial: bool
    """True if the value may hold more than was visited."""


def count(census: Census, named: list[NamedValue]) -> tuple[list[Variable], dict[int, list[Pin]]]:
    """Count the memory that these values hold; return a row for each value that holds any, the largest first.

    The second result has, for each object that `Census.watched` numbers and that was met, the names of the values that
    lead to it, by that number.
    """
    # Without a name, a walk describes no paths: they would begin at a list that this module has made.
    names = ["" if each.kind == "traceback" else each.names[0] for each in named]
    walks = [(each, CensusWalk(census, "variables", each.value, name)) for each, name in zip(named, names, strict=True)]
    left = MOST_OBJECTS
    turn = collections.deque(walk for _, walk in walks)
    while turn and left > 0:
        walk = turn.popleft()
        left -= walk.go(min(_OBJECTS_A_TURN, left))
        if not walk.done:
            turn.append(walk)
    found = [_row(each, walk) for each, walk in walks if walk.nbytes or walk.gpu or not walk.done]
    leading: dict[int, list[Pin]] = {}
    for each, walk in walks:
        for number, path in walk.met.items():
            leading.setdefault(number, []).extend(Pin(each.kind, name, True, path) for name in each.names)
    found.sort(key=lambda row: -row.nbytes - row.gpu)
    return _at_most(found), leading


def _row(named: NamedValue, walk: CensusWalk) -> Variable:
    is_partial = walk.is_partial or not walk.done
    is_small = walk.nbytes + walk.gpu < _SMALL_BYTES and walk.nodes < _MANY_NODES and not is_partial
    told = walk.contents(), walk.main_part() if not is_small else "", walk.digest if is_small else None
    return Variable(named.names, named.kind, describe_value(named.value), *told, walk.nbytes, walk.gpu, is_partial)


def _at_most(rows: list[Variable]) -> list[Variable]:
    """Return at most `_MOST_ROWS` rows: if there are more, the smallest share the last row."""
    first, rest = rows[: _MOST_ROWS - 1], rows[_MOST_ROWS - 1 :]
    if len(rest) < 2:
        return rows
    nbytes, gpu = sum(row.nbytes for row in rest), sum(row.gpu for row in rest)
    names = [f"{rest[0].names[0]} and {len(rest) - 1} more"]
    is_partial = any(row.is_partial for row in rest)
    return [*first, Variable(names, "variable", State("", "value"), "", "", None, nbytes, gpu, is_partial)]
