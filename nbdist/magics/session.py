"""Keeps nbdist's state of one shell, and the functions that run with every cell.

These steps run around a cell::

    _transform ──> the cell runs ──> _before_result ──> the result is shown ──> _after_cell
    `%%rank[0,1]`, `%debug`,         shows first what                           waits for the workers' output
    `%dist_mode`                     the cell's calls printed
"""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from nbdist.cluster import spawning
from nbdist.cluster.cluster import Cluster
from nbdist.cluster.errors import CellError
from nbdist.cluster.inspection import code_versions
from nbdist.cluster.inspection.breakpoints import ClusterBreakpoints
from nbdist.cluster.jupyter import labels
from nbdist.cluster.jupyter.page_lines import Page, follow_page
from nbdist.cluster.jupyter.versions import active_autoreloader, add_completer
from nbdist.cluster.kernels.cells import LEAVES_NO_FRAME
from nbdist.cluster.page_debugger import PageDebugger
from nbdist.cluster.processes.launchers.local import discard
from nbdist.errors import DebuggerQuit, UsageError
from nbdist.magics.completion import complete
from nbdist.magics.inspection import inspect_on_workers
from nbdist.magics.reruns import Reruns
from nbdist.views.workers.memory_rows import Look

# The most seconds for which a cell's result waits for the output of its calls. A worker may hold the GIL longer.
_RESULT_WAITS_FOR_OUTPUT = 0.3

_RANK = re.compile(r"^(\s*%%rank)(?=\[)")


class NotebookSession:
    """The state of nbdist in one shell, made by `of`. It hooks into the shell until `close`."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell: Any = shell
        self.everywhere = False
        """True if cells without a magic run on all workers (`%dist_mode -e`)."""
        self.memory_look: Look | None = None
        """The amounts that the last `%dist_memory` showed, for its column "since last look"."""
        self.named: Cluster | None = None
        """The cluster that `%dist_init` has called ``cluster``; None if the user has a variable of this name."""
        self._page_debugger: PageDebugger | None = None
        labels.install(shell, None)
        spawning.install(on_worker=False)
        # First: `_transform` compares the lines with the page's text, and later transformers remove some of them.
        shell.input_transformers_cleanup.insert(0, self._transform)
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)
        self._remove_completer = add_completer(shell, partial(complete, shell))
        labels.trim_tracebacks(shell)
        self._kernel: Any = getattr(shell, "kernel", None)
        if hasattr(self._kernel, "do_inspect"):
            inspect_on_workers(self._kernel)
        hook: Any = self._shell.displayhook
        self._show_result: Any = hook.start_displayhook
        hook.start_displayhook = self._before_result
        self.reruns = Reruns(shell)
        self._versions = code_versions.Versions()
        self._breakpoints: ClusterBreakpoints | None = None
        # The whole text of a cell while a part of it runs in the notebook: tracebacks count lines from its top.
        self._counted: Page | None = None
        follow_page(self._shell.compile, lambda: self._counted)

    @classmethod
    def of(cls, shell: Any) -> NotebookSession:
        """Return the session of a shell; make it at the first call."""
        if (found := getattr(shell, "_nbdist", None)) is None:
            found = shell._nbdist = cls(shell)
        return found

    @staticmethod
    def cluster() -> Cluster:
        """Return the cluster of this process. Raises UsageError if there is none."""
        if Cluster.current is None:
            raise UsageError("no cluster runs; start one with %dist_init -n 4")
        return Cluster.current

    def breakpoints(self) -> ClusterBreakpoints:
        """Return the breakpoints of the cluster. Raises UsageError if there is none."""
        cluster = self.cluster()
        if self._breakpoints is None or self._breakpoints.agent is not cluster.agent:
            self._breakpoints = ClusterBreakpoints(cluster.agent, cluster.workers)
        return self._breakpoints

    def page(self) -> Page:
        """Return the notebook cell that runs now, as a `Page`; its text is empty outside of a kernel."""
        parent = self._shell.get_parent() if hasattr(self._shell, "get_parent") else None
        return Page((parent or {}).get("content", {}).get("code", ""))

    def run_and_show(self, code: str) -> bool:
        """Run the code of a cell for workers in the notebook, too (``%%remote --local``).

        IPython shows an error of the code; it is not raised here. Returns whether it was a KeyboardInterrupt.
        """
        page, self._counted = self._counted, self.page()
        try:
            done = self._shell.run_cell(code)
        finally:
            self._counted = page
        return isinstance(done.error_in_exec, KeyboardInterrupt)

    def debug_in_page(self, worker: str) -> str:
        """Turn JupyterLab's debugger to a worker, or to the notebook if this is "off"; return what to tell the user."""
        debugger, self._page_debugger = self._page_debugger, None
        if debugger is not None:
            debugger.close()
        if worker == "off":
            return "JupyterLab's debugger debugs the notebook again: click its bug off and on."
        cluster = self.cluster()
        found, *others = cluster.select(worker)
        if others:
            raise UsageError(f"JupyterLab's debugger debugs one worker, not {1 + len(others)}: --lab {found.name}")
        self._page_debugger = PageDebugger(self._shell, found, cluster.kernel_thread, cluster.agent, cluster.stops)
        cluster.farewells.append(self._page_debugger.close)
        return (
            f"JupyterLab's debugger debugs {found.name}: click its bug, at the top right of the notebook, off and on, "
            "then left of a line of a cell with %%remote. `%dist_debug --lab off` gives it back to the notebook. Once "
            f"on, debugpy listens on the loopback of the host of {found.name} without a password, until {found.name} "
            f"ends: `%dist_restart {found.name}`."
        )

    def close(self) -> None:
        """End the cluster, and remove all hooks from the shell. Call this once."""
        if self._page_debugger is not None:
            self._page_debugger.close()
        if Cluster.current is not None:
            Cluster.current.shutdown()
        discard()
        spawning.uninstall()
        self._shell.input_transformers_cleanup.remove(self._transform)
        self._shell.events.unregister("pre_run_cell", self._before_cell)
        self._shell.events.unregister("post_run_cell", self._after_cell)
        self._remove_completer()
        if hasattr(self._kernel, "do_inspect"):
            del self._kernel.do_inspect
        del self._shell.compile.cache, self._shell.compile.ast_parse
        del self._shell.displayhook.start_displayhook
        del self._shell.InteractiveTB.structured_traceback  # the attribute hides the class's own method
        del self._shell._nbdist

    # -- with every cell ------------------------------------------------------------------------

    def _transform(self, lines: list[str]) -> list[str]:
        """Return a cell's lines, rewritten before IPython runs them: ``%%rank[0,1]``, or after ``%dist_mode -e``."""
        first = next((index for index, line in enumerate(lines) if line.strip()), None)
        if first is None:
            return lines
        if _RANK.match(lines[first]):
            return [*lines[:first], _RANK.sub(r"\1 ", lines[first]), *lines[first + 1 :]]
        if "".join(lines).strip() == "%debug" and (failed := _failed_workers()):
            return [f"%dist_debug {','.join(failed)}\n"]  # IPython's has no frame of the error here
        # IPython calls this for all code that it transforms. The text below a magic, such as ``%%time``, is not the
        # page's own cell, and runs where the magic runs it.
        page = self.page().text  # empty outside of a kernel
        is_own = not page or "".join(lines).rstrip("\n") == page.rstrip("\n")
        if self.everywhere and is_own and Cluster.current is not None and Cluster.current.running and _is_plain(lines):
            return ["%%distributed\n", *lines]
        return lines

    def _before_cell(self, _: Any) -> None:
        """Let workers follow ``%autoreload``, and new ones have the breakpoints."""
        if (reloader := active_autoreloader(self._shell)) and (cluster := Cluster.current) and cluster.running:
            code_versions.follow(cluster.agent, cluster.workers, cluster.lifecycle.launcher, reloader)
        if self._breakpoints is not None and self._breakpoints.agent.closed:
            self._breakpoints = None  # it would keep the cluster's agent alive
        elif self._breakpoints is not None:
            self._breakpoints.tell()

    def _before_result(self) -> None:
        """Wait for the output of the cell's calls on workers, so that it is shown above the cell's result."""
        if (cluster := Cluster.current) is not None and cluster.running:
            cluster.settle(patience=_RESULT_WAITS_FOR_OUTPUT)
        self._show_result()

    def _after_cell(self, _: Any) -> None:
        """Wait for the output of the cell's calls on workers, so that it is shown below this cell; compare versions."""
        cluster = Cluster.current
        # The cluster of `%dist_init` has ended. A variable that the user has assigned meanwhile stays.
        if self.named is not None and self.named is not cluster:
            self._shell.drop_by_id({"cluster": self.named})
            self.named = None
        if cluster is not None and cluster.running:
            cluster.settle()
            if active_autoreloader(self._shell) is None:  # else workers follow
                for line in self._versions.differing(cluster.agent, cluster.workers):
                    print(line, file=sys.stderr)


def _failed_workers() -> list[str]:
    """Return the living workers on which the last error of this notebook arose, in a cell or in a call."""
    error, cluster = getattr(sys, "last_value", None), Cluster.current
    if cluster is None or not cluster.running:
        return []
    errors = error.errors if isinstance(error, CellError) else ()
    names = [each.worker for each in errors if each.name not in LEAVES_NO_FRAME]
    for note in () if isinstance(error, DebuggerQuit) else getattr(error, "__notes__", ()):
        if note.startswith("raised on "):
            names.append(note.removeprefix("raised on ").partition(",")[0])
    return [worker.name for worker in cluster.workers if worker.name in names and worker.alive]


def _is_plain(lines: list[str]) -> bool:
    text = "".join(lines).strip()
    if text.startswith(("%", "?")) or text.endswith("?"):  # a magic, or a request for help
        return False
    return any(line.strip() and not line.strip().startswith("#") for line in lines)
