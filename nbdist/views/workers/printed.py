"""Shows the result of `%dist_log`: lines that workers have printed, even lines that a cell's output left out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

from nbdist.amounts import counted, plural
from nbdist.cluster.output.arranger import grouped, label_of
from nbdist.cluster.output.output_cutter import LINES_KEPT
from nbdist.cluster.output.print_log import Printed

_LINES_SHOWN = 2 * LINES_KEPT  # of all workers together, as many as a cell shows of one worker


LineRange = tuple[int | None, int | None]
"""The first and the last line to show, counted from 1; ``(None, n)`` for the last n lines, ``(n, None)`` from n on."""


class _Shown(NamedTuple):
    """The part of a worker's lines that is shown. If several workers' parts are equal, they are shown once."""

    lines: tuple[tuple[int, str], ...]  # each with the number of its cell
    first: int  # the number of the first of them
    total: int  # all lines that the worker has printed
    dropped: int  # the oldest lines, which are not kept any more
    broken: str  # the reason why later lines could not be kept; empty if they were


def say(printed: Sequence[Printed], span: LineRange | None) -> str:
    """Return the lines that workers have printed as text; a line before them says if they are not all."""
    # Without ``span``, all lines. If there are too many of one cell, those that the cell's output left out, from the
    # first of them on; if there are too many of all cells, the last ones.
    most = max(1, _LINES_SHOWN // max(1, len(printed)))
    said: list[str] = []
    for shown, group in grouped(printed, lambda each: _choose_lines(each, span, most)).items():
        workers = tuple(each.worker for each in group)
        label = f"{label_of(workers)} " if len(printed) > 1 else ""
        said += [f"{label}{line}" for line in _lines_to_show(shown, group[0].cell)]
    return "\n".join(said)


def _choose_lines(printed: Printed, span: LineRange | None, most: int) -> _Shown:
    """Choose the lines of one worker to show, ``most`` at most; without ``span``, the last ones."""
    total = printed.dropped + sum(1 for _ in printed.lines())
    oldest = printed.dropped + 1
    first, last = span if span is not None else (None, None)
    if first is None and (span is not None or printed.cell is None or total - printed.dropped <= most):
        first, last = total + 1 - min(last or most, most), total
    elif first is None:
        first = LINES_KEPT + 1  # too many lines of one cell: the notebook has shown the first ones
    first = max(first, oldest)
    last = min(total, first + most - 1, last if last is not None else total)
    lines = islice(printed.lines(), first - oldest, max(first - oldest, last - oldest + 1))
    return _Shown(tuple(lines), first, total, printed.dropped, printed.broken)


def _lines_to_show(shown: _Shown, cell: int | None) -> list[str]:
    """Return the lines to show of ``cell``, or of all cells, by cell; above them, which lines are missing."""
    where = "" if cell is None else f" in cell {cell}"
    said = []
    if not shown.total:
        said.append(f"nothing printed{where}")
    elif not shown.lines and shown.dropped < shown.total:
        said.append(f"there {plural(shown.total, 'is', 'are')} {counted(shown.total, 'line')}{where}")
    elif 0 < len(shown.lines) < shown.total:
        last = shown.first + len(shown.lines) - 1
        said.append(f"lines {shown.first:,} to {last:,} of {shown.total:,}{where}; `--lines FIRST:LAST` shows others")
    if shown.dropped:
        said.append(f"the first {shown.dropped:,} lines are gone: of each worker the newest 200 MB are kept")
    if shown.broken:
        said.append(f"later lines are not here: {shown.broken}")
    for number, lines in groupby(shown.lines, lambda line: line[0]):
        said += [f"-- cell {number} --"] if cell is None else []
        said += [line for _, line in lines]
    return said


def save(printed: Sequence[Printed], file: str) -> int:
    """Write all lines that are kept to a file, and return their number. Raises OSError if it cannot be written."""
    count = 0
    with Path(file).expanduser().open("w", errors="backslashreplace") as out:
        for each in printed:
            label = f"{label_of((each.worker,))} " if len(printed) > 1 else ""
            for _, line in each.lines():
                out.write(f"{label}{line}\n")
                count += 1
    return count
