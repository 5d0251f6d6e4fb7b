"""Shows the result of `%dist_status`: a table of the workers."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nbdist.amounts import size
from nbdist.cluster.inspection.status import WorkerStatus
from nbdist.cluster.output.arranger import say_names
from nbdist.cluster.partings import Parting
from nbdist.views import tables
from nbdist.views.drawing.pictures import themed

_COLUMNS = ("worker", "rank", "pid", "device", "state", "runs", "memory", "calls")


class StatusTable:
    """A row for each worker, as text and HTML; below, lines about collectives to which some workers have not come."""

    def __init__(self, rows: Sequence[WorkerStatus], partings: Sequence[Parting] = ()) -> None:
        self.rows = rows
        self._remarks = [parting.text for parting in partings]
        if broken := [row.name for row in rows if row.report.has_broken_group]:
            said = "an interrupt has broken off a process group: `%dist_restart -p` forms all anew"
            self._remarks.append(f"{say_names(broken)}: {said}")

    def _table(self) -> tuple[tuple[str, ...], list[list[str]]]:
        """Return the head and the rows; the last column, the line of code, only if it is known of some worker."""
        head = (*_COLUMNS, "at") if any(row.report.where for row in self.rows) else _COLUMNS
        rows = []
        for row in self.rows:
            memory = size(row.report.memory) if row.report.memory is not None else ""
            calls = str(row.report.calls) if row.report.calls is not None else ""
            known = [row.name, str(row.rank), str(row.pid or ""), row.device, _first_line(row.state)]
            rows.append([*known, _first_line(row.runs), memory, calls, row.report.where][: len(head)])
        return head, rows

    def __repr__(self) -> str:
        return "\n".join([*tables.as_lines(*self._table()), *self._remarks])

    def _repr_html_(self) -> str:
        remarks = themed(*(f"<div>{escape(line)}</div>" for line in self._remarks)) if self._remarks else ""
        return tables.as_html(*self._table()) + remarks


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
