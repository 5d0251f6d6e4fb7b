"""The table of `%dist_status`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nbdist.cluster.status import WorkerStatus

__all__ = ["StatusTable"]

_COLUMNS = ("worker", "rank", "pid", "device", "state", "runs", "memory", "calls")


class StatusTable:
    """What each worker is and does: text, and HTML where it can be shown."""

    def __init__(self, rows: Sequence[WorkerStatus]) -> None:
        self.rows = rows

    def _cells(self) -> list[list[str]]:
        return [
            [
                row.name,
                str(row.rank),
                str(row.pid or ""),
                row.device,
                _first_line(row.state),
                _first_line(row.runs),
                _bytes(row.memory),
                str(row.calls) if row.calls is not None else "",
            ]
            for row in self.rows
        ]

    def __repr__(self) -> str:
        table = [list(_COLUMNS), *self._cells()]
        widths = [max(len(line[column]) for line in table) for column in range(len(_COLUMNS))]
        return "\n".join(
            "  ".join(f"{text:<{w}}" for text, w in zip(line, widths, strict=True)).rstrip() for line in table
        )

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:left'>{name}</th>" for name in _COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{escape(text)}</td>" for text in line) + "</tr>"
            for line in self._cells()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _bytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.0f} MB"
