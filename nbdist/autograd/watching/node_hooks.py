"""Sets the hooks by which an observer sees the nodes that one call of torch's engine runs: before and after each node.

A node gets its hooks when the first of the nodes that lead to it has run, in `_NodeHooks.after`. So the engine begins
at once, and a GPU already computes while most of the nodes get their hooks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from nbdist.autograd.graph.edges import RECEIVE, HeldBack, Node, RunningPart, current_part
from nbdist.autograd.graph.inherited import Inherited
from nbdist.autograd.graph.measuring import Gradients
from nbdist.autograd.graph.origins import origin_of
from nbdist.autograd.graph.saved import Saved, saved_by
from nbdist.autograd.watching.observer import Observer, Stopped
from nbdist.gpus import spans
from nbdist.gpus.spans import GpuSpan
from nbdist.torch_private import graph_task, keep_in_thread, take_from_thread, thread_has, thread_value

_KEY = "nbdist.autograd.local_call"  # of a thread's observed local pass, among the values of torch's threads
_CHECKED_AFTERWARDS = "returned an invalid gradient"  # in torch's error


class CallHooks:
    """The hooks of one call of torch's engine: a context manager around the call, in which ``part`` has nodes run.

    ``part`` is None for a local pass. ``first`` are the nodes at the roots: of a gate among them, the node behind it is
    observed.
    """

    def __init__(
        self, observer: Observer, part: RunningPart | None, nodes: Collection[Node], first: Iterable[Node]
    ) -> None:
        self.observer = observer
        self.part = part
        self._task: int | None = None  # torch's number of this call
        self.last: _NodeHooks | None = None  # of the node that has begun last
        self.is_running = False  # that node has not ended
        self._first = first
        # The nodes without hooks, and their numbers. Several threads of the engine may take nodes out.
        self._left = observer.numbers.of(nodes)
        self._handles: list[Any] = []
        self._is_over = False

    def __enter__(self) -> None:
        try:
            for node in self._first:
                if (number := self._left.pop(node, None)) is not None:
                    self._set_on(node, number)
                else:
                    self.reach(node)  # a gate, which is not observed
            if self.part is None:
                keep_in_thread(_KEY, self)
        except BaseException:  # Ctrl-C: without this the hooks would stay on the user's graph
            self.__exit__(None, None, None)
            raise

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        # First: if a node on one device fails, the call ends, but the engine's thread for another device may still run
        # a node, and set hooks behind it.
        self._is_over = True
        if thread_has(_KEY) and thread_value(_KEY) is self:
            take_from_thread(_KEY)
        self._left = {}
        self._remove()
        # Between two nodes torch checks what the first has returned, and calls the hooks of tensors.
        by_node = self.is_running or _CHECKED_AFTERWARDS in str(error)
        if isinstance(error, Exception) and not isinstance(error, HeldBack | Stopped) and self.last and by_node:
            self.observer.note("failed", node=self.last.number, name=self.last.name)
            self.observer.flush()
            if line := origin_of(self.last.node).line:
                error.add_note(f"raised by {self.last.name}, the node that this line made: {line}")

    def runs(self) -> bool:
        """Return whether this call runs the node whose hook asks; another one may run it, perhaps at the same time."""
        if self.part is not None:
            return current_part() is self.part
        task = graph_task()
        if self._task is None:
            self._task = task  # of a root, which runs first
        return task == self._task

    def reach(self, node: Node) -> None:
        """Set hooks on the nodes that come after ``node``, which has run."""
        left = self._left
        for after, _ in node.next_functions:
            if after is not None and (number := left.pop(after, None)) is not None:
                self._set_on(after, number)

    def _set_on(self, node: Node, number: int) -> None:
        kind = type(node)
        hooks = _NodeHooks(self, node, number, kind.name(node))
        self._handles += [kind.register_prehook(node, hooks.before), kind.register_hook(node, hooks.after)]
        if self._is_over:
            self._remove()

    def _remove(self) -> None:
        # A thread that adds a handle to the old list calls this afterwards; a handle may be removed twice.
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()


def come_to_collective(say: Callable[[], str]) -> None:
    """Halt before a collective, in words, that the calling thread is about to issue, if in a local pass that pauses."""
    call: CallHooks | None = thread_value(_KEY) if thread_has(_KEY) else None
    if call is not None and call.observer.is_paused:
        began = time.perf_counter()
        call.observer.come_to_collective(say())
        if call.last is not None:  # the node that calls it does not run meanwhile
            call.last.began += time.perf_counter() - began


class _NodeHooks(msgspec.Struct, eq=False):
    """The two hooks on one node: they halt and note it, by `Observer.come_to` and `Observer.ran`."""

    # A struct, and no closures: a pass has many nodes, and each object that Python's garbage collector must follow
    # costs time.

    call: CallHooks
    node: Node
    number: int
    name: str
    began: float = 0.0
    span: GpuSpan | None = None
    saved: Sequence[Saved] = ()

    __repr__ = object.__repr__  # a struct's own would print the saved tensors

    def before(self, gradients: Gradients) -> None:
        call = self.call
        if not call.runs():
            return
        call.observer.come_to(self.number, self.name, gradients, sends=type(self.node) is RECEIVE)
        if call.observer.looks:  # now, as torch frees them when the node has run
            self.saved = saved_by(self.node)
        call.last, call.is_running = self, True
        self.span = spans.begin(spans.device_of(gradients))
        self.began = time.perf_counter()

    def after(self, new: Gradients, given: Gradients) -> None:
        call = self.call
        if not call.runs():
            return
        call.is_running = False
        seconds = time.perf_counter() - self.began
        span, self.span = self.span, None
        if span is not None:
            span.end()
        call.reach(self.node)
        try:
            call.observer.ran(self.number, self.name, seconds, new, given, self._explain, span)
        finally:
            self.saved = ()

    def _explain(self) -> Inherited | None:
        return self.call.observer.explain(self.node, self.saved)
