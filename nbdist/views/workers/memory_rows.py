"""Turns the memory reports of workers into rows of a table. Pure: numbers in, rows out.

::

    Holdings ── rows_of ──> rows ── compare ──> + growth since the last look ── fold ──> few rows
             └─ split ───> the parts of a worker's memory, which together are all of it
             └─ Look ────> the amounts that the next look is compared with
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nbdist.amounts import size
from nbdist.cluster.inspection.census import Amount
from nbdist.cluster.inspection.holdings import Holding, Holdings, WorkerMemory
from nbdist.cluster.inspection.variables import Variable
from nbdist.cluster.output.arranger import grouped
from nbdist.views import cards

# The kinds of objects that are counted, in the order in which `split` serves them, with the word for one object.
KINDS = {"references": "reference", "contexts": "context", "variables": "variable"}

_ROWS_UNFOLDED = 8  # for the largest objects of one kind on each worker; smaller ones are put together
_TYPES_SHOWN = 3  # types with a row of their own among the rows put together; all other types share one row
_NAMES_SHOWN = 6  # names on one worker that a row shows as holders
_LETTERS_SHOWN = 80  # of a value


@dataclass(frozen=True)
class Row:
    """An object that takes memory, or several objects put together."""

    workers: tuple[str, ...]  # whose memory it takes; several if each has an equal object
    kind: str  # "reference", "context" or "variable"
    what: str
    type: str  # small rows of one type are put together
    nbytes: int | None  # of host memory, of each worker; None if not known
    held: tuple[tuple[str, tuple[str, ...]], ...]
    """The names that hold the object, by worker; "" stands for the row's own worker."""
    gpu: int = 0  # bytes on GPUs
    is_partial: bool = False  # True if the object may take more bytes than were counted
    idle: bool = False  # True if `%dist_free` would drop the object
    key: tuple[object, ...] = ()
    """The object's identity in the next look; it begins with the incarnation of the worker."""
    grown: int = 0  # bytes more than in the last look
    new: int = 0  # objects in this row that the last look did not have
    count: int = 1  # objects put together in this row, on one worker
    main_part: str = ""  # where in the object most of its bytes are, in words
    digest: int | None = None  # for a small variable, a number that differs if the numbers and texts in it do

    @property
    def amount(self) -> int:
        """The bytes of host and GPU memory together."""
        return (self.nbytes or 0) + self.gpu


def rows_of(found: Holdings, workers: Container[str] | None = None) -> list[Row]:
    """Return a row for each object, by worker and kind, the largest first; for the named ``workers``, or all."""
    rows = []
    for memory in found.workers:
        if workers is None or memory.name in workers:
            items = [item for item in found.items if item.worker == memory.name]
            items.sort(key=lambda item: item.id is None)  # values first, then contexts
            rows += [_row_of_item(item, memory) for item in items]
            rows += [_row_of_variable(variable, memory) for variable in memory.variables]
    return rows


def _row_of_item(item: Holding, memory: WorkerMemory) -> Row:
    """Return the row of a value that references hold, or of an autograd context if ``item`` has no id."""
    held = tuple((name if name != item.worker else "", tuple(map(str, pins))) for name, pins in item.pins)
    told = cards.value(item.state).partition("\n")[0][:_LETTERS_SHOWN] if item.id is not None else "graph and gradients"
    told += item.contents
    kind, own = ("reference", item.id) if item.id is not None else ("context", item.context)
    qualname = item.state.qualname if item.state is not None else "value"
    key = (memory.incarnation, kind, own)
    return Row((item.worker,), kind, told, qualname, item.nbytes, held, item.gpu, item.is_partial, item.idle, key)


def _row_of_variable(variable: Variable, memory: WorkerMemory) -> Row:
    told = cards.value(variable.state)[:_LETTERS_SHOWN]
    told = "values of the frames" if variable.kind == "traceback" else told + variable.contents
    held = (("", tuple(variable.names)),)
    key = (memory.incarnation, "variable", variable.names[0])
    fixed = (memory.name,), "variable", told, variable.state.qualname, variable.nbytes, held, variable.gpu
    return Row(*fixed, variable.is_partial, key=key, main_part=variable.main_part, digest=variable.digest)


def first_names(names: Sequence[str]) -> list[str]:
    """Return the first few of many names, and "…" if there are more."""
    return [*names[:_NAMES_SHOWN], *["…"][: len(names) > _NAMES_SHOWN]]


# -- the parts of a worker's memory ---------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """The uses of a worker's memory, in bytes. `total` is the sum of `parts`, `shared` and `rest`."""

    parts: Mapping[str, int]  # by the names of `KINDS`
    shared: int | None
    """Bytes of mapped shared memory that hold no counted object: blocks with values of other workers, and blocks that
    are kept for the next message."""
    rest: int | None
    """Bytes that were not counted: the interpreter, torch, memory that allocators keep, and all else."""
    absent: int
    """Bytes that were counted but are not in the worker's own memory: never written to, swapped out, or in pages that
    belong to the process from which this one was forked."""
    gpu: int  # counted on GPUs, and not in `total`

    @property
    def total(self) -> int | None:
        """All bytes of host memory that the worker uses; None if the system does not say."""
        if self.shared is None or self.rest is None:
            return None
        return sum(self.parts.values()) + self.shared + self.rest


def split(memory: WorkerMemory) -> Split:
    """Return a worker's memory divided into parts. No part is negative, and no byte is in two parts."""
    # The counted bytes may be more than the process has, because a buffer in pages that another process has too is not
    # the worker's own memory. So each kind gets at most the bytes that the kinds before it have left over.
    private, shared = (memory.usage.private, memory.usage.shared) if memory.usage is not None else (None, None)
    if shared is not None:  # the system counts pages only once they were read here; objects are counted at once
        shared = max(shared, sum(amount.shared for amount in memory.amounts.values()))
    parts, absent, gpu = {}, 0, 0
    for kind in KINDS:
        amount = memory.amounts.get(kind, Amount())
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
    """The amounts that one look saw, for a comparison with the next. It keeps no objects alive."""

    totals: Mapping[int, tuple[str, int]] = field(default_factory=dict)  # a worker's name and bytes, by incarnation
    amounts: Mapping[int, int] = field(default_factory=dict)  # bytes of each row, by the hash of its key

    @classmethod
    def at(cls, found: Holdings, before: Look | None) -> Look:
        """Return the amounts of a report; of workers that did not answer, those of ``before``, the last look."""
        totals = {memory.incarnation: (memory.name, split(memory).total or 0) for memory in found.workers}
        amounts = {hash(row.key): row.amount for row in rows_of(found)}
        if before is not None and found.silent:
            kept = {number: each for number, each in before.totals.items() if each[0] in found.silent}
            totals = {**kept, **totals}
            amounts = {**before.amounts, **amounts}
        return cls(totals, amounts)

    def growth(self, memory: WorkerMemory, total: int | None) -> int | None:
        """Return by how many bytes a worker has grown to ``total`` since this look; None if that is not known."""
        known = self.totals.get(memory.incarnation)
        return total - known[1] if known is not None and total is not None else None

    def is_restarted(self, memory: WorkerMemory) -> bool:
        """Return whether a worker was restarted since this look: its name is known, its incarnation is not."""
        return memory.incarnation not in self.totals and memory.name in {name for name, _ in self.totals.values()}


def compare(rows: Sequence[Row], last: Look | None) -> list[Row]:
    """Return the rows with their growth since ``last``, an earlier report; rows that it did not have are new."""
    if last is None:
        return list(rows)
    compared = []
    for row in rows:
        if row.key[0] in last.totals:  # else the worker was not in the report: nothing is known
            known = last.amounts.get(hash(row.key))
            row = replace(row, grown=row.amount - (known or 0), new=int(known is None))
        compared.append(row)
    return compared


# -- few rows instead of many ---------------------------------------------------------------------


def fold(rows: Sequence[Row]) -> list[Row]:
    """Return fewer rows, by worker: equal ones and the smaller ones put together, and small variables at the end."""
    large, small = list[Row](), list[Row]()
    for group in grouped(rows, lambda row: (row.workers[0], row.kind)).values():
        equal = sorted(_fold_equal(group), key=lambda row: -row.amount)
        small += [row for row in equal if row.digest is not None]
        left = [row for row in equal if row.digest is None]
        large += [*left[:_ROWS_UNFOLDED], *_by_type(left[_ROWS_UNFOLDED:], "more")]
    # Those that are equal on several workers share a row, and those that differ share one on each worker.
    shared = grouped(fold_workers(small), lambda row: row.workers).values()
    return [*fold_workers(large), *(row for group in shared for row in _by_type(group, "small"))]


def _fold_equal(rows: list[Row]) -> list[Row]:
    """Return fewer rows: rows of one worker that look the same become one, with the sums of bytes and of growth."""
    equal = grouped(rows, lambda row: (row.what, row.nbytes, row.gpu, _holders(row), row.is_partial, row.idle))
    return [_put_together(same, f"{len(same)} x {same[0].what}") for same in equal.values()]


def _holders(row: Row) -> tuple[object, ...]:
    hides_names = ", made at " in row.what
    return tuple((worker, () if hides_names else tuple(map(_elements, names))) for worker, names in row.held)


def _elements(name: str) -> str:
    """Return a name that holds one element as that which holds several: "elements of list held (3 elements)"."""
    return re.sub(r"^(element|item) .+? of ", r"\1s of ", name)


def _by_type(rows: list[Row], word: str) -> list[Row]:
    """Put rows of one type together, for the `_TYPES_SHOWN` largest types, and all others in one row."""
    types = grouped(rows, lambda row: row.type)
    groups = [(name, group) for name, group in types.items() if len(group) > 1]
    groups.sort(key=lambda group: -sum(row.amount for row in group[1]))
    folded = []
    for name, group in groups[:_TYPES_SHOWN]:
        folded.append(_put_together(group, f"{_count(group)} {word} {name.rpartition('.')[2]}s"))
        del types[name]
    others = [row for group in types.values() for row in group]
    return folded + ([_put_together(others, f"{_count(others)} other {word} values")] if others else [])


def _count(rows: list[Row]) -> int:
    return sum(row.count for row in rows)


def _put_together(rows: list[Row], what: str) -> Row:
    """Return one row with the sums of several, and ``what`` as its description; a single row is returned unchanged."""
    if len(rows) == 1:
        return rows[0]
    held: dict[str, dict[str, None]] = {}
    for row in rows:
        for worker, names in row.held:
            held.setdefault(worker, {}).update(dict.fromkeys(map(_elements, names)))
    return replace(
        rows[0],
        what=what,
        nbytes=sum(row.nbytes or 0 for row in rows),
        gpu=sum(row.gpu for row in rows),
        held=tuple((worker, tuple(names)) for worker, names in held.items()),
        main_part="",
        is_partial=any(row.is_partial for row in rows),
        idle=all(row.idle for row in rows),
        grown=sum(row.grown for row in rows),
        new=sum(row.new for row in rows),
        count=_count(rows),
    )


def fold_workers(rows: Sequence[Row]) -> list[Row]:
    """Return fewer rows: rows that look the same on several workers, with amounts rounded as shown, become one row."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        # In words, as they are shown: amounts that look the same are the same.
        nbytes = size(row.nbytes) if row.nbytes is not None else None
        grown = size(abs(row.grown)), row.grown < 0
        looks = row.kind, row.what, nbytes, size(row.gpu), row.held, row.main_part, row.is_partial, row.idle, grown
        same = (*looks, row.new, row.digest)
        known = found.get(same)
        found[same] = row if known is None else replace(known, workers=(*known.workers, *row.workers))
    return list(found.values())
