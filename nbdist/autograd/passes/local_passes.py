"""Local passes, torch's own ``backward()`` in this process, as far as somebody watches them.

Whoever watches is asked before each local pass (`LocalPasses.follow`), and may return a block in which it runs. A
``backward()`` inside of a node, as of a reentrant checkpoint, belongs to that node; ``autograd.grad`` is no pass.

Lines are noted in a cell while somebody wants them for the next pass: the forward pass is over when a pass begins.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from nbdist.autograd.graph.edges import GraphEdge
from nbdist.autograd.graph.noting import noted, wake
from nbdist.torch_private import graph_task

Look = Callable[[Sequence[GraphEdge]], AbstractContextManager[None] | None]

_log = logging.getLogger("nbdist.autograd")


class _PerThread(threading.local):
    is_unseen = False


class LocalPasses:
    """The watchers of the local passes of this process."""

    def __init__(self) -> None:
        self._thread = _PerThread()
        self._followers: dict[tuple[Look, Callable[[], bool]], None] = {}  # in order
        self._cell = ExitStack()  # of the main thread

    def follow(self, look: Look, wants_lines: Callable[[], bool]) -> Callable[[], object]:
        """Have each local pass run in the block that ``look(roots)`` returns, unless None; return what ends that.

        ``wants_lines()`` tells whether it would watch a pass of what is computed now.
        """
        self._followers[look, wants_lines] = None
        return partial(self._followers.pop, (look, wants_lines), None)

    def around(self, roots: Sequence[Any], edge_of: Callable[[Any], GraphEdge]) -> AbstractContextManager[None]:
        """Return the block in which a local pass from these roots runs."""
        if not self._followers or graph_task() >= 0 or self._thread.is_unseen:
            return nullcontext()
        try:
            return self._around(list(map(edge_of, roots)))
        except RuntimeError:  # a root without a graph: torch's engine has the error that users know
            return nullcontext()

    @contextmanager
    def _around(self, edges: Sequence[GraphEdge]) -> Iterator[None]:
        try:
            with self._looked_at(edges):
                yield
        finally:
            wake()

    def _looked_at(self, edges: Sequence[GraphEdge]) -> AbstractContextManager[None]:
        for look, _ in list(self._followers):
            try:
                if (block := look(edges)) is not None:
                    return block
            except Exception:  # of a view, whatever it is: a drawing must not fail the user's pass
                _log.exception("a backward pass is not watched, because its drawing failed")
        return nullcontext()

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Show nobody the passes of the calling thread in the block: they are a part of what is shown otherwise."""
        outer, self._thread.is_unseen = self._thread.is_unseen, True
        try:
            yield
        finally:
            self._thread.is_unseen = outer

    def noted(self) -> AbstractContextManager[None]:
        """Return a block in which the calling thread notes lines, while somebody wants them."""
        if not self._followers:
            return nullcontext()
        return noted(wanted=lambda: any(wants() for _, wants in list(self._followers)))

    def cell_begins(self, *_: object) -> None:
        """Note lines in the main thread from now on, if somebody watches. A worker's shell calls this."""
        self.cell_ends()  # of a cell inside of which this one runs
        self._cell.enter_context(self.noted())

    def cell_ends(self, *_: object) -> None:
        """Stop what `cell_begins` has begun."""
        self._cell.close()


local_passes = LocalPasses()
