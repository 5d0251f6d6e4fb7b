"""What `%dist_memory` and `%dist_free` show: what lives on each worker by reference, and who holds it."""

from __future__ import annotations

from html import escape

from nbdist.cluster.holdings import Holding, Holdings
from nbdist.pictures import themed
from nbdist.views import cards, tables
from nbdist.views.amounts import size

__all__ = ["FreedTable", "MemoryTable"]

_MOST = 100
_SHOWN = 80
_COLUMNS = ("worker", "what", "bytes", "held by")


class MemoryTable:
    """All that lives, as text and as a table."""

    def __init__(self, found: Holdings) -> None:
        self.found = found

    def _head(self) -> str:
        if not self.found.items:
            return "Nothing lives on any worker by reference."
        return ", ".join(f"{worker}: {size(nbytes)}" for worker, nbytes in self.found.totals.items() if nbytes)

    def _foot(self) -> list[str]:
        lines = []
        if len(self.found.items) > _MOST:
            lines.append(f"… and {len(self.found.items) - _MOST} more")
        idle = [item for item in self.found.items if item.idle]
        if idle:
            nbytes = sum(item.nbytes or 0 for item in idle)
            lines.append(
                f"{len(idle)} of these, {size(nbytes)}, only Out, _ and tracebacks hold: %dist_free lets go of them"
            )
        if self.found.silent:
            lines.append(f"{', '.join(self.found.silent)} did not answer")
        return lines

    def __repr__(self) -> str:
        lines = tables.as_lines(_COLUMNS, self._rows()) if self.found.items else []
        return "\n".join([line for line in (self._head(),) if line] + lines + self._foot())

    def _repr_html_(self) -> str:
        faint = [number for number, item in enumerate(self.found.items) if item.idle]
        table = tables.as_html(_COLUMNS, self._rows(), faint) if self.found.items else ""
        foot = "".join(f"<div>{escape(line)}</div>" for line in self._foot())
        return themed(f"<div>{escape(self._head())}</div>", table, foot)

    def _rows(self) -> list[list[str]]:
        return [_cells(item) for item in self.found.items[:_MOST]]


class FreedTable(MemoryTable):
    """What has been let go of."""

    def _head(self) -> str:
        if not self.found.items:
            return "Out, _ and tracebacks hold nothing that is not held otherwise."
        told = ", ".join(f"{size(nbytes)} on {worker}" for worker, nbytes in self.found.totals.items())
        count = len(self.found.items)
        return f"Let go of {count} {'reference' if count == 1 else 'references'}: {told}."

    def _foot(self) -> list[str]:
        return [f"{', '.join(self.found.silent)} did not answer"] if self.found.silent else []


def _cells(item: Holding) -> list[str]:
    held = [f"{worker}: {', '.join(map(str, pins))}" for worker, pins in item.pins]
    what = cards.value(item.state).partition("\n")[0][:_SHOWN] if item.id is not None else "graph and gradients"
    return [item.worker, what, size(item.nbytes) if item.nbytes is not None else "", "; ".join(held)]
