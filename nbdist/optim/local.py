"""What runs on the worker that owns parameters; and asking all of them at once."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nbdist import trace
from nbdist.autograd.api import recorder
from nbdist.autograd.leaves import lent
from nbdist.errors import NbdistError, UsageError
from nbdist.optim.parameters import name_of
from nbdist.rpc import api
from nbdist.rpc.membership import WorkerInfo
from nbdist.rpc.rref import RRef

__all__ = ["LocalOptimizer", "StepFailed", "ask_all", "by_owner", "on_cpu", "refuse_closure"]


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
        refuse_closure(type(self.optimizer))  # of a function that makes an optimizer it is only known now

    def step(self, context_id: int) -> None:
        """Update the parameters by what a context has for them; those that it has nothing for stay as they are."""
        gradients = recorder().contexts.get(context_id).gradients_of(self.parameters)
        start = time.monotonic()
        with lent(gradients):
            self.optimizer.step()
        if trace.listeners:
            name = type(self.optimizer).__name__
            trace.emit("optimizer.stepped", agent=api.current_agent().me.name, start=start, optimizer=name)

    def describe(self) -> list[tuple[str | None, list[int]]]:
        """Return the name, if any is known here, and the shape of each parameter."""
        return [(name_of(parameter), list(parameter.shape)) for parameter in self.parameters]

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's own, with all tensors on the CPU."""
        found: dict[str, Any] = on_cpu(self.optimizer.state_dict())
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As the optimizer's own."""
        self.optimizer.load_state_dict(state)


def new_local_optimizer(
    cls: Any, groups: Sequence[Mapping[str, Any]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[RRef[LocalOptimizer], list[tuple[str | None, list[int]]]]:
    """Make an optimizer where the caller has it made; return it, and what `LocalOptimizer.describe` says."""
    optimizer = LocalOptimizer(cls, groups, args, kwargs)
    return RRef(optimizer), optimizer.describe()


def refuse_closure(cls: type) -> None:
    """Raise an error if an optimizer's ``step`` needs a closure, as that of LBFGS does.

    Raises:
        UsageError: it needs one. Such an optimizer evaluates the loss several times within one step, each time with
            other parameters. A context has the gradients of one evaluation, and each worker would search by itself.
    """
    try:
        closure = inspect.signature(cls.step).parameters.get("closure")  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return  # no class of an optimizer, which the optimizer's first use says better
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{cls.__name__} computes the loss several times in a step, by a closure, but a context has the gradients "
            "of one computation: a DistributedOptimizer cannot use it. Use an optimizer whose step() needs no closure, "
            "such as torch.optim.SGD or Adam"
        )


def on_cpu(value: Any) -> Any:
    """Return a state, ready to travel: its tensors, those in lists and dicts too, on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {name: on_cpu(part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(on_cpu, value))
    return value


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
    outcomes = [agent.begin(to, function, *args) for to, function, args in calls]
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
