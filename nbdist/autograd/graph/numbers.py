"""Numbers the nodes of a context's graph on one worker: torch's nodes have no names that a user could tell apart."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from nbdist.autograd.graph.edges import Node


class NodeNumbers:
    """Gives the nodes of a context on this worker the numbers by which they are shown to the user."""

    def __init__(self) -> None:
        # Strong references: if torch's wrapper of a node dies, the next one is another object, and not in this dict.
        self._numbers: dict[Node, int] = {}
        self._lock = threading.Lock()

    def all(self) -> list[Node]:
        """Return the nodes that have a number."""
        return list(self._numbers)

    def of(self, nodes: Iterable[Node]) -> dict[Node, int]:
        """Return each node's number, which it keeps; new nodes get the next ones, in the order they were made in."""
        nodes = list(nodes)
        with self._lock:
            new = [node for node in nodes if node not in self._numbers]
            for node in sorted(new, key=lambda node: node._sequence_nr()):
                self._numbers[node] = len(self._numbers)
            return {node: self._numbers[node] for node in nodes}
