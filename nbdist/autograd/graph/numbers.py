"""Numbers the nodes of a context's graph on one worker: torch's nodes have no names that a user could tell apart."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from nbdist.autograd.graph.edges import Node


class NodeNumbers:
    """Gives the nodes of a context on this worker the numbers by which they are shown to the user."""

    def __init__(self) -> None:
        self._numbers: dict[Node, int] = {}
        self._lock = threading.Lock()

    def of(self, nodes: Iterable[Node]) -> dict[Node, int]:
        """Return the number of each node; new nodes get the next numbers, in the order in which they were made.

        A node keeps its number for the life of the context, so repeated calls agree.
        """
        nodes = list(nodes)
        with self._lock:
            new = [node for node in nodes if node not in self._numbers]
            for node in sorted(new, key=lambda node: node._sequence_nr()):
                self._numbers[node] = len(self._numbers)
            return {node: self._numbers[node] for node in nodes}
