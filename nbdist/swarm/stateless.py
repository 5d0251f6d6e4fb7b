"""Through blocks without a cache, as for training: forward, and backward by whoever has the blocks then.

What goes into each span is kept, what is between is computed again. Texts go in parts, if that is wanted, each its own
way, and all at the same time, so that no server waits for the one before it.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nbdist.rpc.futures import blocking_wait
from nbdist.swarm import stacking
from nbdist.swarm.crew import Gone
from nbdist.swarm.routing import NoRoute
from nbdist.swarm.stacking import Item

if TYPE_CHECKING:
    from nbdist.swarm.swarm import Swarm

__all__ = ["forward", "through"]

_TRIES = 16
_AT_ONCE = 8


class _Entrance(NamedTuple):
    """What went into some blocks."""

    begin: int
    end: int
    item: Item


def through(
    swarm: Swarm, begin: int, hidden: torch.Tensor, calls: Sequence[Any], prompts: torch.Tensor | None
) -> torch.Tensor:
    """Through the blocks from there on; gradients come back, if any is wanted."""
    if prompts is not None:
        prompts = prompts[:, :, : hidden.shape[1]]  # a text may be shorter
    wanted = hidden.requires_grad or (prompts is not None and prompts.requires_grad)
    if torch.is_grad_enabled() and wanted:
        found: torch.Tensor = _Through.apply(hidden, prompts, swarm, begin, calls)  # type: ignore[no-untyped-call]
        return found
    return forward(swarm, begin, Item(hidden.detach(), tuple(calls), _detached(prompts), None, swarm.layout))[0]


def forward(swarm: Swarm, begin: int, item: Item) -> tuple[torch.Tensor, list[list[_Entrance]]]:
    """What comes out, and for each part of the texts what went into each span."""
    parts = stacking.parts(item, swarm.micro_batch)
    found = _each(swarm, [(_one, (swarm, begin, part)) for part in parts])
    return torch.cat([result for result, _ in found]), [way for _, way in found]


def _one(swarm: Swarm, begin: int, item: Item) -> tuple[torch.Tensor, list[_Entrance]]:
    """From there on by others, where somebody is gone."""
    found: list[_Entrance] = []
    hidden, at, end = item.hidden, begin, begin + len(item.calls)
    tries = 0
    while at < end:
        try:
            for span, member in swarm.crew.way(at, end, spread=True):
                own = _of_blocks(item, hidden, begin, span.begin, span.end)
                size = hidden.shape[0] * hidden.shape[1]
                blocks = span.end - span.begin
                hidden_after = swarm.crew.compute(
                    member, "forward", size, blocks, span.begin, own.hidden, own.calls, own.prompts, own.layout
                )
                found.append(_Entrance(span.begin, span.end, own))
                hidden, at = hidden_after, span.end
        except Gone as gone:
            tries = _count(tries, gone)
    return hidden, found


def _count(tries: int, gone: Gone) -> int:
    if tries >= _TRIES:
        raise NoRoute(f"{tries} servers failed one after the other, the last: {gone}") from gone
    return tries + 1


def _of_blocks(item: Item, hidden: torch.Tensor, first: int, begin: int, end: int) -> Item:
    span = slice(begin - first, end - first)
    prompts = item.prompts[span] if item.prompts is not None else None
    return Item(hidden, item.calls[span], prompts, None, item.layout)


class _Through(torch.autograd.Function):
    """Some blocks as one function."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, prompts: torch.Tensor | None, swarm: Swarm, begin: int, calls: Sequence[Any]
    ) -> torch.Tensor:
        item = Item(hidden.detach(), tuple(calls), _detached(prompts), None, swarm.layout)
        found, ctx.ways = forward(swarm, begin, item)
        ctx.swarm, ctx.begin = swarm, begin
        ctx.shape = prompts.shape if prompts is not None else None
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        sizes = [way[0].item.hidden.shape[0] for way in ctx.ways]
        given = gradient.split(sizes)
        found = _each(ctx.swarm, [(_back, (ctx.swarm, way, part)) for way, part in zip(ctx.ways, given, strict=True)])
        prompts = None
        if ctx.shape is not None:
            parts = [torch.cat(part) for _, part in found]  # in the order of the texts
            prompts = torch.cat(parts, 1) if ctx.shape[1] > 1 else sum(parts[1:], parts[0])
        return torch.cat([part for part, _ in found]), prompts, None, None, None


def _back(swarm: Swarm, way: list[_Entrance], gradient: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Back through all spans: the gradients of what went in, and of the prompts of each, from the first block on."""
    prompts: list[torch.Tensor] = []
    for entrance in reversed(way):
        gradient, own = _back_through(swarm, entrance, gradient)
        prompts[:0] = own
    return gradient, prompts


def _back_through(swarm: Swarm, entrance: _Entrance, gradient: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Back through some blocks, by whoever has them now."""
    begin, end, item = entrance
    tries = 0
    while True:
        try:
            way = []
            hidden = item.hidden
            size = hidden.shape[0] * hidden.shape[1]
            for span, member in swarm.crew.way(begin, end, spread=True):
                own = _of_blocks(item, hidden, begin, span.begin, span.end)
                way.append((span, member, own))
                if span.end < end:
                    blocks = span.end - span.begin
                    hidden = swarm.crew.compute(
                        member, "forward", size, blocks, span.begin, own.hidden, own.calls, own.prompts, own.layout
                    )
            found = gradient
            prompts: list[torch.Tensor] = []
            for span, member, own in reversed(way):
                blocks = span.end - span.begin
                found, prompt = swarm.crew.compute(
                    member, "backward", size, blocks, span.begin, own.hidden, own.calls, found, own.prompts, own.layout
                )
                if prompt is not None:
                    prompts.insert(0, prompt)
        except Gone as gone:
            tries = _count(tries, gone)
        else:
            return found, prompts


def _each(swarm: Swarm, jobs: Sequence[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
    """Do all of them, several at a time; their results in order."""

    def run(job: tuple[Any, tuple[Any, ...]]) -> Any:
        with swarm.crew.working(), torch.no_grad():
            return job[0](*job[1])

    if len(jobs) == 1:
        return [run(jobs[0])]
    pool = concurrent.futures.ThreadPoolExecutor(min(_AT_ONCE, len(jobs)), "micro-batch")
    try:
        with blocking_wait():
            context = [contextvars.copy_context() for _ in jobs]
            asked = [pool.submit(each.run, run, job) for each, job in zip(context, jobs, strict=True)]
            return [each.result() for each in asked]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after an error, or an interrupt, nobody wants the others


def _detached(prompts: torch.Tensor | None) -> torch.Tensor | None:
    return prompts.detach() if prompts is not None else None
