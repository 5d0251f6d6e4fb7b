"""The common base of optimizers and schedulers over workers: one local object on each worker, called together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbdist.optim.local import ask_all, call_local
from nbdist.rpc.references.rref import RRef

__all__ = ["Distributed"]


class Distributed:
    """Local objects on several workers, at most one on each, whose methods are called on all of them at once."""

    def __init__(self, parts: Sequence[RRef[Any]]) -> None:
        self._parts = {rref.owner_name(): rref for rref in parts}

    def call_all(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method on all local objects at once, wait for all of them, and return the results by worker name.

        If one worker fails, raises its error; if several fail, `StepFailed`. Either way, every worker has answered by
        then.
        """
        return ask_all(call_local, {name: (rref, method, *args) for name, rref in self._parts.items()})

    def give_all(self, method: str, values: Mapping[str, Any]) -> None:
        """Call ``method(value)`` on all local objects at once, each with its worker's value, and wait for all of them.

        ``values`` has an argument for each worker, by worker name. If one worker fails, its error is raised; if several
        fail, `StepFailed`.
        """
        ask_all(call_local, {name: (rref, method, values[name]) for name, rref in self._parts.items()})
