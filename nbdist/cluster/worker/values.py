"""Puts the values of `Cluster.push` into a worker's namespace.

An RPC brings the values (`receive`), and a cell assigns them (`place`), so that they take effect in the order of cells.
"""

from __future__ import annotations

import threading
from typing import Any

from IPython import get_ipython

__all__ = ["forget", "place", "receive"]

_arrived: dict[str, dict[str, Any]] = {}
"""The variables that no cell has placed yet, by token."""
_forgotten: set[str] = set()
"""The tokens that were forgotten before their variables arrived: a large message may arrive after a later small one."""

_changing = threading.Lock()
"""Guards both: `receive` and `forget` may run at the same time, in two threads."""


def receive(token: str, variables: dict[str, Any]) -> None:
    """Keep variables, by name, until the cell with the same token runs. Runs by RPC.

    A token is used once; the notebook makes a new one for each push. After `forget`, the variables are dropped.
    """
    with _changing:
        if token in _forgotten:
            _forgotten.remove(token)
        else:
            _arrived[token] = variables


def forget(token: str) -> None:
    """Drop the variables of a push that has failed, now or when they arrive. Runs by RPC."""
    with _changing:
        if _arrived.pop(token, None) is None:
            _forgotten.add(token)


def place(token: str) -> None:
    """Assign the variables of this token in the user's namespace, once. Runs in a cell.

    KeyError if the values have not arrived, or were placed before.
    """
    shell: Any = get_ipython()
    shell.push(_arrived.pop(token))
