"""What the magics add to a shell besides themselves: things that happen with every cell."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from nbdist.cluster import labels
from nbdist.cluster.cluster import Cluster
from nbdist.cluster.launchers.local import discard
from nbdist.cluster.page_lines import Page, follow_page
from nbdist.errors import UsageError
from nbdist.magics.completion import RemoteCompleter
from nbdist.magics.inspection import RemoteInspector
from nbdist.magics.reruns import Reruns
from nbdist.views.memory_rows import Look

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["Session"]

_RESULT_WAITS = 0.3
"""Seconds that a cell's result waits for what the cell's calls printed: a worker that holds the GIL answers late."""

_RANK = re.compile(r"^(\s*%%rank)(?=\[)")


class Session:
    """One shell's side of nbdist."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell: Any = shell
        self.everywhere = False
        """Whether plain cells run on all workers: `%dist_mode -e`."""
        self.memory_look: Look | None = None
        """What the last `%dist_memory` saw, in amounts."""
        labels.install(shell, None)
        self._completer = RemoteCompleter(shell)
        shell.input_transformers_cleanup.insert(0, self._transform)
        shell.events.register("post_run_cell", self._after_cell)
        self._completer.install()
        labels.trim_tracebacks(shell)
        kernel = getattr(shell, "kernel", None)
        self._inspector = RemoteInspector(kernel) if hasattr(kernel, "do_inspect") else None
        if self._inspector is not None:
            self._inspector.install()
        hook: Any = self._shell.displayhook
        self._show_result: Any = hook.start_displayhook
        hook.start_displayhook = self._before_result
        self.reruns = Reruns(shell)
        self._counted: Page | None = None
        """The page's cell that is run in part here: its lines are counted from its top."""
        follow_page(self._shell.compile, lambda: self._counted)

    @classmethod
    def of(cls, shell: Any) -> Session:
        """The session of a shell; made when it is first asked for."""
        found = getattr(shell, "_nbdist", None)
        if found is None:
            found = shell._nbdist = cls(shell)
        return found

    @staticmethod
    def cluster() -> Cluster:
        """The cluster that runs."""
        if Cluster.current is None:
            raise UsageError("no cluster runs; start one with %dist_init -n 4")
        return Cluster.current

    def page(self) -> Page:
        """Return the page's cell that runs; an empty one where there is no page."""
        parent = self._shell.get_parent() if hasattr(self._shell, "get_parent") else None
        return Page((parent or {}).get("content", {}).get("code", ""))

    def run_here(self, code: str) -> None:
        """Run a part of the page's cell as a cell of this kernel."""
        page, self._counted = self._counted, self.page()
        try:
            self._shell.run_cell(code)
        finally:
            self._counted = page

    def close(self) -> None:
        """Undo what was done to the shell, and end the cluster."""
        if Cluster.current is not None:
            Cluster.current.shutdown()
        discard()
        self._shell.input_transformers_cleanup.remove(self._transform)
        self._shell.events.unregister("post_run_cell", self._after_cell)
        self._completer.remove()
        if self._inspector is not None:
            self._inspector.remove()
        del self._shell.compile.cache, self._shell.compile.ast_parse
        del self._shell.displayhook.start_displayhook
        del self._shell.InteractiveTB.structured_traceback  # the class's own shows again
        del self._shell._nbdist

    # -- with every cell ------------------------------------------------------------------------

    def _transform(self, lines: list[str]) -> list[str]:
        """Write ``%%rank[0,1]`` as IPython reads it; send plain cells to all workers where that was asked for."""
        first = next((index for index, line in enumerate(lines) if line.strip()), None)
        if first is None:
            return lines
        if _RANK.match(lines[first]):
            return [*lines[:first], _RANK.sub(r"\1 ", lines[first]), *lines[first + 1 :]]
        if self.everywhere and Cluster.current is not None and Cluster.current.running and _is_plain(lines):
            return ["%%distributed\n", *lines]
        return lines

    def _before_result(self) -> None:
        """Show what the cell's calls printed above the cell's result."""
        cluster = Cluster.current
        if cluster is not None and cluster.running:
            cluster.settle(patience=_RESULT_WAITS)
        self._show_result()

    @staticmethod
    def _after_cell(_: Any) -> None:
        cluster = Cluster.current
        if cluster is not None and cluster.running:
            cluster.settle()


def _is_plain(lines: list[str]) -> bool:
    """Whether a cell is code for everybody: no magic, no question for help, more than comments."""
    text = "".join(lines).strip()
    if text.startswith(("%", "?")) or text.endswith("?"):
        return False
    return any(line.strip() and not line.strip().startswith("#") for line in lines)
