"""Calls blocks without a cache, as training does. Each call uses the servers that have the blocks at that moment.

The client keeps the input of each span. In the backward pass, a server computes the span again from this input. Each
micro-batch takes its own random route, and all run at the same time, so that no server waits for the previous one::

    micro-batch 0   ─► worker0 ─► worker2 ─►┐
    micro-batch 1   ─► worker1 ─► worker2 ─►├─ results, concatenated; and the inputs of all spans (`_Entrance`)
    micro-batch 2   ─► worker0 ─► worker1 ─►┘
"""

from __future__ import annotations

import concurrent.futures
import contextvars
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from nbdist.rpc.waits import blocking_wait
from nbdist.swarm import stacking
from nbdist.swarm.client.crew import Crew, Gone
from nbdist.swarm.directory.routing import NoRoute
from nbdist.swarm.stacking import StackInput

_TRIES = 16  # servers that may fail one after the other in a micro-batch before the call fails with `NoRoute`
_MAX_THREADS = 8  # micro-batches that are computed at the same time


class _Entrance(NamedTuple):
    """The input of one span of blocks, which the backward pass needs."""

    begin: int
    end: int
    item: StackInput


def through(
    crew: Crew, begin: int, hidden: torch.Tensor, calls: Sequence[Any], prompts: torch.Tensor | None
) -> torch.Tensor:
    """Take hidden states through the blocks from ``begin`` on, one for each of ``calls``; return the hidden states.

    If gradients are enabled and ``hidden`` or ``prompts`` requires them, the result requires them, too. Servers
    that are lost are replaced. Raises `NoRoute` if no server can serve a block, or too many servers failed.
    """
    if prompts is not None:
        prompts = prompts[:, :, : hidden.shape[1]]  # the sequences may be shorter than the prompts
    wanted = hidden.requires_grad or (prompts is not None and prompts.requires_grad)
    own = prompts.detach() if prompts is not None else None
    item = StackInput(hidden.detach(), tuple(calls), own, None, crew.layout)
    if torch.is_grad_enabled() and wanted:
        found: torch.Tensor = _Through.apply(hidden, prompts, crew, begin, item)  # type: ignore[no-untyped-call]
        return found
    return forward(crew, begin, item)[0]


def forward(crew: Crew, begin: int, item: StackInput) -> tuple[torch.Tensor, list[list[_Entrance]]]:
    """Take an item, the input of the blocks from ``begin`` on, through them in micro-batches (`Policy.micro_batch`).

    Returns the hidden states behind the blocks, and, for the backward pass, the entrances of each micro-batch.
    """
    parts = stacking.parts(item, crew.policy.micro_batch)
    found = _run_each(crew, [(_one_micro_batch, (crew, begin, part)) for part in parts])
    return torch.cat([result for result, _ in found]), [way for _, way in found]


def _one_micro_batch(crew: Crew, begin: int, item: StackInput) -> tuple[torch.Tensor, list[_Entrance]]:
    """Take one micro-batch through its blocks; return the hidden states and the input of each span."""
    found: list[_Entrance] = []
    hidden, at, end = item.hidden, begin, begin + len(item.calls)
    tries = 0
    while at < end:
        try:
            for span, member in crew.way(at, end, spread=True):
                own = span.part_of(item, begin, hidden)
                hidden = crew.compute(member, span.begin, own)
                found.append(_Entrance(span.begin, span.end, own))
                at = span.end  # a new route begins here, after the spans that are done
        except Gone as gone:
            tries = _count_try(tries, gone)
    return hidden, found


def _count_try(tries: int, gone: Gone) -> int:
    tries += 1
    if tries > _TRIES:
        raise NoRoute(
            f"{tries} servers failed one after the other, the last: {gone}. Swarm.log says why. Let other workers "
            "join, then call again."
        ) from gone
    return tries


class _Through(torch.autograd.Function):
    """The autograd function for a row of blocks; its inputs are ``hidden`` and ``prompts``."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, prompts: torch.Tensor | None, crew: Crew, begin: int, item: StackInput
    ) -> torch.Tensor:
        found, ctx.ways = forward(crew, begin, item)
        ctx.crew, ctx.begin = crew, begin
        ctx.shape = prompts.shape if prompts is not None else None
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        sizes = [way[0].item.hidden.shape[0] for way in ctx.ways]
        given = gradient.split(sizes)
        found = _run_each(
            ctx.crew, [(_backpropagate, (ctx.crew, way, part)) for way, part in zip(ctx.ways, given, strict=True)]
        )
        prompts = None
        if ctx.shape is not None:
            parts = [torch.cat(part) for _, part in found]  # one for each micro-batch
            # Prompts that all sequences share get the sum of the micro-batches' gradients.
            prompts = torch.cat(parts, 1) if ctx.shape[1] > 1 else sum(parts[1:], parts[0])
        return torch.cat([part for part, _ in found]), prompts, None, None, None


def _backpropagate(crew: Crew, way: list[_Entrance], gradient: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Backpropagate one micro-batch; return the gradients of its input, and of the prompts of each span in ``way``."""
    prompts: list[torch.Tensor] = []
    for entrance in reversed(way):
        gradient, own = _back_through(crew, entrance, gradient)
        prompts[:0] = own
    return gradient, prompts


def _back_through(crew: Crew, entrance: _Entrance, gradient: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Backpropagate through one span of the forward pass, on the servers that have its blocks now."""
    begin, end, item = entrance
    tries = 0
    while True:
        try:
            way = []
            hidden = item.hidden
            for span, member in crew.way(begin, end, spread=True):
                own = span.part_of(item, begin, hidden)
                way.append((span, member, own))
                # Several servers may have the blocks of the span now: they need inputs that no forward pass has kept.
                if span.end < end:
                    hidden = crew.compute(member, span.begin, own)
            found = gradient
            prompts: list[torch.Tensor] = []
            for span, member, own in reversed(way):
                found, prompt = crew.compute(member, span.begin, own._replace(gradient=found))
                if prompt is not None:
                    prompts.insert(0, prompt)  # in forward order
        except Gone as gone:
            tries = _count_try(tries, gone)
        else:
            return found, prompts


def _run_each(crew: Crew, jobs: Sequence[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
    """Run all (function, arguments), up to 8 at a time; return the results, or raise the first error in order."""

    def run(job: tuple[Any, tuple[Any, ...]]) -> Any:
        with crew.working(), torch.no_grad():
            return job[0](*job[1])

    if len(jobs) == 1:
        return [run(jobs[0])]
    # Each job runs in a copy of the calling thread's context variables.
    pool = concurrent.futures.ThreadPoolExecutor(min(_MAX_THREADS, len(jobs)), "micro-batch")
    try:
        with blocking_wait():
            context = [contextvars.copy_context() for _ in jobs]
            # All are submitted before the first is awaited. `result` raises the first error in order, whatever fails
            # first.
            asked = [pool.submit(each.run, run, job) for each, job in zip(context, jobs, strict=True)]
            return [each.result() for each in asked]
    finally:
        # After an error or an interrupt, the other results are not wanted.
        pool.shutdown(wait=False, cancel_futures=True)
