"""Computes when the operations of a pipeline's step ran, and when they would have run if sending took no time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from nbdist import registry
from nbdist.amounts import counted, duration
from nbdist.nn.schedules import OpTimes, Table, simulate


class PipelineTimeline:
    """The operations of one step by worker, as `Pipeline.timeline` returns them. A notebook shows it as a picture.

    A *bubble* is time in which a worker ran no operation.

    Attributes:
        workers: the names of the workers, in the order of the rows.
        stages: the number of stages.
        step: the count of the step; the first step is 0.
        rows: for each worker, its operations with their start and end, in seconds from the step's first operation.
        ideal: the rows of an ideal step, in which sending takes no time, and every operation begins as early as it can
            and takes the median time of its stage and direction.
    """

    def __init__(self, workers: Sequence[str], stages: int, rows: Sequence[Sequence[OpTimes]], step: int) -> None:
        """Make the timeline of one step from ``rows``: for each worker, when its operations ran, on one clock."""
        first = min((row[0].start for row in rows if row), default=0.0)
        self.workers = list(workers)
        self.stages = stages
        self.step = step
        self.rows = [[OpTimes(span.op, span.start - first, span.end - first) for span in row] for row in rows]
        seconds: dict[tuple[str, int], list[float]] = {}  # by kind and stage
        for op, start, end in itertools.chain(*self.rows):
            seconds.setdefault(op[:2], []).append(end - start)
        usual = {key: statistics.median(each) for key, each in seconds.items()}
        self.ideal = simulate(self.table, stages, lambda op: usual[op[:2]])

    @property
    def table(self) -> Table:
        """The schedule: for each worker, its operations in order."""
        return [[span.op for span in row] for row in self.rows]

    @property
    def seconds(self) -> float:
        """The length of the step in seconds, from the start of the first operation to the end of the last."""
        return _length(self.rows)

    @property
    def ideal_seconds(self) -> float:
        """The seconds that the step would take if sending took no time and no operation were slower than usual.

        See ``ideal``: each operation takes the median time of its stage and direction.
        """
        return _length(self.ideal)

    @property
    def bubble(self) -> float:
        """The part of the workers' time, from 0 to 1, in which they ran no operation."""
        return _bubble(self.rows)

    @property
    def ideal_bubble(self) -> float:
        """The part of the workers' time, from 0 to 1, in which they would run no operation if sending took no time."""
        return _bubble(self.ideal)

    def __repr__(self) -> str:
        lines = [
            f"step {self.step}: {duration(self.seconds)}, bubbles {self.bubble:.0%}; "
            f"ideal {duration(self.ideal_seconds)}, bubbles {self.ideal_bubble:.0%}"
        ]
        for name, row in zip(self.workers, self.rows, strict=True):
            lines.append(f"{name}: busy {duration(_busy([row]))}, {counted(len(row), 'operation')}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return registry.pictures_of(self)["text/html"]


def _length(rows: Sequence[Sequence[OpTimes]]) -> float:
    """Return when the last operation ends, in seconds from the first one's start; 0 without operations."""
    return max((row[-1].end for row in rows if row), default=0.0)


def _bubble(rows: Sequence[Sequence[OpTimes]]) -> float:
    """Return the part of the workers' time, from 0 to 1, in which no operation runs; 0 without operations."""
    whole = _length(rows) * len(rows)
    return 1 - _busy(rows) / whole if whole else 0.0


def _busy(rows: Sequence[Sequence[OpTimes]]) -> float:
    return sum(span.end - span.start for row in rows for span in row)
