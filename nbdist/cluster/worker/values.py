"""Puts the values of `Cluster.push` into a worker's namespace.

An RPC brings the values (`receive`), and a cell assigns them (`place`), so that they take effect in the order of cells.
"""

from __future__ import annotations

import threading
from typing import Any


class PushedValues:
    """The values that the notebook pushes to a worker. The notebook may call `receive` and `forget`, in any thread."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.arrived: dict[str, dict[str, Any]] = {}
        """The variables that no cell has placed yet, by token."""
        # The tokens forgotten before their variables arrived: a large message may arrive after a later small one.
        self._forgotten: set[str] = set()
        self._changing = threading.Lock()

    def receive(self, token: str, variables: dict[str, Any]) -> None:
        """Keep variables, by name, until the cell with the same token runs. Each push has its own token."""
        with self._changing:
            if token in self._forgotten:
                self._forgotten.remove(token)
            else:
                self.arrived[token] = variables

    def forget(self, token: str) -> None:
        """Drop the variables of a push that has failed, now or when they arrive."""
        with self._changing:
            if self.arrived.pop(token, None) is None:
                self._forgotten.add(token)

    def place(self, token: str) -> None:
        """Assign the variables of this token in the user's namespace, once. Runs in a cell.

        KeyError if the values have not arrived, or were placed before.
        """
        self._shell.push(self.arrived.pop(token))
