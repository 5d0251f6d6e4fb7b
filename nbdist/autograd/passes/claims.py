"""Keeps the gradients of a pass out of ``.grad``, although torch's engine puts them there.

The engine runs the nodes that accumulate into leaves, so that everything attached to a leaf runs as in a local pass:
hooks on the tensor, on the node and after accumulation, C++ hooks of other libraries included. One call of the engine::

    claim        .grad of every leaf that the call can reach is set aside and becomes None
    engine       accumulates into .grad
    release      the gradient in .grad goes to the pass's `GradientStore`, and the former .grad comes back

So calls of two passes must not reach the same leaf at the same time. Steps of one pass may: they claim as one group,
and when the last of them is over, ``.grad`` holds their sum. A call claims all of its leaves at once, and holds none
while it waits for others, so no two calls can wait for each other. A claim lasts while the engine computes, never while
the pass waits for another worker, and longer only where the user has paused the pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from nbdist.autograd.graph.edges import Node
from nbdist.autograd.passes import ddp
from nbdist.autograd.passes.gradient_store import GradientStore
from nbdist.errors import UsageError
from nbdist.gpus import side_streams
from nbdist.gpus.spans import CUDA_IS_BUILT
from nbdist.rpc.waits import blocking_wait
from nbdist.torch_private import keep_in_thread, take_from_thread, thread_has, thread_value

_lock = threading.Lock()  # held while claims change; and not the Condition, whose ``with`` is a slower Python function
_condition = threading.Condition(_lock)
_waiting: list[_Holder] = []  # for leaves which other holders have claimed
_claimed: dict[int, _Use] = {}  # the claimed leaves by id, in this process: agents that share it share its leaves
_halted: set[_Holder] = set()  # whose engine calls are halted by a watch


class _Use(msgspec.Struct, eq=False):
    """A claimed leaf, with its holders: several only if they are of one ``group``, the part of a pass."""

    key: int
    group: object | None
    holders: list[_Holder]
    known: weakref.ref[torch.Tensor] | None = None  # to the leaf, if it was adopted: it may die while it is claimed
    leaf: torch.Tensor | None = None  # if its ``.grad`` is set aside
    before: torch.Tensor | None = None  # the ``.grad`` that was set aside


def _use_of(key: int, leaf: torch.Tensor) -> _Use | None:
    """Return the record of who claims a leaf, whose id is ``key``; None if nobody does. Called with `_lock` held."""
    use = _claimed.get(key)
    # Of an earlier leaf, which has died and left its id to this one
    # (test_a_leaf_that_lies_where_another_one_has_died_is_not_taken_for_it).
    if use is not None and use.known is not None and use.known() is not leaf:
        del _claimed[key]
        return None
    return use


class _Holder:
    """Claims leaves, so that no other pass uses their ``.grad``, for one engine call or `lent` block, in one thread.

    Holders of one ``group``, which is the part of a pass, may claim the same leaves; without a group, no others may.
    The methods with an underscore are called with `_lock` held.
    """

    def __init__(self, group: object | None = None) -> None:
        self.held: set[int] = set()
        self._group = group
        self._left: list[_Use] = []
        self.thread = threading.get_ident()

    def take(self, wanted: Mapping[int, torch.Tensor], *, aside: bool = False) -> None:
        """Claim the leaves of ``wanted``, which has them by id, all at once; wait until no other group has one of them.

        With ``aside``, keep their ``.grad`` and set it to None, unless this group has claimed them already.
        """
        self.held |= wanted.keys()  # first: `leave` then finds these leaves even after Ctrl-C
        with _lock:
            if _claimed.keys().isdisjoint(wanted.keys()) or not self._uses_to_wait_for(wanted):
                self._claim(wanted, aside)
                return
        with blocking_wait(), _lock:
            _waiting.append(self)
            try:
                # UsageError if this thread itself holds one of the leaves for another group: it would wait for ever.
                self._await(wanted)
            finally:
                _waiting.remove(self)
            self._claim(wanted, aside)

    def _await(self, wanted: Mapping[int, torch.Tensor]) -> None:
        while taken := self._uses_to_wait_for(wanted):
            if any(holder.thread == self.thread for use in taken for holder in use.holders):
                raise UsageError(
                    "a hook or a Function's backward began another backward pass, or an optimizer's step, on leaves "
                    "that the first pass is computing gradients for: do that after backward() has returned"
                )
            _condition.wait()

    def _uses_to_wait_for(self, wanted: Mapping[int, torch.Tensor]) -> list[_Use]:
        found = (_use_of(key, wanted[key]) for key in wanted.keys() & _claimed.keys())
        return [
            use
            for use in found
            # Without holders, nobody claims the leaf any more, but its ``.grad`` is not put back yet.
            if use is not None and (self._group is None or use.group is not self._group or not use.holders)
        ]

    def _claim(self, wanted: Mapping[int, torch.Tensor], aside: bool) -> None:
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
        """Stop using the leaves; return the records of the leaves that no other holder uses."""
        with _lock:
            for leaf in self.held:
                use = _claimed.get(leaf)
                if use is not None and self in use.holders:
                    use.holders.remove(self)
                    if not use.holders:
                        # Nobody can claim it before the caller has put back its ``.grad`` and called `give_back`.
                        self._left.append(use)
            return self._left  # kept for `give_back`, and for a second call

    def give_back(self) -> None:
        """Let others claim the leaves, and wake the threads that wait. Harmless on a second call."""
        self.leave()
        with _lock:
            while self._left:
                use = self._left.pop()
                if _claimed.get(use.key) is use:  # otherwise its leaf has died, and another leaf has its id
                    del _claimed[use.key]
            if _waiting:
                _condition.notify_all()


class Claim:
    """Claims the leaves of one engine call and sets their ``.grad`` aside, for the time of a ``with`` block.

    At the end of the block, the accumulated gradients are added to ``into``. If ``into`` is None, ``.grad`` is not set
    aside and the leaves accumulate there. Blocks of one ``group`` may claim the same leaves at the same time.
    """

    def __init__(self, nodes: Iterable[Node], into: GradientStore | None, group: object) -> None:
        self._into = into
        self._leaves: dict[int, torch.Tensor] = {id(leaf := node.variable): leaf for node in nodes}
        # The leaves that `adopt` has claimed, each with the ``.grad`` that it had. Weakly: most of them live no longer
        # than the node's call, and nobody asks for their gradients.
        self._adopted: list[tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = []
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients to accumulate after `release`
        self._outer: Claim | None = None
        self.holder = _Holder(group)

    def __enter__(self) -> None:
        self._outer = thread_value(_KEY) if thread_has(_KEY) else None
        try:
            if self._leaves:
                self.holder.take(self._leaves, aside=self._into is not None)
            keep_in_thread(_KEY, self)
        except BaseException as error:  # Ctrl-C during the wait, too: nobody else would give the leaves back
            self.__exit__(type(error))
            raise

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if thread_has(_KEY):
            take_from_thread(_KEY)
        if self._outer is not None:
            keep_in_thread(_KEY, self._outer)
        if self.holder.held:
            self.release()
        for leaf, gradient in self._late if kind is None else ():
            holder = _Holder()
            try:
                holder.take({id(leaf): leaf})  # waits, and nobody waits for this thread, which has released its leaves
                _accumulate(leaf, gradient, self._into)
            finally:
                holder.give_back()

    def adopt(self, nodes: Iterable[Node]) -> set[Node]:
        """Claim the leaves that a node's own engine call reaches; return the nodes of those that others hold."""
        taken: set[Node] = set()
        for node in nodes:
            leaf = node.variable
            with _lock:
                use = _use_of(id(leaf), leaf)
                if use is not None:
                    if self.holder not in use.holders:
                        taken.add(node)  # not waited for: the other call may later wait for this one
                    continue
                self.holder.held.add(id(leaf))
                _claimed[id(leaf)] = _Use(id(leaf), None, [self.holder], weakref.ref(leaf))
            if self._into is not None:
                self._adopted.append((weakref.ref(leaf), leaf.grad))
                leaf.grad = None
        return taken

    def add(self, leaf: torch.Tensor, gradient: torch.Tensor, *, elsewhere: bool) -> None:
        """Add a gradient that a node's own engine call returned; with ``elsewhere``, another call holds the leaf."""
        if not elsewhere and id(leaf) not in self._leaves:  # an adopted leaf, which no other call can hold
            with torch.no_grad():
                leaf.grad = gradient.clone() if leaf.grad is None else leaf.grad + gradient
        else:
            gradient = gradient.clone()
            side_streams.publish((gradient,))
            # A hook after accumulation must find the gradient in ``.grad``, which another call may be using now.
            if self._into is not None and not leaf._post_accumulate_grad_hooks:
                self._into.add(leaf, gradient)
            else:
                self._late.append((leaf, gradient))

    def release(self) -> None:
        """End the claim: move the accumulated gradients to ``into``, and put the former ``.grad`` back."""
        try:
            # Without leaves that other engine calls of the pass still hold: the last of them moves their gradients.
            aside = [(use.leaf, use.before) for use in self.holder.leave() if use.leaf is not None]
            if self._adopted:
                aside += [(leaf, before) for reference, before in self._adopted if (leaf := reference()) is not None]
            shared = ddp.in_buckets() if ddp.living else set[int]()
            if CUDA_IS_BUILT:
                computed = [leaf for leaf, _ in aside] if self._into is not None else self._leaves.values()
                side_streams.publish(leaf.grad for leaf in computed)
            for leaf, before in aside:
                new = leaf.grad
                leaf.grad = before
                if new is not None and self._into is not None:
                    # The next pass overwrites the buckets of DistributedDataParallel, of which the gradient is a view.
                    self._into.add(leaf, new.clone() if id(leaf) in shared else new)
        finally:
            self.holder.give_back()


def _accumulate(leaf: torch.Tensor, gradient: torch.Tensor, into: GradientStore | None) -> None:
    """Add a gradient to a claimed leaf as its node would, to ``into`` if given, and call the last hooks."""
    before = leaf.grad
    hooks: dict[int, Any] = leaf._post_accumulate_grad_hooks or {}
    side_streams.catch_up((before, gradient))
    try:
        leaf.grad = gradient if into is not None or before is None else before + gradient
        # Only the hooks after accumulation: hooks on the gradient have run already.
        for hook in list(hooks.values()):
            hook(leaf)
        side_streams.publish((leaf.grad,))
        if into is not None and leaf.grad is not None:
            into.add(leaf, leaf.grad)
    finally:
        if into is not None:
            leaf.grad = before


_KEY = "nbdist.autograd.claim"  # of a thread's claim among the values of torch's threads; those for a GPU see it, too


def current_claim() -> Claim:
    """Return the claim of the engine call in which the calling thread runs a node; call it only from a node or hook."""
    claim: Claim = thread_value(_KEY)
    return claim


@contextmanager
def halted() -> Iterator[None]:
    """Note during the block that a watch has paused the engine call of the calling thread; see `halted_leaves`."""
    holder = current_claim().holder
    with _lock:
        _halted.add(holder)
    try:
        yield
    finally:
        with _lock:
            _halted.discard(holder)


def halted_leaves() -> set[int]:
    """Return the ids of the leaves that halted engine calls hold, whose ``.grad`` may be set aside."""
    if not _halted:  # the usual case; every local pass asks
        return set()
    with _lock:
        return set[int]().union(*(holder.held for holder in _halted))


class lent:
    """Give leaves these gradients as their ``.grad`` for the time of a ``with`` block, as for an optimizer's step.

    Waits until no backward pass and no other such block has one of the leaves.
    """

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
        except BaseException:  # Ctrl-C during the wait, too: the block does not begin, so nobody else would call this
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            for leaf, old in self._before:
                leaf.grad = old
        finally:
            self._holder.give_back()
