"""A transformers model whose blocks are elsewhere: its own code runs here, but for what is in the layers.

Each layer is replaced by one that notes how it is called, and hands on what it was given; the last one sends all of
that on its way, and hands on what comes back.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbdist.errors import UsageError
from nbdist.swarm import adapter
from nbdist.swarm.adapter import LayerCall
from nbdist.swarm.session import Gone

if TYPE_CHECKING:
    from nbdist.swarm.session import Session
    from nbdist.swarm.swarm import Swarm

__all__ = ["remote_model"]


class _Probe(BaseException):
    """Ends a call of a model when it has come to its first layer; what that was given."""


class _Notes(threading.local):
    calls: list[LayerCall] = []  # noqa: RUF012 - never changed, only replaced


class _Passage:
    """What the stand-ins of one model have in common."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.notes = _Notes()
        self.in_tuple: bool | None = None

    def take(self, hidden: torch.Tensor, calls: list[LayerCall], cache: Any) -> torch.Tensor:
        """Through all blocks."""
        wants_gradient = torch.is_grad_enabled() and hidden.requires_grad
        if cache is not None:
            session: Session = cache.nbdist[1]
            if not wants_gradient:
                return session.step(hidden.detach(), calls)
            if session.tokens:
                raise UsageError("no gradient comes back through a cache: call the model with use_cache=False")
            session.refuse("this cache is of a call that gradients come back from, and has nothing in it")
        if wants_gradient:
            found: torch.Tensor = _Through.apply(hidden, self.swarm, calls)  # type: ignore[no-untyped-call]
            return found
        return _forward(self.swarm, hidden, calls)[-1][1]


class _StandIn(nn.Module):
    """A layer that is elsewhere."""

    def __init__(self, passage: _Passage, number: int, count: int) -> None:
        super().__init__()
        self._passage = passage
        self._number = number
        self._count = count

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        passage = self._passage
        cache = adapter.find_cache([*args, *kwargs.values()])
        told = adapter.strip(args, kwargs, cache)
        if passage.in_tuple is None:
            raise _Probe(hidden, told)
        if not self._number:
            passage.notes.calls = []
            if cache is not None and not hasattr(cache, "nbdist"):
                passage.swarm.session(cache)
        passage.notes.calls.append(told)
        if cache is not None:
            cache.nbdist[0].grow(self._number, hidden.shape[0], hidden.shape[1])
        if self._number == self._count - 1:
            calls, passage.notes.calls = passage.notes.calls, []
            hidden = passage.take(hidden, calls, cache)
        return (hidden,) if passage.in_tuple else hidden


def _forward(swarm: Swarm, hidden: torch.Tensor, calls: list[LayerCall]) -> list[tuple[Any, torch.Tensor]]:
    """Through all blocks without a session; for each span what went in, and behind the last what came out."""
    found: list[tuple[Any, torch.Tensor]] = []
    at = 0
    while at < len(calls):
        with contextlib.suppress(Gone):  # from there on, by others
            for span, server in swarm.servers(at, len(calls)):
                after = swarm.ask(server, "forward", span.begin, hidden.detach(), calls[span.begin : span.end])
                found.append(((span.begin, span.end), hidden))
                hidden, at = after, span.end
    return [*found, (None, hidden)]


class _Through(torch.autograd.Function):
    """All blocks as one function: what goes into each span is kept, what is between is computed again."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, swarm: Swarm, calls: list[LayerCall]) -> torch.Tensor:
        way = _forward(swarm, hidden, calls)
        ctx.swarm, ctx.calls, ctx.way = swarm, calls, [(span, given.detach()) for span, given in way[:-1]]
        return way[-1][1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        for (begin, end), given in reversed(ctx.way):
            gradient = _backward(ctx.swarm, begin, given, ctx.calls[begin:end], gradient)
        return gradient, None, None


def _backward(
    swarm: Swarm, begin: int, given: torch.Tensor, calls: list[LayerCall], gradient: torch.Tensor
) -> torch.Tensor:
    """Back through some blocks, by whoever has them now."""
    while True:
        with contextlib.suppress(Gone):
            way = []
            hidden = given
            for span, server in swarm.servers(begin, begin + len(calls)):
                own = calls[span.begin - begin : span.end - begin]
                way.append((span, server, own, hidden))
                if span.end < begin + len(calls):
                    hidden = swarm.ask(server, "forward", span.begin, hidden.detach(), own)
            found = gradient
            for span, server, own, entrance in reversed(way):
                found = swarm.ask(server, "backward", span.begin, entrance.detach(), own, found)
            return found


def remote_model(swarm: Swarm) -> Any:
    """A model of a swarm."""
    model = adapter.build(swarm.checkpoint.config)
    parent, _, name = swarm.path.rpartition(".")
    passage = _Passage(swarm)
    count = len(swarm)
    setattr(
        model.get_submodule(parent), name, nn.ModuleList(_StandIn(passage, number, count) for number in range(count))
    )
    swarm.checkpoint.fill(model)
    model.tie_weights()
    if (generation := swarm.checkpoint.generation) is not None:
        model.generation_config = generation
    try:
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    except _Probe as probe:
        hidden, told = probe.args
        while passage.in_tuple is None:
            with contextlib.suppress(Gone):
                ((_, server),) = swarm.servers(0, 1)
                passage.in_tuple = swarm.ask(server, "returns_tuple", 0, hidden, told)
    return model
