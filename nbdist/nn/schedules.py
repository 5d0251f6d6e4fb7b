"""In which order each worker of a pipeline does its share of a step: pure tables, and what time they would take.

A table has a row for each worker, and a row is what that worker does, one after the other: the forward (``F``) or the
backward (``B``) of one micro-batch through one stage. Stage ``s`` of ``n`` is on worker ``s % workers``. A row says
nothing of time: an operation begins when the one before it has ended and what it needs has come. Whatever the
schedule, a stage sees the micro-batches in their order, forward and backward; so its sums are the same in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from nbdist.errors import UsageError

__all__ = [
    "SCHEDULES",
    "Op",
    "Span",
    "Table",
    "draw",
    "forward_only",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "simulate",
    "what_it_needs",
]


class Op(NamedTuple):
    """One micro-batch through one stage, forward or backward."""

    kind: str
    stage: int
    micro_batch: int


class Span(NamedTuple):
    """When an operation was done."""

    op: Op
    start: float
    end: float


Table = list[list[Op]]


def gpipe(workers: int, stages: int, micro_batches: int) -> Table:
    """All forward, then all backward: simple, and every worker keeps all activations.

    Two workers, four micro-batches; a column is a time in which a worker does one thing::

        worker0  F0 F1 F2 F3 .  .  B0 B1 B2 B3
        worker1  .  F0 F1 F2 F3 B0 B1 B2 B3 .
    """
    return [
        [*_forwards(worker, workers, stages, micro_batches), *_backwards(worker, workers, stages, micro_batches)]
        for worker in range(workers)
    ]


def one_f_one_b(workers: int, stages: int, micro_batches: int) -> Table:
    """One forward, one backward: no worker keeps more activations than there are workers behind it, and its own.

    Three workers, four micro-batches. It takes as long as `gpipe`, and the first of four workers with eight
    micro-batches keeps four of them instead of eight::

        worker0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        worker1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        worker2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    """
    if stages != workers:
        raise UsageError(f'"1f1b" has one stage on each worker, not {stages} on {workers}: use "interleaved"')
    return _alternating(workers, stages, micro_batches, lambda worker: workers - worker - 1)


def interleaved(workers: int, stages: int, micro_batches: int) -> Table:
    """1F1B with several stages on each worker, which are shorter: so is the time until everybody has work.

    Two workers with two stages each, two micro-batches; ``F2.0`` is stage 2, micro-batch 0::

        worker0  F0.0 F0.1 F2.0 F2.1 .    B2.0 .    B2.1 B0.0 B0.1
        worker1  .    F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1 .

    The micro-batches go in groups of as many as there are workers; where their number is no multiple of that, the last
    group is smaller, and a worker may have to begin with some forwards more than otherwise.
    """
    depth = stages // workers
    for more in range(stages * micro_batches + 1):
        table = _alternating(
            workers,
            stages,
            micro_batches,
            lambda worker, more=more: (workers - worker - 1) * 2 + (depth - 1) * workers + more,  # type: ignore[misc]
        )
        if _can_be_done(table, stages):
            return table
    raise AssertionError("all forwards first can always be done")


def forward_only(workers: int, stages: int, micro_batches: int) -> Table:
    """What `Pipeline.forward` does; the backward pass is whoever's calls it."""
    return [list(_forwards(worker, workers, stages, micro_batches)) for worker in range(workers)]


SCHEDULES: Mapping[str, Callable[[int, int, int], Table]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}


def _forwards(worker: int, workers: int, stages: int, micro_batches: int) -> Iterator[Op]:
    for first in range(0, micro_batches, workers):
        for stage in range(worker, stages, workers):
            for micro_batch in range(first, min(first + workers, micro_batches)):
                yield Op("F", stage, micro_batch)


def _backwards(worker: int, workers: int, stages: int, micro_batches: int) -> Iterator[Op]:
    for first in range(0, micro_batches, workers):
        for stage in reversed(range(worker, stages, workers)):
            for micro_batch in range(first, min(first + workers, micro_batches)):
                yield Op("B", stage, micro_batch)


def _alternating(workers: int, stages: int, micro_batches: int, ahead: Callable[[int], int]) -> Table:
    """On each worker so many forwards ahead, then a forward and a backward by turns, then the backwards left."""
    table: Table = []
    for worker in range(workers):
        forwards = list(_forwards(worker, workers, stages, micro_batches))
        backwards = list(_backwards(worker, workers, stages, micro_batches))
        first = min(len(forwards), ahead(worker))
        row = forwards[:first]
        for forward, backward in zip(forwards[first:], backwards, strict=False):
            row += [forward, backward]
        table.append(row + backwards[len(forwards) - first :])
    return table


def what_it_needs(op: Op, stages: int) -> Op | None:
    """What must have been done before; None where that is what the step is given."""
    if op.kind == "F":
        return op._replace(stage=op.stage - 1) if op.stage else None
    return op._replace(stage=op.stage + 1) if op.stage + 1 < stages else op._replace(kind="F")


def simulate(table: Table, stages: int, cost: Callable[[Op], float] = lambda op: 1.0) -> list[list[Span]]:
    """When everything is done, each operation as early as it can, if sending takes no time."""
    rows: list[list[Span]] = [[] for _ in table]
    ended: dict[Op, float] = {}
    going_on = True
    while going_on:
        going_on = False
        for worker, row in enumerate(table):
            while len(rows[worker]) < len(row):
                op = row[len(rows[worker])]
                needs = what_it_needs(op, stages)
                if needs is not None and needs not in ended:
                    break
                free = rows[worker][-1].end if rows[worker] else 0.0
                start = max(free, ended[needs] if needs is not None else 0.0)
                ended[op] = start + cost(op)
                rows[worker].append(Span(op, start, ended[op]))
                going_on = True
    if any(len(done) < len(row) for done, row in zip(rows, table, strict=True)):
        raise UsageError("these workers would wait for each other for ever")
    return rows


def _can_be_done(table: Table, stages: int) -> bool:
    try:
        simulate(table, stages)
    except UsageError:
        return False
    return True


def draw(table: Table, stages: int) -> str:
    """As text, a column for each unit of time."""
    rows = simulate(table, stages)
    end = round(max((row[-1].end for row in rows if row), default=0))
    plain = stages == len(table)
    lines: Sequence[list[str]] = [["."] * end for _ in rows]
    for line, row in zip(lines, rows, strict=True):
        for op, start, _ in row:
            line[round(start)] = f"{op.kind}{op.micro_batch}" if plain else f"{op.kind}{op.stage}.{op.micro_batch}"
    width = max((len(cell) for line in lines for cell in line), default=0)
    return "\n".join(
        f"worker{worker}  {' '.join(cell.ljust(width) for cell in line)}".rstrip() for worker, line in enumerate(lines)
    )
