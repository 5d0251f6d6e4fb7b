"""What an optimizer and a scheduler over workers have in common: a local one on each of several workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbdist.optim.local import ask_all, call_local
from nbdist.rpc.rref import RRef

__all__ = ["Distributed"]


class Distributed:
    """Local objects on several workers, of each worker one, that are called together."""

    def __init__(self, parts: Sequence[RRef[Any]]) -> None:
        self._parts = {rref.owner_name(): rref for rref in parts}

    def call_all(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of all local ones at the same time; the results by the names of the workers."""
        results = ask_all([(rref.owner(), call_local, (rref, method, *args)) for rref in self._parts.values()])
        return dict(zip(self._parts, results, strict=True))

    def give_all(self, method: str, values: Mapping[str, Any]) -> None:
        """Call a method of all local ones at the same time, each with the value for its worker."""
        ask_all([(rref.owner(), call_local, (rref, method, values[name])) for name, rref in self._parts.items()])
