"""Puts the values of `Cluster.push` into a worker's namespace.

An RPC brings the values (`receive`), and a cell assigns them (`place`), so that they take effect in the order of cells.
"""

from __future__ import annotations

from typing import Any

from IPython import get_ipython

__all__ = ["place", "receive"]

_arrived: dict[str, dict[str, Any]] = {}


def receive(token: str, variables: dict[str, Any]) -> None:
    """Keep variables, by name, until the cell with the same token runs. Runs by RPC.

    A token is used once; the notebook makes a new one for each push.
    """
    _arrived[token] = variables


def place(token: str) -> None:
    """Assign the variables of this token in the user's namespace, once. Runs in a cell.

    KeyError if the values have not arrived, or were placed before.
    """
    shell: Any = get_ipython()
    shell.push(_arrived.pop(token))
