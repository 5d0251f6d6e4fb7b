"""Local optimizers, on the workers that own parameters; `ask_all` and `Distributed`, which call all owners at once."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nbdist import trace
from nbdist.autograd.api import recorder
from nbdist.autograd.passes.claims import lent
from nbdist.errors import NbdistError, UsageError
from nbdist.gpus import spans
from nbdist.optim.parameters import name_of
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
        nbdist.optim.local.StepFailed: 2 workers failed:
          worker0: ValueError: Invalid learning rate: -1.0
          worker1: ValueError: Invalid learning rate: -1.0
    """


class LocalOptimizer:
    """An optimizer of torch for the parameters that one worker owns; a `DistributedOptimizer` has one on each owner."""

    def __init__(
        self, cls: Any, groups: Sequence[Mapping[str, Any]], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        local = [{**group, "params": [rref.local_value() for rref in group["params"]]} for group in groups]
        plain = len(local) == 1 and set(local[0]) == {"params"}
        self.parameters: list[torch.Tensor] = [parameter for group in local for parameter in group["params"]]
        self.optimizer: torch.optim.Optimizer = cls(local[0]["params"] if plain else local, *args, **kwargs)
        refuse_closure(type(self.optimizer))  # a function that makes an optimizer shows its class only now

    def step(self, context_id: int) -> None:
        """Update the parameters with the gradients of a context; parameters without a gradient there stay as they are.

        Waits until no pass and no other optimizer's step is using the ``.grad`` of these parameters. Raises UsageError
        if this worker does not have the context.
        """
        gradients = recorder().contexts.get(context_id).gradients_of(self.parameters)
        start = time.monotonic()
        span = spans.begin(spans.device_of(self.parameters)) if trace.listeners else None
        with lent(gradients):  # the optimizer finds them in ``.grad``, for the time of the step only
            self.optimizer.step()
        if trace.listeners:
            name, agent = type(self.optimizer).__name__, api.current_agent().me.name
            gpu = span.end() if span is not None else None
            trace.emit("optimizer.stepped", agent=agent, start=start, gpu=gpu, optimizer=name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict() of the local optimizer, with all tensors on the CPU, ready to be sent."""
        return {name: on_cpu(part) for name, part in self.optimizer.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned; torch moves its tensors to the devices of the parameters."""
        self.optimizer.load_state_dict(state)


def new_local_optimizer(
    cls: Any, groups: Sequence[Mapping[str, Any]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[RRef[LocalOptimizer], list[tuple[str | None, list[int]]]]:
    """Make a `LocalOptimizer` on the worker that runs this; return a reference to it, and what its parameters are.

    That is the full name in the model (None if unknown here) and the shape of each parameter, in their order.
    """
    optimizer = LocalOptimizer(cls, groups, args, kwargs)
    return RRef(optimizer), [(name_of(parameter), list(parameter.shape)) for parameter in optimizer.parameters]


def refuse_closure(cls: type) -> None:
    """Raise a UsageError if the ``step`` of an optimizer class needs a closure, as LBFGS does."""
    # It would evaluate the loss several times in a step, each time with other parameters. A context has the gradients
    # of one evaluation, and each worker would search by itself.
    try:
        closure = inspect.signature(cls.step).parameters.get("closure")  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):  # no step to inspect: using the class fails with a better message
        return
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{cls.__name__} computes the loss several times in a step, by a closure, but a context has the gradients "
            "of one computation: a DistributedOptimizer cannot use it. Use an optimizer whose step() needs no closure, "
            "such as torch.optim.SGD or torch.optim.Adam"
        )


def on_cpu(value: Any) -> Any:
    """Return a state with all its tensors on the CPU, ready to be sent; tensors in dicts, lists and tuples too."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {name: on_cpu(part) for name, part in value.items()}
    if type(value) in (list, tuple):  # not a subclass: a named tuple takes its fields one by one
        return type(value)(map(on_cpu, value))
    return value


def call_local(rref: RRef[Any], method: str, *args: Any) -> Any:
    """Call a method of a local object of a `Distributed`, to which ``rref`` refers; runs on the owner."""
    return getattr(rref.local_value(), method)(*args)


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
