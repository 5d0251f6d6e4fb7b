"""Shows a step of a pipeline to whoever watches its context, as if it were a backward pass.

::

    worker0   F0 ── F1 ─────────── B0 ── B1      a node for each operation of the schedule's table: F3 is micro-batch 3
               ╲     ╲             ╱     ╱       through the worker's stage, forward, and B3 backward
    worker1     F0 ── B0 ── F1 ── B1

A node waits for the operation that it needs, and where that is done on another worker, for its message. The workers
tell the watcher what they do, and halt before a node if it says so, by the same messages as in a pass: see
`nbdist.autograd.observing`. A step that nobody watches has no part in this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nbdist.autograd.api import recorder
from nbdist.autograd.inspection import Edge, NodeInfo, Plan, Trace
from nbdist.autograd.messages import Head
from nbdist.autograd.observer import Observer, Stopped, are_finite
from nbdist.autograd.origins import Origin
from nbdist.nn.inbox import Inbox
from nbdist.nn.schedules import Op, Table, what_it_needs

__all__ = ["WatchedShare", "WatchedStep", "plan_of_step"]


def plan_of_step(context_id: int, table: Table, workers: Sequence[str], stages: int) -> Plan:
    """Return what a step consists of: its operations by worker, and who waits for how many others."""
    places = {op: (workers[row], number) for row, ops in enumerate(table) for number, op in enumerate(ops)}
    found = Trace(context_id, of_step=True)
    waits_for = {}
    for op, (worker, number) in places.items():
        needed = _needs(op, stages)
        own = [places[each][1] for each in needed if places[each][0] == worker]
        away = [each for each in needed if places[each][0] != worker]
        message = _message(op, stages) if away else None
        for each in away:
            sender, source = places[each]
            what = "activations" if op.kind == "F" else "gradients"
            found.edges.append(Edge(_message(op, stages), sender, worker, what, (), (source,)))
        found.nodes.setdefault(worker, []).append(
            NodeInfo(
                number,
                _name(op),
                "operation",
                None,
                None,
                tuple(own),
                message,
                (0,) if away else (),
                Origin(module=f"stage {op.stage}"),
            )
        )
        waits_for[worker, number] = len(needed)
    roots = [key for key, count in waits_for.items() if not count]
    return Plan(found, roots, waits_for, list(found.edges), [])


def _needs(op: Op, stages: int) -> list[Op]:
    """Return what must have been done before an operation; a backward one needs its own forward too."""
    needed = [each for each in (what_it_needs(op, stages),) if each is not None]
    forward = op._replace(kind="F")
    return needed if op.kind == "F" or forward in needed else [*needed, forward]


def _name(op: Op) -> str:
    return f"{op.kind}{op.micro_batch}"


def _message(op: Op, stages: int) -> int:
    """Return the number of the message that brings an operation what it needs."""
    return (op.micro_batch * stages + op.stage) * 2 + (op.kind == "B")


class WatchedStep:
    """One step, where it is ordered."""

    def __init__(self, table: Table, workers: Sequence[str], stages: int) -> None:
        """Tell the watcher what the step consists of; ``head`` is None if the current context has no watcher."""
        here = recorder()
        self._observing = here.passes.observing
        self._context = here.contexts.current
        self.head: Head | None = None
        if self._context is not None and self._observing.is_watched(self._context):
            plan = plan_of_step(self._context.id, table, workers, stages)
            self.head = self._observing.begin_step(self._context, here.passes.new_id(), plan)

    def end(self, error: BaseException | None, told: Mapping[int, int]) -> None:
        """Tell the watcher that the step is over; each worker, by its incarnation, has told it so many things."""
        if self.head is not None and self._context is not None:
            why = f"{type(error).__name__}: {error}" if error is not None else ""
            self._observing.tell_over(self.head, self._context, why, dict(told))


class WatchedShare:
    """One worker's share of a step that is watched."""

    def __init__(self, observer: Observer, row: Sequence[Op], places: Sequence[str], me: str, inbox: Inbox) -> None:
        self._observer = observer
        self._numbers = {op: number for number, op in enumerate(row)}
        self._stages = len(places)
        self._places = places
        self._me = me
        self._inbox = inbox
        self._spoilt = set[tuple[int, int]]()
        """The stages and micro-batches whose forward operation here made a NaN or Inf, or handed one on."""
        inbox.on_fail = observer.stop

    @classmethod
    @contextmanager
    def of(
        cls, head: Head | None, row: Sequence[Op], places: Sequence[str], me: str, inbox: Inbox
    ) -> Iterator[WatchedShare | None]:
        """Observe a share for the time of the block; None if nobody watches. Stage ``s`` is on ``places[s]``."""
        here = recorder()
        context = here.contexts.current
        if head is None or context is None:
            yield None
            return
        with here.passes.observing.observed_step(head, context) as observer:
            yield cls(observer, row, places, me, inbox) if observer is not None else None

    @property
    def told(self) -> int:
        """How often the watcher was told something."""
        self._observer.flush()
        return self._observer.sent

    def waits(self, op: Op) -> None:
        """Tell that what an operation needs has still to come."""
        self._observer.waits_for({_message(op, self._stages)})
        self._observer.flush()

    @contextmanager
    def doing(self, op: Op, given: Sequence[Any]) -> Iterator[Callable[[Sequence[Any]], None]]:
        """Tell of an operation that is done in the block; before, halt if the watcher says so.

        The block calls what it gets with what the operation has made, before it sends that: a NaN is told of by who
        made it before others come to it.
        """
        needs = what_it_needs(op, self._stages)
        if needs is not None and self._places[needs.stage] != self._me:
            self._observer.note("arrived", message=_message(op, self._stages))
        known = tuple(each for each in given if isinstance(each, torch.Tensor))
        gradients = known if op.kind == "B" else ()
        number = self._numbers[op]
        try:
            self._observer.come_to(number, _name(op), gradients, sends=self._sends(op))
        except Stopped:
            self._inbox.check()  # which knows why
            raise
        began = time.perf_counter()
        yield lambda made: self._look(op, number, made, known)
        self._observer.ran(number, _name(op), time.perf_counter() - began, ())

    def _look(self, op: Op, number: int, made: Sequence[Any], given: Sequence[torch.Tensor]) -> None:
        if not self._observer.looks:
            return
        new = _numbers_in(made)
        if op.kind == "B" and (op.stage, op.micro_batch) in self._spoilt:
            return  # its gradients follow from what its own forward operation has made
        if op.kind == "F" and not are_finite(new):
            self._spoilt.add((op.stage, op.micro_batch))
        self._observer.made(number, _name(op), new, _numbers_in(given))

    def _sends(self, op: Op) -> bool:
        """Return whether another worker needs what comes of an operation."""
        after = op.stage + 1 if op.kind == "F" else op.stage - 1
        return 0 <= after < self._stages and self._places[after] != self._me


def _numbers_in(values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return the tensors that may hold a NaN."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return tuple(tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex())
