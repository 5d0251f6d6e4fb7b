"""The rule for a page's cell that is run again while its earlier run, started with ``-a``, goes on.

Workers run cells in the order in which they were sent, so the new run begins when the earlier one has ended. A page
drops the output of an earlier run, so that output is shown below the new run. The new run says both in one line.
"""

from __future__ import annotations

from typing import Any

from nbdist.cluster.arrange import say_names
from nbdist.cluster.cells import Cell

__all__ = ["Reruns"]


class Reruns:
    """The cells that were started with ``-a`` and have not ended, by the id that the page gives the cell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._runs: dict[str, list[Cell]] = {}

    def begin(self, cell: Cell) -> None:
        """Note a run that begins, and move the output of earlier runs of the same cell of the page to it."""
        parent = self._shell.get_parent() if hasattr(self._shell, "get_parent") else None
        id = ((parent or {}).get("metadata") or {}).get("cellId")
        if not isinstance(id, str):  # a front end that does not name cells keeps the output of both
            return
        self._runs = {each: left for each, runs in self._runs.items() if (left := [r for r in runs if not r.done])}
        earlier = self._runs.setdefault(id, [])
        if earlier:
            for run in earlier:
                run.move_to(cell.sink)
            running = {name: None for run in earlier for name in run.running}
            if running and cell.sink.interactive:
                cell.sink.page.publish("stream", {"name": "stderr", "text": _say(list(running), cell)})
        earlier.append(cell)


def _say(running: list[str], cell: Cell) -> str:
    awaited = [name for name in running if name in cell.parts]
    who = say_names(running)
    text = f"An earlier run of this cell goes on, on {who}; its output shows here, and its cancel() ends it."
    return f"{text} This run begins on {say_names(awaited)} after it.\n" if awaited else f"{text}\n"
