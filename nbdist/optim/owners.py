"""Calls all workers that own parts of one object at once: `Distributed`, and `ask_all`, on the worker that calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbdist.errors import NbdistError
from nbdist.optim.local import call_local
from nbdist.rpc import api
from nbdist.rpc.asking import ask_each
from nbdist.rpc.failures import text_of_error
from nbdist.rpc.references.rref import RRef


class StepFailed(NbdistError):
    """A call to several workers that failed on at least two of them.

    The message has a line for each worker that failed, with its error; ``__cause__`` is the first of these errors. The
    workers that did not fail have done their part: after a failed optimizer step, their parameters are updated. If only
    one worker fails, its own error is raised instead; workers that died count as failed, each with a WorkerLost.

    Example:
        >>> weights = [rpc.remote(name, torch.nn.Parameter, args=(torch.ones(2),)) for name in ("worker0", "worker1")]
        >>> nbdist.optim.DistributedOptimizer(torch.optim.SGD, weights, lr=-1.0)
        Traceback (most recent call last):
        nbdist.optim.owners.StepFailed: 2 workers failed:
          worker0: ValueError: Invalid learning rate: -1.0
          worker1: ValueError: Invalid learning rate: -1.0
    """


class Distributed:
    """Local objects on several workers, at most one on each, whose methods are called on all of them at once."""

    def __init__(self, parts: Sequence[RRef[Any]]) -> None:
        self._parts = {rref.owner_name(): rref for rref in parts}

    def call_all(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method on all local objects at once, and return the results by worker name, as `ask_all` does."""
        return ask_all(call_local, {name: (rref, method, *args) for name, rref in self._parts.items()})

    def give_all(self, method: str, values: Mapping[str, Any], *args: Any) -> None:
        """Call ``method(*args, value)`` on all local objects at once, each with its worker's value; see `ask_all`."""
        ask_all(call_local, {name: (rref, method, *args, values[name]) for name, rref in self._parts.items()})


def by_owner(rrefs: Sequence[RRef[Any]]) -> dict[str, list[RRef[Any]]]:
    """Return the references grouped by the name of the worker that owns their values, each group in the order given."""
    owners: dict[str, list[RRef[Any]]] = {}
    for rref in rrefs:
        owners.setdefault(rref.owner_name(), []).append(rref)
    return owners


def ask_all(function: Any, arguments: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Call a function on several workers at once, wait for every answer, and return the results by worker name.

    ``arguments`` has the arguments by worker name. If one call fails, its error is raised unchanged; if several fail,
    `StepFailed` lists them all. Either way all other calls have ended by then.
    """
    answers = ask_each(api.current_agent(), function, arguments)
    errors = answers.errors
    if len(errors) > 1:
        told = "\n".join(f"  {name}: {type(error).__name__}: {text_of_error(error)}" for name, error in errors.items())
        raise StepFailed(f"{len(errors)} workers failed:\n{told}") from next(iter(errors.values()))
    return answers.or_raise()
