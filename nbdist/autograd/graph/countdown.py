"""`Countdown`: keeps one call of torch's engine going until nodes on several devices have run.

torch's engine has a queue of ready nodes for each device. A barrier (`nbdist.autograd.passes.worker_part`) is the last
node of its queue, but it does not see the others: while a GPU still computes what a node on the CPU waits for, the
CPU's queue is empty, and a barrier there would end the call too early. So where nodes are on several devices, the
barriers stand behind a chain of *waits*::

    root -> wait -> wait -> ... -> wait -> the gates that are barriers

A wait returns when some node has run, or after a while. Then its queue runs the nodes that have become ready meanwhile;
the next wait comes after them, because its priority is the lowest. The first wait that finds all nodes run ends the
call with `HeldBack`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function

from nbdist.autograd.graph.edges import GraphEdge, HeldBack, Node

_FIRST_PATIENCE = 0.001  # seconds to wait if a node has run since the last wait: what it queued may come a bit later
_LONGEST_PATIENCE = 1.0  # while no node runs, each wait is twice as long as the one before, up to this many seconds
_QUEUES_WITHIN = 0.0002  # seconds after a node's hooks; by then, torch has most often queued the nodes behind the node
_MORE_WAITS = 200  # waits in a chain, besides two for each node: more than three minutes if no node runs


class Countdown:
    """Counts the nodes that have not run yet in a call of torch's engine; each runs once. End it by `remove`."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.left = self._seen = len(nodes)
        self._count = len(nodes)
        self._patience = _FIRST_PATIENCE
        self._root: torch.Tensor | None = None
        self._changed = threading.Condition()
        # By way of the class: a user's Function may have an attribute of this name (test_waiting.py has one).
        self._handles = [type(node).register_hook(node, self._note) for node in nodes]

    def _note(self, *_: Any) -> None:
        with self._changed:
            self.left -= 1
            self._changed.notify_all()

    def chain(self, gates: Sequence[torch.Tensor], sequence_nr: int) -> GraphEdge:
        """Return the graph edge of the first of a chain of waits: nodes that call `wait`, and lead to the gates."""
        wait: Callable[..., Any] = _Wait.apply
        with torch.enable_grad():
            last = wait(self, *gates)
            for _ in range(2 * self._count + _MORE_WAITS):
                # The lowest of the call, so that the engine runs a wait only when no other node of its queue is ready.
                last.grad_fn._set_sequence_nr(sequence_nr)
                last = wait(self, last)
            last.grad_fn._set_sequence_nr(sequence_nr)
        self._root = last  # a Python function's node lives no longer than its output
        return last.grad_fn, 0

    def wait(self) -> None:
        """Wait until a node has run since the last call, 1 s at most; each node of the chain calls this as it runs."""
        with self._changed:
            if self.left and self.left == self._seen:
                self._changed.wait(self._patience)
            if not self.left:
                raise HeldBack  # which ends the engine's call
            has_run = self.left != self._seen
            self._patience = _FIRST_PATIENCE if has_run else min(2 * self._patience, _LONGEST_PATIENCE)
            self._seen = self.left
        if has_run:
            time.sleep(_QUEUES_WITHIN)  # without the lock, which the hooks of nodes take

    def remove(self) -> None:
        """Take the hooks off the nodes, and drop the chain."""
        self._root = None
        for handle in self._handles:
            handle.remove()


class _Wait(Function):
    """A wait: its backward calls `Countdown.wait`."""

    @staticmethod
    def forward(ctx: Any, countdown: Countdown, *before: torch.Tensor) -> torch.Tensor:
        ctx.countdown = countdown
        ctx.devices = [tensor.device for tensor in before]
        return torch.empty((), device="cpu")  # only a root for the engine, or the input of the next wait

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.countdown.wait()
        # None for the countdown. Nobody reads the ones: neither the next wait nor, after the last wait, the gates.
        return None, *(torch.ones((), device=device) for device in ctx.devices)


def devices_of(nodes: Sequence[Node]) -> set[torch.device]:
    """Return the devices of the gradients that come to these nodes: torch's engine has a queue for each."""
    return {metadata.device for node in nodes for metadata in node._input_metadata[:1]}
