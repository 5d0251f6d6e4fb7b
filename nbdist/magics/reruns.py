"""Handles a cell of the page that is run again while its earlier run, started with ``-a``, is still running.

A worker runs its cells one after the other, so the new run begins when the earlier one has ended. The page drops the
output area of the earlier run, so the rest of that run's output is shown below the new run. One line tells the user
both.
"""

from __future__ import annotations

from typing import Any

from nbdist.cluster.kernels.cells import Cell
from nbdist.cluster.output.arranger import say_names, stream_text


class Reruns:
    """The runs of ``-a`` cells that have not ended, by the id that the page gives to the cell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._runs: dict[str, list[Cell]] = {}

    def begin(self, cell: Cell) -> None:
        """Note a new run, and show the further output of earlier runs of the same cell below it.

        If an earlier run still runs on workers, a line below the cell says so.
        """
        parent = self._shell.get_parent() if hasattr(self._shell, "get_parent") else None
        id = ((parent or {}).get("metadata") or {}).get("cellId")
        if not isinstance(id, str):  # such a front end shows the output of both runs
            return
        self._runs = {each: left for each, runs in self._runs.items() if (left := [r for r in runs if not r.done])}
        earlier = self._runs.setdefault(id, [])
        for run in earlier:
            run.move_to(cell.sink)
        running = list(dict.fromkeys(name for run in earlier for name in run.running))
        if running and cell.sink.interactive:
            cell.sink.page.publish(stream_text("stderr", _line_about(running, cell)))
        earlier.append(cell)


def _line_about(running: list[str], cell: Cell) -> str:
    awaited = [name for name in running if name in cell.parts]
    who = say_names(running)
    text = f"An earlier run of this cell still runs on {who}; its output appears here, and its cancel() ends it."
    return f"{text} This run begins on {say_names(awaited)} after it.\n" if awaited else f"{text}\n"
