"""Values on their way into a worker's namespace.

They arrive by RPC, and are put in place by a cell, so that they come after the cells that were sent before.
"""

from __future__ import annotations

from typing import Any

from IPython import get_ipython

__all__ = ["place", "receive"]

_arrived: dict[str, dict[str, Any]] = {}


def receive(token: str, variables: dict[str, Any]) -> None:
    """Keep variables until their cell runs."""
    _arrived[token] = variables


def place(token: str) -> None:
    """Set them in the user's namespace."""
    shell: Any = get_ipython()
    shell.push(_arrived.pop(token))
