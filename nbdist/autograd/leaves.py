"""Keeps the gradients of a pass out of ``.grad``, while torch's engine puts them there.

The nodes that stand for leaves really run, so that all that hangs on them runs as in a local pass: hooks on the
tensor, on the node, after accumulation, those of other libraries' C++. For the time of one engine call the
``.grad`` of the leaves that it can reach is set aside, and what is found there afterwards is the pass's.

So calls of two passes at a time must not reach the same leaf; those of one pass may, and what is there when the last
of them is over is their sum. A call *claims* all of its leaves at once before it begins, and none while it waits: no
two calls can wait for each other. A claim lasts as long as the engine computes, never while a gradient from another
worker is awaited; and longer only where somebody has paused the pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from nbdist.autograd import ddp
from nbdist.autograd.edges import Node
from nbdist.errors import UsageError
from nbdist.rpc.futures import blocking_wait
from nbdist.torch_private import keep_in_thread, take_from_thread, thread_has, thread_value

__all__ = ["Claim", "Gradients", "claimed", "current_claim", "halted", "halted_leaves", "lent"]

_condition = threading.Condition(threading.Lock())
_claimed: dict[int, _Use] = {}
_halted: set[_Holder] = set()


class Gradients:
    """The gradients of leaves, summed over the calls of a pass or the passes of a context."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def add(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """One more contribution; ``gradient`` must be nobody else's."""
        with self._lock:
            known = self._sums.get(id(leaf))
            if known is not None:
                with torch.no_grad():
                    gradient = known[1] + gradient
            self._sums[id(leaf)] = (leaf, gradient)

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


class _Use:
    """A leaf that is claimed; by several calls at a time if they are of one ``group``."""

    __slots__ = ("before", "group", "holders", "key", "known", "leaf")

    def __init__(
        self, key: int, holder: _Holder, group: object | None, known: weakref.ref[torch.Tensor] | None = None
    ) -> None:
        self.key = key
        self.group = group
        self.holders = [holder]
        self.known = known
        """The leaf, if it is not kept while it is claimed."""
        self.leaf: torch.Tensor | None = None
        """The leaf, if ``before``, its ``.grad``, is set aside."""
        self.before: torch.Tensor | None = None


def _use_of(key: int, leaf: torch.Tensor) -> _Use | None:
    """Who has this leaf; with the lock held. One that was not kept may have died, and this one lie in its place."""
    use = _claimed.get(key)
    if use is not None and use.known is not None and use.known() is not leaf:
        del _claimed[key]
        return None
    return use


class _Holder:
    """Who has claimed leaves; by one of these it is known who may give them back."""

    def __init__(self, group: object | None = None) -> None:
        self.held: set[int] = set()
        self._group = group
        self._left: list[_Use] = []
        self._thread = threading.get_ident()

    def take(self, wanted: Mapping[int, torch.Tensor], *, aside: bool = False) -> None:
        """Claim leaves by their ids, all at once, as soon as nobody else has one of them; and set ``.grad`` aside."""
        self.held |= wanted.keys()  # before: whatever interrupts us, `leave` finds what is ours
        with _condition:
            if not self._taken(wanted):
                self._take(wanted, aside)
                return
        with blocking_wait(), _condition:
            while taken := self._taken(wanted):
                if any(holder._thread == self._thread for use in taken for holder in use.holders):
                    raise UsageError(
                        "a hook or node of a backward pass began another pass, or an optimizer's step, on leaves that "
                        "the first has in hand: do it when backward() has returned"
                    )
                _condition.wait()
            self._take(wanted, aside)

    def _taken(self, wanted: Mapping[int, torch.Tensor]) -> list[_Use]:
        """What others have of them, or are giving back."""
        found = (_use_of(key, wanted[key]) for key in wanted.keys() & _claimed.keys())
        return [
            use
            for use in found
            if use is not None and (self._group is None or use.group is not self._group or not use.holders)
        ]

    def _take(self, wanted: Mapping[int, torch.Tensor], aside: bool) -> None:
        for key, leaf in wanted.items():
            use = _use_of(key, leaf)
            if use is not None:
                use.holders.append(self)
                continue
            use = _claimed[key] = _Use(key, self, self._group)
            if aside:
                use.leaf, use.before = leaf, leaf.grad
                leaf.grad = None

    def leave(self) -> list[_Use]:
        """What nobody else has of what we have claimed; it can be claimed again when it has been given back."""
        with _condition:
            for leaf in self.held:
                use = _claimed.get(leaf)
                if use is not None and self in use.holders:
                    use.holders.remove(self)
                    if not use.holders:
                        self._left.append(use)
            return self._left

    def give_back(self) -> None:
        """Let others have them."""
        self.leave()
        with _condition:
            while self._left:
                use = self._left.pop()
                if _claimed.get(use.key) is use:  # else its leaf has died, and another one lies in its place
                    del _claimed[use.key]
            _condition.notify_all()


class Claim:
    """The leaves of one call of the engine; where it goes ``into`` nothing, it accumulates in ``.grad`` as ever."""

    def __init__(self, nodes: Iterable[Node], into: Gradients | None, group: object) -> None:
        self._into = into
        self._leaves = {id(leaf): leaf for leaf in (node.variable for node in nodes)}
        self._adopted: list[tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = []
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.holder = _Holder(group)

    def take(self) -> None:
        """Have the leaves, and set their ``.grad`` aside."""
        self.holder.take(self._leaves, aside=self._into is not None)

    def adopt(self, nodes: Iterable[Node]) -> set[Node]:
        """Claim leaves that a node reaches by a call of its own; those that another call has are returned.

        It does not wait for them: that call may come to wait for ours. Most of these leaves live no longer than
        the node's own call, and nobody will ask for their gradients: they are not kept.
        """
        taken: set[Node] = set()
        for node in nodes:
            leaf = node.variable
            with _condition:
                use = _use_of(id(leaf), leaf)
                if use is not None:
                    if self.holder not in use.holders:
                        taken.add(node)
                    continue
                self.holder.held.add(id(leaf))
                _claimed[id(leaf)] = _Use(id(leaf), self.holder, None, weakref.ref(leaf))
            if self._into is not None:
                self._adopted.append((weakref.ref(leaf), leaf.grad))
                leaf.grad = None
        return taken

    def add(self, leaf: torch.Tensor, gradient: torch.Tensor, *, elsewhere: bool) -> None:
        """A gradient that was not accumulated, because another call has the leaf, or had others of that node."""
        if not elsewhere and id(leaf) not in self._leaves:  # nobody but we can have what is adopted
            with torch.no_grad():
                leaf.grad = gradient.clone() if leaf.grad is None else leaf.grad + gradient
        elif self._into is not None and not leaf._post_accumulate_grad_hooks:
            self._into.add(leaf, gradient.clone())
        else:
            self._late.append((leaf, gradient.clone()))

    def release(self) -> None:
        """What is there when nobody has it any more is the pass's, and what was there before comes back."""
        try:
            alive = [(leaf, before) for reference, before in self._adopted if (leaf := reference()) is not None]
            own = [(use.leaf, use.before) for use in self.holder.leave() if use.leaf is not None]
            shared = ddp.in_buckets() if ddp.exist() else set[int]()
            for leaf, before in (*own, *alive):
                new = leaf.grad
                leaf.grad = before
                if new is not None and self._into is not None:
                    self._into.add(leaf, new.clone() if id(leaf) in shared else new)
        finally:
            self.holder.give_back()

    def accumulate_late(self) -> None:
        """After the release, when nobody can wait for us: give leaves what they could not be given during the call."""
        for leaf, gradient in self._late:
            holder = _Holder()
            try:
                holder.take({id(leaf): leaf})
                _accumulate(leaf, gradient, self._into)
            finally:
                holder.give_back()


def _accumulate(leaf: torch.Tensor, gradient: torch.Tensor, into: Gradients | None) -> None:
    """As the node of a leaf does it, hooks on the gradient having run."""
    before = leaf.grad
    hooks: dict[int, Any] = leaf._post_accumulate_grad_hooks or {}
    try:
        leaf.grad = gradient if into is not None or before is None else before + gradient
        for hook in list(hooks.values()):
            hook(leaf)
        if into is not None and leaf.grad is not None:
            into.add(leaf, leaf.grad)
    finally:
        if into is not None:
            leaf.grad = before


_KEY = "nbdist.autograd.claim"


def current_claim() -> Claim:
    """That of the engine's call in which the calling thread is."""
    claim: Claim = thread_value(_KEY)
    return claim


@contextmanager
def halted() -> Iterator[None]:
    """The calling thread's call of the engine stands still, for the time of the block: somebody wants to look at it."""
    holder = current_claim().holder
    with _condition:
        _halted.add(holder)
    try:
        yield
    finally:
        with _condition:
            _halted.discard(holder)


def halted_leaves() -> set[int]:
    """The leaves, by id, whose ``.grad`` is set aside by calls that stand still."""
    if not _halted:  # as nearly always; every local pass asks
        return set()
    with _condition:
        return set[int]().union(*(holder.held for holder in _halted))


@contextmanager
def claimed(nodes: Iterable[Node], into: Gradients | None, group: object) -> Iterator[None]:
    """Set aside the ``.grad`` of the leaves of ``nodes``; at the end of the block what is there goes ``into``.

    Into None, nothing is set aside: the leaves are claimed, and accumulate in ``.grad``. Blocks of one ``group`` may
    have the same leaves at the same time.
    """
    claim = Claim(nodes, into, group)
    outer = thread_value(_KEY) if thread_has(_KEY) else None
    try:
        claim.take()
        keep_in_thread(_KEY, claim)
        yield
    finally:
        if thread_has(_KEY):
            take_from_thread(_KEY)
        if outer is not None:
            keep_in_thread(_KEY, outer)
        claim.release()
    claim.accumulate_late()


@contextmanager
def lent(gradients: Mapping[torch.Tensor, torch.Tensor | None]) -> Iterator[None]:
    """Give leaves these gradients as their ``.grad`` for the time of the block."""
    holder = _Holder()
    before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    try:
        holder.take({id(leaf): leaf for leaf in gradients})
        for leaf, gradient in gradients.items():
            before.append((leaf, leaf.grad))
            leaf.grad = gradient
        yield
    finally:
        try:
            for leaf, old in before:
                leaf.grad = old
        finally:
            holder.give_back()
