"""Turns what workers say of their memory into rows: pure, numbers in, rows out.

::

    Holdings ── rows_of ──> rows ── compare ──> + growth since the last look ── fold ──> few rows
             └─ split ───> the parts of a worker's memory, which together are all of it
             └─ Look ────> the amounts that the next look is compared with
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nbdist.cluster.holdings import Holding, Holdings, WorkerMemory
from nbdist.cluster.variables import Variable
from nbdist.views import cards
from nbdist.views.amounts import size

__all__ = ["Look", "Row", "Split", "compare", "fold", "rows_of", "split"]

KINDS = {"references": "reference", "contexts": "context", "variables": "variable"}
"""What is counted apart, and what one of it is called."""

_LARGEST = 8
"""Rows of one kind that a worker has before the others are put together."""
_SMALL = 100_000
"""Bytes below which variables are put together in any case."""
_GROUPS = 3
"""Rows, by type, into which the others are put, and one more for all other types."""
_TOLD = 6
"""Names that a row tells of one worker."""
_SHOWN = 80


@dataclass(frozen=True)
class Row:
    """Something that takes memory, or several such things put together."""

    workers: tuple[str, ...]
    kind: str
    """``reference``, ``context`` or ``variable``."""
    what: str
    type: str
    """By which rows are put together."""
    nbytes: int | None
    held: tuple[tuple[str, tuple[str, ...]], ...]
    """Who holds it: names by worker; the worker that has it is ""."""
    gpu: int = 0
    is_partial: bool = False
    """Whether there may be more than was counted."""
    idle: bool = False
    """Whether `%dist_free` would let go of it."""
    key: tuple[object, ...] = ()
    """By which the next look knows it again; it begins with the incarnation of its worker."""
    grown: int = 0
    new: int = 0
    """How many of the things put together the last look did not have."""
    count: int = 1

    @property
    def amount(self) -> int:
        """All its bytes."""
        return (self.nbytes or 0) + self.gpu


def rows_of(found: Holdings, workers: Iterable[str] | None = None) -> list[Row]:
    """Return a row for each thing, by worker and kind, the largest first; of all workers, or of these."""
    rows = []
    for memory in found.workers:
        if workers is None or memory.name in workers:
            items = [item for item in found.items if item.worker == memory.name]
            rows += [_row_of_item(item, memory) for item in items if item.id is not None]
            rows += [_row_of_item(item, memory) for item in items if item.id is None]
            rows += [_row_of_variable(variable, memory) for variable in memory.variables]
    return rows


def _row_of_item(item: Holding, memory: WorkerMemory) -> Row:
    held = tuple((name if name != item.worker else "", _few(list(map(str, pins)))) for name, pins in item.pins)
    told = cards.value(item.state).partition("\n")[0][:_SHOWN] if item.id is not None else "graph and gradients"
    kind, own = ("reference", item.id) if item.id is not None else ("context", item.context)
    qualname = item.state.qualname if item.state is not None else "value"
    key = (memory.incarnation, kind, own)
    return Row((item.worker,), kind, told, qualname, item.nbytes, held, item.gpu, item.is_partial, item.idle, key)


def _row_of_variable(variable: Variable, memory: WorkerMemory) -> Row:
    told = cards.value(variable.state)[:_SHOWN]
    if variable.kind == "traceback":
        told = "values of the frames"
    elif variable.entries is not None:
        told += f" of {variable.entries:,}"
    held = (("", _few(variable.names)),)
    key = (memory.incarnation, "variable", variable.names[0])
    nbytes, gpu = variable.nbytes, variable.gpu
    return Row(
        (memory.name,), "variable", told, variable.state.qualname, nbytes, held, gpu, variable.is_partial, key=key
    )


def _few(names: Sequence[str]) -> tuple[str, ...]:
    return (*names[:_TOLD], "…") if len(names) > _TOLD else tuple(names)


# -- the parts of a worker's memory ---------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """What a worker's memory is used for. `total` is the sum of all parts but `absent`."""

    parts: Mapping[str, int]
    """Bytes by the names of `KINDS`."""
    shared: int | None
    """Of shared memory that is mapped, and in which nothing lies that was counted here: blocks whose values are other
    workers', and blocks that are kept for the next message."""
    rest: int | None
    """The interpreter, torch, what allocators keep, and whatever else was not counted."""
    absent: int
    """Counted, but not in the worker's own memory: never written to, swapped out, or pages of the process that this
    one was forked from."""
    gpu: int

    @property
    def total(self) -> int | None:
        """All that the worker uses; None where the system does not say."""
        if self.shared is None or self.rest is None:
            return None
        return sum(self.parts.values()) + self.shared + self.rest


def split(memory: WorkerMemory) -> Split:
    """Cut a worker's memory into parts. No part is negative, and no byte is in two of them.

    What was counted may be more than the process has: a buffer that lies in pages which another process has too is no
    memory of its own. So each kind gets at most what the kinds before it have left.
    """
    private, shared = (memory.usage.private, memory.usage.shared) if memory.usage is not None else (None, None)
    if shared is not None:  # the system counts what was read here, not what came and was not looked at yet
        shared = max(shared, sum(amount.shared for amount in memory.amounts.values()))
    parts, absent, gpu = {}, 0, 0
    for kind in KINDS:
        amount = memory.amounts.get(kind)
        parts[kind] = 0
        if amount is None:
            continue
        own = amount.private if private is None else min(amount.private, private)
        mapped = amount.shared if shared is None else min(amount.shared, shared)
        private = None if private is None else private - own
        shared = None if shared is None else shared - mapped
        parts[kind] = own + mapped
        absent += amount.absent + amount.private - own + amount.shared - mapped
        gpu += amount.gpu
    return Split(parts, shared, private, absent, gpu)


# -- growth ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """What one look saw: amounts only, nothing that lives."""

    totals: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """The worker's name and its bytes, by incarnation."""
    amounts: Mapping[int, int] = field(default_factory=dict)
    """Bytes of each row, by the hash of its key."""

    @classmethod
    def at(cls, found: Holdings, before: Look | None) -> Look:
        """Remember what was found; of workers that did not answer, what the look before saw."""
        totals = {memory.incarnation: (memory.name, split(memory).total or 0) for memory in found.workers}
        amounts = {hash(row.key): row.amount for row in rows_of(found)}
        if before is not None and found.silent:
            kept = {number: each for number, each in before.totals.items() if each[0] in found.silent}
            totals = {**kept, **totals}
            amounts = {**before.amounts, **amounts}
        return cls(totals, amounts)

    def growth(self, memory: WorkerMemory, total: int | None) -> int | None:
        """Return how many bytes a worker has more than then; None if there is nothing to compare it with."""
        known = self.totals.get(memory.incarnation)
        return total - known[1] if known is not None and total is not None else None

    def is_restarted(self, memory: WorkerMemory) -> bool:
        """Return whether a worker was seen then in an earlier life."""
        return memory.incarnation not in self.totals and memory.name in {name for name, _ in self.totals.values()}


def compare(rows: Sequence[Row], last: Look | None) -> list[Row]:
    """Say of each row by how much it has grown since a look, or that it is new."""
    if last is None:
        return list(rows)
    compared = []
    for row in rows:
        if row.key[0] in last.totals:
            known = last.amounts.get(hash(row.key))
            row = replace(row, grown=row.amount - (known or 0), new=int(known is None))
        compared.append(row)
    return compared


# -- few rows instead of many ---------------------------------------------------------------------


def fold(rows: Sequence[Row]) -> list[Row]:
    """Put small things of one worker together, then equal rows of several workers."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.workers[0], row.kind), []).append(row)
    return fold_workers([row for group in groups.values() for row in _fold_small(group)])


def _fold_small(rows: list[Row]) -> list[Row]:
    """Put together what is equal, and what is small, among the rows of one kind, of one worker."""
    rows = sorted(_fold_equal(rows), key=lambda row: -row.amount)
    large = [row for row in rows if not _is_small(row)]
    small = [row for row in rows if _is_small(row)]
    return [*large[:_LARGEST], *_by_type(large[_LARGEST:], "more"), *_by_type(small, "small")]


def _is_small(row: Row) -> bool:
    return row.kind == "variable" and row.amount < _SMALL and not row.is_partial


def _fold_equal(rows: list[Row]) -> list[Row]:
    """Put rows together that differ by nothing that they say."""
    equal: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        equal.setdefault((row.what, row.nbytes, row.gpu, row.held, row.is_partial, row.idle), []).append(row)
    return [_put_together(same, f"{len(same)} x {same[0].what}") for same in equal.values()]


def _by_type(rows: list[Row], word: str) -> list[Row]:
    """Put rows of one type together, and all that have no other of their type."""
    types: dict[str, list[Row]] = {}
    for row in rows:
        types.setdefault(row.type, []).append(row)
    groups = [(name, group) for name, group in types.items() if len(group) > 1]
    groups.sort(key=lambda group: -sum(row.amount for row in group[1]))
    folded = []
    for name, group in groups[:_GROUPS]:
        folded.append(_put_together(group, f"{_count(group)} {word} {name.rpartition('.')[2]}s"))
        del types[name]
    others = [row for group in types.values() for row in group]
    return folded + ([_put_together(others, f"{_count(others)} other {word} values")] if others else [])


def _count(rows: list[Row]) -> int:
    return sum(row.count for row in rows)


def _put_together(rows: list[Row], what: str) -> Row:
    if len(rows) == 1:
        return rows[0]
    held: dict[str, dict[str, None]] = {}
    for row in rows:
        for worker, names in row.held:
            held.setdefault(worker, {}).update(dict.fromkeys(names))
    return replace(
        rows[0],
        what=what,
        nbytes=sum(row.nbytes or 0 for row in rows),
        gpu=sum(row.gpu for row in rows),
        held=tuple((worker, _few([name for name in names if name != "…"])) for worker, names in held.items()),
        is_partial=any(row.is_partial for row in rows),
        idle=all(row.idle for row in rows),
        grown=sum(row.grown for row in rows),
        new=sum(row.new for row in rows),
        count=_count(rows),
    )


def fold_workers(rows: Sequence[Row]) -> list[Row]:
    """Put rows together that say the same of several workers, in amounts as people read them."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        nbytes = size(row.nbytes) if row.nbytes is not None else None
        grown = size(abs(row.grown)), row.grown < 0
        same = (row.kind, row.what, nbytes, size(row.gpu), row.held, row.is_partial, row.idle, grown, row.new)
        known = found.get(same)
        found[same] = row if known is None else replace(known, workers=(*known.workers, *row.workers))
    return list(found.values())
