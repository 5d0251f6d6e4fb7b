"""What runs on the worker that owns parameters; and asking all of them at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nbdist import trace
from nbdist.autograd.api import recorder
from nbdist.autograd.leaves import lent
from nbdist.errors import NbdistError
from nbdist.rpc import api
from nbdist.rpc.membership import WorkerInfo
from nbdist.rpc.rref import RRef

__all__ = ["LocalOptimizer", "StepFailed", "ask_all", "by_owner"]


class StepFailed(NbdistError):
    """Several workers failed; each is told of, the first one's error is the cause."""


class LocalOptimizer:
    """An optimizer of torch, for the parameters that one worker owns."""

    def __init__(
        self, cls: Any, groups: Sequence[Mapping[str, Any]], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        local = [{**group, "params": [rref.local_value() for rref in group["params"]]} for group in groups]
        plain = len(local) == 1 and set(local[0]) == {"params"}
        self.parameters: list[torch.Tensor] = [parameter for group in local for parameter in group["params"]]
        self.optimizer: torch.optim.Optimizer = cls(local[0]["params"] if plain else local, *args, **kwargs)

    def step(self, context_id: int) -> None:
        """Update the parameters by what a context has for them; those that it has nothing for stay as they are."""
        gradients = recorder().contexts.get(context_id).gradients()
        start = time.monotonic()
        with lent({parameter: gradients.get(parameter) for parameter in self.parameters}):
            self.optimizer.step()
        name = type(self.optimizer).__name__
        trace.emit("optimizer.stepped", agent=api.current_agent().me.name, start=start, optimizer=name)

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's own."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As the optimizer's own."""
        self.optimizer.load_state_dict(state)


def new_local_optimizer(
    cls: Any, groups: Sequence[Mapping[str, Any]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> RRef[LocalOptimizer]:
    """Make one where the caller has it made."""
    return RRef(LocalOptimizer(cls, groups, args, kwargs))


def call_local(rref: RRef[Any], method: str, *args: Any) -> Any:
    """Call a method of what lives here."""
    return getattr(rref.local_value(), method)(*args)


def by_owner(rrefs: Sequence[RRef[Any]]) -> dict[WorkerInfo, list[RRef[Any]]]:
    """References by the worker on which their values live, in the order given."""
    owners: dict[WorkerInfo, list[RRef[Any]]] = {}
    for rref in rrefs:
        owners.setdefault(rref.owner(), []).append(rref)
    return owners


def ask_all(calls: Sequence[tuple[WorkerInfo, Any, tuple[Any, ...]]]) -> list[Any]:
    """Call functions on several workers at the same time; the results in order.

    One error is raised as it is, several as one that tells of each.
    """
    agent = api.current_agent()
    outcomes = [agent.caller.begin(to, function, args) for to, function, args in calls]
    results: list[Any] = []
    errors: list[tuple[str, Exception]] = []
    for outcome, (to, _, _) in zip(outcomes, calls, strict=True):
        try:
            results.append(outcome.wait(agent.read_as_guest))
        except Exception as error:
            errors.append((to.name, error))
    if len(errors) > 1:
        told = "\n".join(f"  {name}: {type(error).__name__}: {error}" for name, error in errors)
        raise StepFailed(f"{len(errors)} workers failed:\n{told}") from errors[0][1]
    if errors:
        raise errors[0][1]
    return results
