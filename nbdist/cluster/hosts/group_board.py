"""The store at which workers of several hosts form their process group: in the notebook's memory, reached by RPC.

So the store is encrypted like all RPC, and no other socket listens. A worker that waits for a key asks again and again,
with pauses, so that no thread of the notebook waits for the worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from nbdist.cluster.processes.group_store import REPLACED, GroupStore, operate
from nbdist.errors import RendezvousError
from nbdist.rpc.named import NotOffered


class Boards:
    """The boards of one cluster, keys with values: one for each generation of its process group.

    The notebook's agent publishes them as ``boards``. Any thread may use them.
    """

    def __init__(self) -> None:
        # By generation: the values, and why the group failed to form (empty if it has not failed).
        self._boards: dict[int, tuple[dict[str, bytes], str]] = {}
        self._lock = threading.Lock()

    def make(self, generation: int) -> None:
        """Make the board of a new generation."""
        with self._lock:
            self._boards[generation] = {}, ""

    def end(self, generation: int, why: str) -> None:
        """Make every present and future wait at a board raise RendezvousError with the text ``why``."""
        with self._lock:
            self._boards[generation] = self._boards[generation][0], why

    def remove(self, generation: int) -> None:
        """Remove a board, if there is one."""
        with self._lock:
            self._boards.pop(generation, None)

    def act(self, generation: int, operation: str, *arguments: Any) -> Any:
        """Do one operation of a `BoardStore` and return its result. Raises RendezvousError if the board has ended."""
        with self._lock:
            values, ended = self._boards.get(generation, ({}, REPLACED))
            if operation == "ended":
                return ended
            if ended:
                raise RendezvousError(ended)
            return operate(values, operation, *arguments)


class BoardStore(GroupStore):
    """The store of one generation of a process group, at a board in the notebook."""

    _first_pause, _longest_pause = 0.002, 0.05  # longer than for a folder: each look is a call

    def __init__(self, generation: int, act: Callable[..., Any]) -> None:
        """Use the board of a generation. ``act`` calls `Boards.act` in the notebook."""
        super().__init__()
        self._generation = generation
        self._act = act

    def _do(self, operation: str, *arguments: Any) -> Any:
        try:
            return self._act(self._generation, operation, *arguments)
        except NotOffered:  # the cluster has ended
            raise RendezvousError(REPLACED) from None

    @property
    def ended(self) -> str:
        """Return why the group failed to form, or that the board is gone; empty if all is well."""
        return str(self._do("ended"))
