"""Keeps the gradients of a pass out of ``.grad``, while torch's engine puts them there.

The nodes that stand for leaves really run, so that all that hangs on them runs as in a local pass: hooks on the
tensor, on the node, after accumulation, those of other libraries' C++. For the time of one engine call the
``.grad`` of the leaves that it can reach is set aside, and what is found there afterwards is the pass's.

So two calls at a time must not reach the same leaf. A call *claims* all of its leaves at once before it begins,
and none while it waits: no two calls can wait for each other. A claim lasts as long as the engine computes, never
while a gradient from another worker is awaited.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from nbdist.autograd.edges import Node
from nbdist.rpc.futures import blocking_wait

__all__ = ["Gradients", "claimed", "lent"]

_condition = threading.Condition(threading.Lock())
_claimed: set[int] = set()


class Gradients:
    """The gradients of leaves, summed over the calls of a pass or the passes of a context."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """One more contribution; ``gradient`` must be nobody else's."""
        known = self._sums.get(id(leaf))
        with torch.no_grad():
            self._sums[id(leaf)] = (leaf, gradient if known is None else known[1] + gradient)

    def update(self, other: Gradients) -> None:
        """Add all of another's sums."""
        for leaf, gradient in other._sums.values():
            self.add(leaf, gradient)

    def scale(self, leaves: Iterable[torch.Tensor], factor: float) -> None:
        """Multiply the gradients of some leaves."""
        for leaf in leaves:
            known = self._sums.get(id(leaf))
            if known is not None:
                self._sums[id(leaf)] = (leaf, known[1] * factor)

    def items(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each leaf with its gradient."""
        return list(self._sums.values())

    def __len__(self) -> int:
        return len(self._sums)


def _take(wanted: set[int]) -> None:
    with _condition:
        if not wanted & _claimed:
            _claimed.update(wanted)
            return
    with blocking_wait(), _condition:
        while wanted & _claimed:
            _condition.wait()
        _claimed.update(wanted)


def _give_back(held: set[int]) -> None:
    with _condition:
        _claimed.difference_update(held)
        _condition.notify_all()


@contextmanager
def claimed(nodes: Iterable[Node], into: Gradients) -> Iterator[None]:
    """Set aside the ``.grad`` of the leaves of ``nodes``; at the end of the block what is there goes ``into``."""
    leaves = {id(leaf): leaf for leaf in (node.variable for node in nodes)}
    held = set(leaves)
    _take(held)
    try:
        before = []
        for leaf in leaves.values():
            before.append(leaf.grad)
            leaf.grad = None
        try:
            yield
        finally:
            for leaf, gradient in zip(leaves.values(), before, strict=True):
                new = leaf.grad
                leaf.grad = gradient
                if new is not None:
                    into.add(leaf, new)
    finally:
        _give_back(held)


@contextmanager
def lent(gradients: Mapping[torch.Tensor, torch.Tensor | None]) -> Iterator[None]:
    """Give leaves these gradients as their ``.grad`` for the time of the block."""
    held = {id(leaf) for leaf in gradients}
    _take(held)
    try:
        before = [leaf.grad for leaf in gradients]
        try:
            for leaf, gradient in gradients.items():
                leaf.grad = gradient
            yield
        finally:
            for leaf, old in zip(gradients, before, strict=True):
                leaf.grad = old
    finally:
        _give_back(held)
