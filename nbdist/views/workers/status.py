"""Shows the result of `%dist_status`: a table of the workers."""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.amounts import size
from nbdist.cluster.inspection.status import WorkerStatus
from nbdist.views import tables

__all__ = ["StatusTable"]

_COLUMNS = ("worker", "rank", "pid", "device", "state", "runs", "memory", "calls")


class StatusTable:
    """A table with a row for each worker: its rank, process, device, state, memory and calls; as text and HTML."""

    def __init__(self, rows: Sequence[WorkerStatus]) -> None:
        self.rows = rows

    def _columns(self) -> tuple[str, ...]:
        """Return the names of the columns; the last one, the line of code, only if it is known of some worker."""
        return (*_COLUMNS, "at") if any(row.report.where for row in self.rows) else _COLUMNS

    def _cells(self) -> list[list[str]]:
        columns = len(self._columns())
        return [
            [
                row.name,
                str(row.rank),
                str(row.pid or ""),
                row.device,
                _first_line(row.state),
                _first_line(row.runs),
                size(row.report.memory) if row.report.memory is not None else "",
                str(row.report.calls) if row.report.calls is not None else "",
                row.report.where,
            ][:columns]
            for row in self.rows
        ]

    def __repr__(self) -> str:
        return "\n".join(tables.as_lines(self._columns(), self._cells()))

    def _repr_html_(self) -> str:
        return tables.as_html(self._columns(), self._cells())


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
