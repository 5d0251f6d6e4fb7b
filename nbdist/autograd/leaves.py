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
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from nbdist.autograd import ddp
from nbdist.autograd.edges import Node
from nbdist.rpc.futures import blocking_wait

__all__ = ["Claim", "Gradients", "claimed", "current_claim", "lent"]

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
        for leaf, gradient in list(other._sums.values()):  # a pass may be adding to them
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


class Claim:
    """The leaves of one call of the engine; where it goes ``into`` nothing, it accumulates in ``.grad`` as ever."""

    def __init__(self, nodes: Iterable[Node], into: Gradients | None) -> None:
        self._into = into
        self._leaves = {id(leaf): leaf for leaf in (node.variable for node in nodes)}
        self._adopted: list[tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = []
        self._held = set(self._leaves)
        _take(self._held)
        self._before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        if into is not None:
            self._before = [(leaf, leaf.grad) for leaf in self._leaves.values()]
            for leaf in self._leaves.values():
                leaf.grad = None

    def adopt(self, nodes: Iterable[Node]) -> set[Node]:
        """Claim leaves that a node reaches by a call of its own; those that another call has are returned.

        It does not wait for them: that call may come to wait for ours. Most of these leaves live no longer than
        the node's own call, and nobody will ask for their gradients: they are not kept.
        """
        taken: set[Node] = set()
        for node in nodes:
            leaf = node.variable
            if id(leaf) in self._held:
                continue
            with _condition:
                if id(leaf) in _claimed:
                    taken.add(node)
                    continue
                _claimed.add(id(leaf))
            self._held.add(id(leaf))
            if self._into is not None:
                self._adopted.append((weakref.ref(leaf), leaf.grad))
                leaf.grad = None
        return taken

    def add(self, leaf: torch.Tensor, gradient: torch.Tensor, *, elsewhere: bool) -> None:
        """A gradient that was not accumulated: into the pass if another call has the leaf, else to the leaf."""
        with torch.no_grad():
            if elsewhere and self._into is not None:
                self._into.add(leaf, gradient.clone())
            else:
                leaf.grad = gradient.clone() if leaf.grad is None else leaf.grad + gradient

    def release(self) -> None:
        """What is there now is the pass's, and what was there before comes back."""
        try:
            alive = [(leaf, before) for reference, before in self._adopted if (leaf := reference()) is not None]
            for leaf, before in (*self._before, *alive):
                new = leaf.grad
                leaf.grad = before
                if new is not None and self._into is not None:
                    shared = ddp.exist() and ddp.shares_buckets(id(leaf))
                    self._into.add(leaf, new.clone() if shared else new)
        finally:
            _give_back(self._held)


_KEY = "nbdist.autograd.claim"


def current_claim() -> Claim:
    """That of the engine's call in which the calling thread is."""
    claim: Claim = torch._C._get_obj_in_tls(_KEY)
    return claim


@contextmanager
def claimed(nodes: Iterable[Node], into: Gradients | None) -> Iterator[None]:
    """Set aside the ``.grad`` of the leaves of ``nodes``; at the end of the block what is there goes ``into``.

    Into None, nothing is set aside: the leaves are claimed, and accumulate in ``.grad``.
    """
    claim = Claim(nodes, into)
    outer = torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None
    torch._C._stash_obj_in_tls(_KEY, claim)
    try:
        yield
    finally:
        torch._C._remove_obj_from_tls(_KEY)
        if outer is not None:
            torch._C._stash_obj_in_tls(_KEY, outer)
        claim.release()


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
