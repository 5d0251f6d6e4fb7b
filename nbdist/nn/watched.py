"""Shows a training step of a pipeline to the watcher of its context, as if the step were a backward pass.

::

    worker0   F0 ── F1 ─────────── B0 ── B1      a node for each operation of the schedule's table: F3 is the forward
               ╲     ╲             ╱     ╱       of micro-batch 3 through the worker's stage, B3 its backward
    worker1     F0 ── B0 ── F1 ── B1

A node waits for the operation whose output it needs; if that runs on another worker, for its message. The workers
report their operations to the watcher, and halt before a node if the watcher says so. They use the messages of a pass
(`nbdist.autograd.passes.observing`). A step that nobody watches does none of this, and neither does
`Pipeline.forward`.

The pipeline's owner has a `WatchedStep`, each worker of the pipeline a `WatchedShare`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nbdist.autograd.api import recorder
from nbdist.autograd.graph.measuring import are_finite, is_finite
from nbdist.autograd.graph.messages import Head
from nbdist.autograd.graph.origins import NodeOrigin
from nbdist.autograd.graph.saved import saved_by
from nbdist.autograd.graph.traces import Edge, NodeInfo, Plan, Trace
from nbdist.autograd.graph.walk import walk
from nbdist.autograd.passes.context import Context
from nbdist.autograd.watching.observer import Observer, Stopped
from nbdist.gpus import spans
from nbdist.nn.inbox import Inbox
from nbdist.nn.schedules import KINDS, Op, Table, goes_to, what_it_needs
from nbdist.rpc.failures import text_of_error

# A function that takes the values that an operation has computed, so that a watcher can look for NaN in them.
Look = Callable[[Sequence[Any]], None]


def plan_of_step(context_id: int, table: Table, workers: Sequence[str], stages: int) -> Plan:
    """Return a step of a pipeline as the plan of a pass, which views can draw: operations are nodes."""
    places = {op: (workers[row], number) for row, ops in enumerate(table) for number, op in enumerate(ops)}
    found = Trace(context_id, of_step=True)
    waits_for = {}
    for op, (worker, number) in places.items():
        needed = what_it_needs(op, stages)
        own = [places[each][1] for each in needed if places[each][0] == worker]
        away = [each for each in needed if places[each][0] != worker]
        message = _message_number(op, stages) if away else None
        for each in away:
            sender, source = places[each]
            found.edges.append(Edge(_message_number(op, stages), sender, worker, KINDS[op.kind].output, (), (source,)))
        origin, tensors = NodeOrigin(module=f"stage {op.stage}"), (0,) if away else ()
        node = NodeInfo(number, _name(op), "operation", None, None, tuple(own), message, tensors, origin)
        found.nodes.setdefault(worker, []).append(node)
        waits_for[worker, number] = len(needed)
    roots = [key for key, count in waits_for.items() if not count]
    return Plan(found, roots, waits_for, list(found.edges), [])


def _name(op: Op) -> str:
    return f"{op.kind}{op.micro_batch}"


def _message_number(op: Op, stages: int) -> int:
    """Return the number of the message that brings an operation its input; each operation has its own number."""
    return (op.micro_batch * stages + op.stage) * len(KINDS) + list(KINDS).index(op.kind)


class WatchedStep:
    """One step, as the pipeline's owner reports it to the context's watcher, if there is one."""

    def __init__(self, context: Context | None, table: Table, workers: Sequence[str], stages: int) -> None:
        """Show the step's plan to the watcher of a context; `head` is None if there is no watcher, or no context."""
        passes = recorder().passes
        self._observing = passes.observing
        self._context = context
        self.head: Head | None = None
        if context is not None and self._observing.is_watched(context):
            plan = plan_of_step(context.id, table, workers, stages)
            self.head = self._observing.begin_step(context, passes.new_id(), plan)

    def end(self, error: BaseException | None, told: Mapping[int, int]) -> None:
        """Tell the watcher that the step is over, and how many messages each worker, by incarnation, has sent to it."""
        if self.head is not None and self._context is not None:
            why = f"{type(error).__name__}: {text_of_error(error)}" if error is not None else ""
            self._observing.tell_over(self.head, self._context, why, dict(told))


class WatchedShare:
    """One worker's share of a watched step: reports operations to the watcher, and halts before them if it says so."""

    def __init__(self, observer: Observer, row: Sequence[Op], places: Sequence[str], me: str, inbox: Inbox) -> None:
        self._observer = observer
        self._numbers = {op: number for number, op in enumerate(row)}
        self._stages = len(places)
        self._places = places
        self._me = me
        self._inbox = inbox
        # For a stage and micro-batch whose forward here returned a NaN: whether its backward has made one itself.
        self._spoilt: dict[tuple[int, int], bool] = {}
        inbox.on_fail = observer.stop  # a halted operation ends if the step fails elsewhere

    @classmethod
    @contextmanager
    def of(
        cls, head: Head | None, row: Sequence[Op], places: Sequence[str], me: str, inbox: Inbox
    ) -> Iterator[WatchedShare | None]:
        """Observe this worker's share of a step for the time of the block; yield None if nobody watches."""
        here = recorder()
        context = here.contexts.current
        if head is None or context is None:
            yield None
            return
        with here.passes.observing.observed_step(head, context) as observer:
            yield cls(observer, row, places, me, inbox) if observer is not None else None

    @property
    def told(self) -> int:
        """The number of messages sent to the watcher, after the reports that were kept back have been sent, too."""
        # The watcher waits until it has received that many.
        return self._observer.finish()

    def waits(self, op: Op) -> None:
        """Tell the watcher at once that an operation waits for its input from another worker."""
        self._observer.waits_for({_message_number(op, self._stages)})
        self._observer.flush()  # at once, so that a view shows the wait

    @contextmanager
    def doing(self, op: Op, given: Sequence[Any], device: torch.device) -> Iterator[Look]:
        """Report the operation that the block runs; halt before the block if the watcher says so."""
        if any(self._places[needed.stage] != self._me for needed in what_it_needs(op, self._stages)):
            self._observer.note("arrived", message=_message_number(op, self._stages))
        known = tuple(each for each in given if isinstance(each, torch.Tensor))
        gradients = known if op.kind == "B" else ()
        number = self._numbers[op]
        after = goes_to(op, self._stages)
        sends = after is not None and self._places[after.stage] != self._me
        try:
            self._observer.come_to(number, _name(op), gradients, sends=sends)
        except Stopped:
            self._inbox.check()  # raises the error that stopped the step, which says more
            raise
        on_gpu = spans.begin(device)
        began = time.perf_counter()
        # The block calls this with its outputs, before it sends them: then the worker that made a NaN reports it before
        # the workers that receive it can.
        yield lambda made: self._look(op, number, made, known)
        seconds = time.perf_counter() - began
        span = on_gpu.end() if on_gpu is not None else None
        self._observer.ran(number, _name(op), seconds, (), span=span)

    def _look(self, op: Op, number: int, made: Sequence[Any], given: Sequence[torch.Tensor]) -> None:
        """Report a NaN or Inf in ``made`` that an operation made from finite inputs, if the watcher looks for it."""
        if not self._observer.looks:
            return
        new = _numbers_in(made)
        if op.kind == "B" and not self._spoilt.get((op.stage, op.micro_batch), True):
            return  # the NaN in the gradients comes from the forward of this micro-batch, which has been reported
        if op.kind == "F" and not are_finite(new):
            self._spoilt[op.stage, op.micro_batch] = False
            self._hook_finite_nodes(op, new)
        self._observer.made(number, _name(op), new, _numbers_in(given))

    def _hook_finite_nodes(self, op: Op, made: Sequence[torch.Tensor]) -> None:
        """Note in `_spoilt` if a node of a forward's graph later makes a NaN that it has not got from the forward."""

        def after(new: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None]) -> None:
            if not are_finite(new) and are_finite(given):
                self._spoilt[op.stage, op.micro_batch] = True

        region = walk([(each.grad_fn, each.output_nr) for each in made])
        for node in region.nodes - set(region.leaves):  # a leaf's node outlives the step, and the hook would, too
            if all(is_finite(saved.tensor) and not saved.packed for saved in saved_by(node)):
                type(node).register_hook(node, after)


def _numbers_in(values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return the tensors of floating-point or complex numbers: only these can hold a NaN."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return tuple(tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex())
