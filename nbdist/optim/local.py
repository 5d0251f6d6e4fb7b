"""Local optimizers, on the workers that own parameters."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nbdist import trace
from nbdist.autograd.api import recorder
from nbdist.autograd.passes.claims import lent
from nbdist.errors import UsageError
from nbdist.gpus import spans
from nbdist.optim.parameters import name_of
from nbdist.rpc import api
from nbdist.rpc.references.rref import RRef


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
