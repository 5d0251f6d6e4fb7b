"""The order in which each worker of a pipeline runs its operations: pure tables, and a simulation of their times.

A table has a row for each worker. A row lists the worker's operations in order: the forward (``F``) or the backward
(``B``) of one micro-batch through one stage. Stage ``s`` is on worker ``s % workers``. A row has no times: an operation
begins when the one before it in the row has ended and its input has arrived. `KINDS` says from which operation.

With two workers, two stages and four micro-batches, one operation a column (`draw` makes these drawings)::

    gpipe       worker0  F0 F1 F2 F3 .  .  B0 B1 B2 B3      all forwards, then all backwards
                worker1  .  F0 F1 F2 F3 B0 B1 B2 B3 .

    1f1b        worker0  F0 F1 .  B0 F2 B1 F3 B2 .  B3      a forward and a backward by turns
                worker1  .  F0 B0 F1 B1 F2 B2 F3 B3 .

In every schedule a stage gets the micro-batches in their order, forward and backward. So the sums of gradients are the
same in all schedules, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from math import inf
from typing import NamedTuple

from nbdist.columns import aligned
from nbdist.errors import UsageError


class OpKind(NamedTuple):
    """The facts about one kind of operations, the forwards or the backwards."""

    name: str  # in timelines, too: `nbdist.views.drawing.gantt.KINDS` has its colour
    output: str  # the values that an operation sends to another stage
    direction: int  # of the stage that takes the output: 1 for the next, -1 for the one before, 0 if none does
    needs: tuple[tuple[str, int], ...]  # the operations that must run before: the kind, and how many stages away


KINDS: Mapping[str, OpKind] = {
    "F": OpKind("forward", "activations", 1, (("F", -1),)),
    "B": OpKind("backward", "gradients", -1, (("B", 1), ("F", 0))),
}


class Op(NamedTuple):
    """The operation of one micro-batch in one stage: its forward or its backward."""

    kind: str  # one of `KINDS`
    stage: int
    micro_batch: int


class OpTimes(NamedTuple):
    """The times, in seconds, at which an operation began and ended."""

    op: Op
    start: float
    end: float


Table = list[list[Op]]  # for each worker, its operations in order


def gpipe(workers: int, stages: int, micro_batches: int) -> Table:
    """Return the table of GPipe: all forwards, then all backwards. A worker keeps the activations of all micro-batches.

    Two workers, four micro-batches; each column is one unit of time::

        worker0  F0 F1 F2 F3 .  .  B0 B1 B2 B3
        worker1  .  F0 F1 F2 F3 B0 B1 B2 B3 .
    """
    return _alternating([stages * micro_batches] * workers, stages, micro_batches)


def one_f_one_b(workers: int, stages: int, micro_batches: int) -> Table:
    """Return the table of 1F1B: some forwards ahead, then one forward and one backward by turns.

    A worker keeps the activations of at most as many micro-batches as there are workers from it to the last: of four
    workers with eight micro-batches, the first keeps four instead of `gpipe`'s eight. It takes the same time as
    `gpipe`. Raises `UsageError` unless each worker has one stage. Three workers, four micro-batches::

        worker0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        worker1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        worker2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    """
    if stages != workers:
        raise UsageError(f'"1f1b" needs one stage on each worker, not {stages} on {workers}: use "interleaved"')
    return _alternating([workers - worker - 1 for worker in range(workers)], stages, micro_batches)


def interleaved(workers: int, stages: int, micro_batches: int) -> Table:
    """Return the table of 1F1B for several stages on each worker.

    The stages are shorter than with one stage on each worker, so the last worker has work sooner. Two workers with two
    stages each, two micro-batches; ``F2.0`` is stage 2, micro-batch 0::

        worker0  F0.0 F0.1 F2.0 F2.1 .    B2.0 .    B2.1 B0.0 B0.1
        worker1  .    F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1 .
    """
    # The micro-batches go through a worker's stages in groups of as many as there are workers. If the last group is
    # smaller, the workers would wait for each other for ever unless each runs some more forwards before its first
    # backward: ``more``. This takes the smallest number with which the table can be run.
    depth = stages // workers
    for more in range(stages * micro_batches + 1):
        ahead = [(workers - worker - 1) * 2 + (depth - 1) * workers + more for worker in range(workers)]
        table = _alternating(ahead, stages, micro_batches)
        with suppress(UsageError):
            simulate(table, stages)
            return table
    raise AssertionError("a table with all forwards first can always be run")


def forward_only(workers: int, stages: int, micro_batches: int) -> Table:
    """Return the table of `Pipeline.forward`: all forwards. A distributed backward pass does the rest, if wanted."""
    return [list(_operations("F", worker, workers, stages, micro_batches)) for worker in range(workers)]


SCHEDULES: Mapping[str, Callable[[int, int, int], Table]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}


def tables_of(schedule: str, workers: int, stages: int) -> Callable[[int], Table]:
    """Return the function that returns a schedule's table for a number of micro-batches."""
    if stages % workers:
        raise UsageError(
            f"{stages} stages do not go evenly onto {workers} workers: the number of stages must be a multiple of the "
            "number of workers"
        )
    if schedule not in SCHEDULES:
        raise UsageError(f"the schedules are {', '.join(SCHEDULES)}; there is no {schedule!r}")
    # A batch with fewer rows than micro-batches, often the last of an epoch, needs another table.
    make = lru_cache(partial(SCHEDULES[schedule], workers, stages))
    make(1)  # raises if the schedule does not fit
    return make


def _operations(kind: str, worker: int, workers: int, stages: int, micro_batches: int) -> Iterator[Op]:
    """Yield a worker's operations of one kind in order: groups of ``workers`` micro-batches."""
    own = range(worker, stages, workers)[:: KINDS[kind].direction]
    for first in range(0, micro_batches, workers):
        # A group goes through one of the worker's stages completely before it goes through the next.
        for stage in own:
            for micro_batch in range(first, min(first + workers, micro_batches)):
                yield Op(kind, stage, micro_batch)


def _alternating(ahead: Sequence[int], stages: int, micro_batches: int) -> Table:
    """Return a table in which worker ``w`` runs ``ahead[w]`` forwards, then a forward and a backward by turns."""
    table: Table = []
    for worker, count in enumerate(ahead):
        forwards, backwards = (list(_operations(kind, worker, len(ahead), stages, micro_batches)) for kind in "FB")
        first, later = forwards[:count], forwards[count:]
        turns = [op for pair in zip(later, backwards, strict=False) for op in pair]
        table.append(first + turns + backwards[len(later) :])
    return table


def what_it_needs(op: Op, stages: int) -> list[Op]:
    """Return the operations of its micro-batch that must run before an operation; none before stage 0's forward."""
    kind, stage, micro_batch = op
    return [Op(needed, stage + away, micro_batch) for needed, away in KINDS[kind].needs if 0 <= stage + away < stages]


def goes_to(op: Op, stages: int) -> Op | None:
    """Return the operation of another stage that takes an operation's output; None if there is no further stage."""
    stage = op.stage + KINDS[op.kind].direction
    return op._replace(stage=stage) if 0 <= stage < stages else None


def simulate(table: Table, stages: int, cost: Callable[[Op], float] = lambda op: 1.0) -> list[list[OpTimes]]:
    """Return when each operation would run, as early as it can, if sending took no time; rows as in the table."""
    rows: list[list[OpTimes]] = [[] for _ in table]
    ended: dict[Op, float] = {}
    going_on = True
    while going_on:  # until a round over all workers brings nothing
        going_on = False
        for done, row in zip(rows, table, strict=True):
            for op in row[len(done) :]:
                ready = done[-1].end if done else 0.0
                start = max([ready, *(ended.get(each, inf) for each in what_it_needs(op, stages))])
                if start == inf:
                    break
                ended[op] = end = start + cost(op)
                done.append(OpTimes(op, start, end))
                going_on = True
    if any(len(done) < len(row) for done, row in zip(rows, table, strict=True)):
        raise UsageError(
            "this schedule cannot be run: its workers would wait for each other for ever. Put each operation after the "
            "one that it needs (what_it_needs)"
        )
    return rows


def draw(table: Table, stages: int) -> str:
    """Return a drawing of a table as text, a line for each worker and a column for each unit of time.

    >>> print(draw(gpipe(2, 2, 2), stages=2))
    worker0  F0 F1 .  .  B0 B1
    worker1  .  F0 F1 B0 B1 .
    """
    rows = simulate(table, stages)
    end = round(max((row[-1].end for row in rows if row), default=0))
    plain = stages == len(table)
    lines: Sequence[list[str]] = [["."] * end for _ in rows]
    for line, row in zip(lines, rows, strict=True):
        for op, start, _ in row:
            line[round(start)] = f"{op.kind}{op.micro_batch}" if plain else f"{op.kind}{op.stage}.{op.micro_batch}"
    width = max((len(cell) for line in lines for cell in line), default=0)
    return "\n".join(
        aligned([(f"worker{n}", " ".join(cell.ljust(width) for cell in line)) for n, line in enumerate(lines)])
    )
