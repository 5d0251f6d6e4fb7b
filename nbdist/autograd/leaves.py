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

import msgspec
import torch

from nbdist.autograd import ddp
from nbdist.autograd.edges import Node
from nbdist.errors import UsageError
from nbdist.rpc.futures import blocking_wait
from nbdist.torch_private import keep_in_thread, take_from_thread, thread_has, thread_value

__all__ = ["Claim", "Gradients", "current_claim", "halted", "halted_leaves", "lent"]

_lock = threading.Lock()
"""Held while leaves change hands. It is taken by itself, because a Condition's own ``with`` is a Python function."""
_condition = threading.Condition(_lock)
_waiting: list[_Holder] = []
"""The holders that wait for leaves which other holders have claimed."""
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
        with self._lock:
            if not self._sums:
                self._sums.update(other._sums)
                return
        for leaf, gradient in list(other._sums.values()):  # a pass may be adding to them
            self.add(leaf, gradient)

    def of(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """Return the sum of one leaf, or None."""
        known = self._sums.get(id(leaf))
        return known[1] if known is not None else None

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


class _Use(msgspec.Struct, eq=False):
    """A leaf that is claimed; by several calls at a time if they are of one ``group``."""

    key: int
    group: object | None
    holders: list[_Holder]
    known: weakref.ref[torch.Tensor] | None = None
    """The leaf, if it is not kept while it is claimed."""
    leaf: torch.Tensor | None = None
    """The leaf, if ``before``, its ``.grad``, is set aside."""
    before: torch.Tensor | None = None


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
        with _lock:
            if _claimed.keys().isdisjoint(wanted.keys()) or not self._taken(wanted):
                self._take(wanted, aside)
                return
        with blocking_wait(), _lock:
            _waiting.append(self)
            try:
                self._await(wanted)
            finally:
                _waiting.remove(self)
            self._take(wanted, aside)

    def _await(self, wanted: Mapping[int, torch.Tensor]) -> None:
        """With the lock held: wait until nobody else has one of these leaves."""
        while taken := self._taken(wanted):
            if any(holder._thread == self._thread for use in taken for holder in use.holders):
                raise UsageError(
                    "a hook or node of a backward pass began another pass, or an optimizer's step, on leaves that "
                    "the first has in hand: do it when backward() has returned"
                )
            _condition.wait()

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
            use = _use_of(key, leaf) if key in _claimed else None
            if use is not None:
                use.holders.append(self)
                continue
            use = _claimed[key] = _Use(key, self._group, [self])
            if aside:
                use.leaf, use.before = leaf, leaf.grad
                leaf.grad = None

    def leave(self) -> list[_Use]:
        """What nobody else has of what we have claimed; it can be claimed again when it has been given back."""
        with _lock:
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
        with _lock:
            while self._left:
                use = self._left.pop()
                if _claimed.get(use.key) is use:  # else its leaf has died, and another one lies in its place
                    del _claimed[use.key]
            if _waiting:
                _condition.notify_all()


class Claim:
    """Sets aside the ``.grad`` of the leaves of one call of the engine, for the time of a ``with`` block.

    At the end of the block what is there goes ``into`` the gradients given. Into None, nothing is set aside: the leaves
    are claimed, and accumulate in ``.grad``. Blocks of one ``group`` may have the same leaves at the same time.
    """

    def __init__(self, nodes: Iterable[Node], into: Gradients | None, group: object) -> None:
        self._into = into
        self._leaves: dict[int, torch.Tensor] = {}
        for node in nodes:
            leaf = node.variable
            self._leaves[id(leaf)] = leaf
        self._adopted: list[tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = []
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._outer: Claim | None = None
        self.holder = _Holder(group)

    def __enter__(self) -> None:
        self._outer = thread_value(_KEY) if thread_has(_KEY) else None
        try:
            if self._leaves:
                self.holder.take(self._leaves, aside=self._into is not None)
            keep_in_thread(_KEY, self)
        except BaseException as error:
            self.__exit__(type(error))
            raise

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if thread_has(_KEY):
            take_from_thread(_KEY)
        if self._outer is not None:
            keep_in_thread(_KEY, self._outer)
        if self.holder.held:
            self.release()
        if self._late and kind is None:
            self.accumulate_late()

    def adopt(self, nodes: Iterable[Node]) -> set[Node]:
        """Claim leaves that a node reaches by a call of its own; those that another call has are returned.

        It does not wait for them: that call may come to wait for ours. Most of these leaves live no longer than
        the node's own call, and nobody will ask for their gradients: they are not kept.
        """
        taken: set[Node] = set()
        for node in nodes:
            leaf = node.variable
            with _lock:
                use = _use_of(id(leaf), leaf)
                if use is not None:
                    if self.holder not in use.holders:
                        taken.add(node)
                    continue
                self.holder.held.add(id(leaf))
                _claimed[id(leaf)] = _Use(id(leaf), None, [self.holder], weakref.ref(leaf))
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
            aside = [(use.leaf, use.before) for use in self.holder.leave() if use.leaf is not None]
            if self._adopted:
                aside += [(leaf, before) for reference, before in self._adopted if (leaf := reference()) is not None]
            shared = ddp.in_buckets() if ddp.living else set[int]()
            for leaf, before in aside:
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
    with _lock:
        _halted.add(holder)
    try:
        yield
    finally:
        with _lock:
            _halted.discard(holder)


def halted_leaves() -> set[int]:
    """The leaves, by id, whose ``.grad`` is set aside by calls that stand still."""
    if not _halted:  # as nearly always; every local pass asks
        return set()
    with _lock:
        return set[int]().union(*(holder.held for holder in _halted))


class lent:
    """Give leaves these gradients as their ``.grad`` for the time of a ``with`` block."""

    def __init__(self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        self._gradients = list(gradients)
        self._before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._holder = _Holder()

    def __enter__(self) -> None:
        try:
            wanted: dict[int, torch.Tensor] = {}
            for leaf, _ in self._gradients:
                wanted[id(leaf)] = leaf
            self._holder.take(wanted)
            for leaf, gradient in self._gradients:
                self._before.append((leaf, leaf.grad))
                leaf.grad = gradient
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            for leaf, old in self._before:
                leaf.grad = old
        finally:
            self._holder.give_back()
