"""What a pipeline has on one worker: its stages there, and what happens to them in a step.

The one who has the pipeline orders a step of every worker, each by one call, which goes through its row of the
schedule. What goes from stage to stage goes from worker to worker, by calls of their own: `deliver`.

A step is trained without distributed autograd: each stage keeps the graph of its micro-batch, cut off from the others,
until the gradient of its output comes, and sends that of its input on. So what is to be done backward is known and in
the schedule's order. `Pipeline.forward`, of which nobody knows what will be done with its output, is recorded instead,
as any other calls in a context; there the order of sums is that of `nbdist.autograd.ordering`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from nbdist import trace
from nbdist.autograd.api import recorder
from nbdist.autograd.leaves import Gradients, lent
from nbdist.autograd.messages import Head
from nbdist.autograd.ordering import ordered
from nbdist.errors import UsageError, WorkerLost
from nbdist.nn.batches import Values, as_tuple
from nbdist.nn.entry import enter
from nbdist.nn.inbox import Abandoned, Inbox
from nbdist.nn.losses import Reduction, loss_of
from nbdist.nn.randomness import random_state, restore_random_state
from nbdist.nn.schedules import Op, Span
from nbdist.nn.stage import Stage, shapes_of
from nbdist.nn.watched import WatchedShare
from nbdist.optim.local import on_cpu
from nbdist.optim.parameters import name_parameter
from nbdist.rpc.agent import Agent
from nbdist.rpc.api import current_agent
from nbdist.rpc.futures import Latch
from nbdist.rpc.rref import RRef
from nbdist.wire.messages import Record

__all__ = ["Done", "Order", "Station", "abandon_step", "build_stages", "call_station", "deliver", "run_share"]

_REMEMBERED = 1000
Look = Callable[[Sequence[Any]], None]
"""Looks at what an operation has made, for whoever watches."""

_NOBODY: AbstractContextManager[Look] = nullcontext(lambda made: None)


@dataclass(frozen=True, slots=True)
class Order:
    """What one worker is to do in one step."""

    step: int
    """Never twice in the life of a pipeline: what is sent on the way, and what is abandoned, goes by it."""
    number: int
    """What the stages draw at random follows from it; a state that is loaded sets it back."""
    row: list[Op]
    sizes: list[int]
    train: bool
    recorded: bool
    reduction: Reduction = "mean"
    finite: bool = True
    loss_fn: Callable[..., torch.Tensor] | None = None
    head: Head | None = None
    """By which whoever watches the step knows it."""


@dataclass(frozen=True, slots=True)
class Done:
    """What one worker has done."""

    spans: list[Span]
    """By the worker's own clock."""
    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    told: int = 0
    """How often whoever watches the step was told of it."""


class Station:
    """The stages of one pipeline on one worker."""

    def __init__(self, uid: str, stages: Mapping[int, Stage], places: Sequence[str], driver: str) -> None:
        self.uid = uid
        self.stages = stages
        self.places = places
        self.driver = driver
        self._agent = current_agent()
        self._needed = {self._agent.find(name).incarnation for name in {driver, *places}}
        self._inboxes: dict[int, Inbox] = {}
        self._over: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()
        for stage in reversed(list(stages.values())):  # what several stages here share has its name in the first one
            for name, parameter in reversed(list(stage.module.named_parameters())):
                name_parameter(parameter, stage.prefix + name)
        _stations(self._agent)[uid] = self

    # -- a step -------------------------------------------------------------------------------

    def run(self, order: Order, inputs: Sequence[Values], targets: Sequence[Values]) -> Done:
        """Do a row of the schedule, with the micro-batches that the first stage, and the last, are given."""
        inbox = self.inbox(order.step)
        if inbox is None:
            raise Abandoned(f"step {order.step} was over before it began")
        if gone := [each for each in self._needed if self._agent.member(each) is None]:
            # `on_lost` came before there was an inbox.
            names = ", ".join(map(self._agent.name_of, gone))
            inbox.fail(WorkerLost(f"{names} is gone; the step of a pipeline needed it"))
        try:
            return _Step(self, order, inbox, inputs, targets).run()
        finally:
            with self._lock:
                self._end(order.step)

    def inbox(self, step: int) -> Inbox | None:
        """What has come for a step, unless it is over."""
        with self._lock:
            inbox = self._inboxes.get(step)
            if inbox is None and step not in self._over:
                inbox = self._inboxes[step] = Inbox()
            return inbox

    def commit(self, order: Order, inbox: Inbox, gradients: Gradients) -> None:
        """A step has been done here: give its gradients to the context, unless it has failed elsewhere."""
        context = recorder().contexts.current
        if context is None:
            raise UsageError("the context ended during train_step")
        with self._lock:
            inbox.check()
            context.contribute((self.uid, order.step), gradients)

    def abandon(self, step: int, context_id: int | None, why: str) -> None:
        """It has failed elsewhere."""
        with self._lock:
            inbox = self._inboxes.get(step)
            if inbox is not None:
                inbox.fail(Abandoned(why))
            else:
                self._end(step)
            context = recorder().contexts.find(context_id) if context_id is not None else None
            if context is not None:
                context.withdraw((self.uid, step))

    def on_lost(self, record: Record, why: str) -> None:
        """Nothing will come from that worker any more."""
        if record.incarnation in self._needed:
            with self._lock:
                inboxes = list(self._inboxes.values())
            for inbox in inboxes:
                inbox.fail(WorkerLost(f"{record.name} {why}; the step of a pipeline needed it"))

    def _end(self, step: int) -> None:
        self._inboxes.pop(step, None)
        self._over[step] = None
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    # -- its modules --------------------------------------------------------------------------

    def parameter_rrefs(self) -> dict[int, list[RRef[Any]]]:
        """References to the parameters of each stage; what several stages here share is the first one's."""
        known: set[int] = set()
        found: dict[int, list[RRef[Any]]] = {}
        for index, stage in self.stages.items():
            own = [parameter for parameter in stage.parameters if id(parameter) not in known]
            known.update(map(id, own))
            found[index] = [RRef(parameter) for parameter in own]
        return found

    def train(self, mode: bool) -> None:
        """Set the modules' mode."""
        for stage in self.stages.values():
            stage.module.train(mode)

    def state(self) -> dict[int, dict[str, Any]]:
        """Return the state of each stage, by full names and ready to travel."""
        return {
            index: {stage.prefix + name: value for name, value in on_cpu(stage.module.state_dict()).items()}
            for index, stage in self.stages.items()
        }

    def names(self) -> dict[int, list[str]]:
        """Return the full names in the state of each stage."""
        return {
            index: [stage.prefix + name for name in stage.module.state_dict()] for index, stage in self.stages.items()
        }

    def load(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Give stages a state, by full names."""
        for index, state in states.items():
            stage = self.stages[index]
            stage.module.load_state_dict({name.removeprefix(stage.prefix): value for name, value in state.items()})

    def random_states(self) -> dict[int, dict[str, Any]]:
        """Return the state of this process's random generators, once for each stage."""
        return {index: random_state(stage.device) for index, stage in self.stages.items()}

    def restore_random(self, seed: int, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Draw from now on by this seed; of the generators' states, the process has one: that of the first stage."""
        for index in sorted(self.stages, reverse=True):
            self.stages[index].seed = seed
            restore_random_state(states[index], self.stages[index].device)


class _Step:
    """One step, on one worker."""

    def __init__(
        self,
        station: Station,
        order: Order,
        inbox: Inbox,
        inputs: Sequence[Values],
        targets: Sequence[Values],
    ) -> None:
        self._station = station
        self._agent = station._agent
        self._me = self._agent.me.name
        self._order = order
        self._inbox = inbox
        self._last = len(station.places) - 1
        self._inputs = inputs
        self._targets = targets
        self._kept: dict[tuple[int, int], tuple[list[torch.Tensor | None], Any]] = {}
        self._sums: dict[int, dict[torch.Tensor, torch.Tensor | None]] = {
            index: dict.fromkeys((p for p in stage.parameters if p.requires_grad), None)
            for index, stage in station.stages.items()
        }
        self._sent: list[Latch] = []
        self._losses: list[torch.Tensor] = []
        self._outputs: list[Any] = []

    def run(self) -> Done:
        """All of it."""
        try:
            return self._run()
        finally:  # an error holds this by its traceback, for as long as somebody keeps it
            self._kept.clear()
            self._sums.clear()
            self._inputs = self._targets = ()
            for latch in self._sent:
                latch.on_settle = None  # which holds the latch

    def _run(self) -> Done:
        spans = []
        order, places = self._order, self._station.places
        with self._mode(), WatchedShare.of(order.head, order.row, places, self._me, self._inbox) as watched:
            for op in order.row:
                if watched is not None and not self._inbox.has(op) and self._comes(op):
                    watched.waits(op)
                wanted, given = self._given(op)
                start = time.monotonic()
                with watched.doing(op, given) if watched is not None else _NOBODY as look:
                    if op.kind == "F":
                        self._forward(op, given, wanted, look)
                    else:
                        self._backward(op, given, look)
                del given
                spans.append(Span(op, start, time.monotonic()))
                trace.emit("micro_batch.ran", agent=self._me, start=start, **op._asdict())
            told = watched.told if watched is not None else 0
        for latch in self._sent:
            latch.wait()
        if self._order.train:
            gradients = Gradients()
            for sums in self._sums.values():
                for leaf, gradient in sums.items():
                    if gradient is not None:
                        gradients.add(leaf, gradient)
            self._station.commit(self._order, self._inbox, gradients)
        return Done(spans, self._losses, self._outputs, told)

    def _mode(self) -> AbstractContextManager[Any]:
        if self._order.train:
            return torch.enable_grad()
        return torch.set_grad_enabled(self._order.recorded and torch.is_grad_enabled())

    def _comes(self, op: Op) -> bool:
        """Whether an operation needs what another one makes."""
        return op.stage != (0 if op.kind == "F" else self._last)

    def _given(self, op: Op) -> tuple[int, Values]:
        """What an operation needs, and which of it is to have a gradient; it is waited for."""
        if not self._comes(op):
            self._inbox.check()
            return 0, self._inputs[op.micro_batch] if op.kind == "F" else (None,)
        found: tuple[int, Values] = self._inbox.take(op)
        return found

    def _forward(self, op: Op, given: Values, wanted: int, look: Look) -> None:
        stage, order = self._station.stages[op.stage], self._order
        entry: list[torch.Tensor | None] = []
        if order.train:
            given, entry = enter(given, wanted)
        try:
            value = stage(given, order.number, op.micro_batch)
            if op.stage < self._last:
                _check_output(value)
            elif order.train:
                value = self._loss(op.micro_batch, value)
        except Exception as error:
            error.add_note(f"that is stage {op.stage} of {self._last + 1}, on {self._me}")
            raise
        look(as_tuple(value))
        if order.train:
            self._kept[op.stage, op.micro_batch] = entry, value
        elif order.recorded and (op.stage == self._last or self._station.places[op.stage + 1] != self._me):
            group = self._station.uid, order.step, op.stage
            value = _map(
                value, lambda tensor: ordered(tensor, group, op.micro_batch) if tensor.requires_grad else tensor
            )
        if op.stage < self._last:
            self._send(op._replace(stage=op.stage + 1), as_tuple(value))
        elif not order.train:
            driver = self._agent.find(self._station.driver)
            if not driver.device_maps.get(self._me):
                value = _map(value, _on_cpu)
            self._outputs.append(value)

    def _loss(self, micro_batch: int, output: Any) -> torch.Tensor:
        order = self._order
        assert order.loss_fn is not None  # who trains has one
        sizes = order.sizes
        targets = self._targets[micro_batch] if self._targets else ()
        loss = loss_of(order.loss_fn, output, targets, sizes[micro_batch], sum(sizes), order.reduction)
        if order.finite and not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss of micro-batch {micro_batch} is {loss.item()}; its output was {shapes_of(output)}"
            )
        self._losses.append(loss.detach().cpu())
        return loss

    def _backward(self, op: Op, given: Values, look: Look) -> None:
        entry, value = self._kept.pop((op.stage, op.micro_batch))
        roots = [
            (root, gradient.to(root.device) if gradient is not None else None)
            for root, gradient in zip(as_tuple(value), given, strict=True)
            if _has_history(root) and (gradient is not None or op.stage == self._last)
        ]
        del value
        sums = self._sums[op.stage]
        try:
            if roots:
                # Added in place where they are, micro-batch after micro-batch, as in one process.
                with lent(sums.items()):
                    torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
                    for leaf in sums:
                        sums[leaf] = leaf.grad
        except Exception as error:
            error.add_note(f"in stage {op.stage}, backward of micro-batch {op.micro_batch}, on {self._me}")
            raise
        look(entry)
        if op.stage > 0:
            self._send(op._replace(stage=op.stage - 1), tuple(entry))

    def _send(self, op: Op, values: Values) -> None:
        """To the stage that needs it; where that is here, nothing is sent."""
        wanted = 0
        if self._order.train and op.kind == "F":
            wanted = sum(1 << index for index, value in enumerate(values) if _has_history(value))
            values = tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in values)
        place = self._station.places[op.stage]
        if place == self._me:
            self._inbox.put(op, (wanted, values))
            return
        if not self._agent.options.device_maps.get(place):
            values = tuple(_on_cpu(value) if isinstance(value, torch.Tensor) else value for value in values)
        args = self._station.uid, self._order.step, *op, wanted, *values  # flat: such calls are encoded fast
        latch = self._agent.begin(place, deliver, *args)
        self._sent.append(latch)
        latch.on_settle = partial(_fail_if_failed, latch, self._inbox)
        if latch.is_settled:
            latch.on_settle()


def _fail_if_failed(latch: Latch, inbox: Inbox) -> None:
    """What did not arrive is not answered either: nobody must wait for that."""
    if latch.error is not None:
        inbox.fail(latch.error)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu()


def _has_history(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _check_output(value: Any) -> None:
    if any(isinstance(part, dict | list | tuple) for part in as_tuple(value)):
        raise UsageError(f"between stages go tensors, or a tuple of tensors; this stage returned {shapes_of(value)}")


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change the tensors in a value."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        parts = [_map(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: _map(part, change) for key, part in value.items()}
    return value


# --- by calls -------------------------------------------------------------------------------------

_all: weakref.WeakKeyDictionary[Agent, weakref.WeakValueDictionary[str, Station]] = weakref.WeakKeyDictionary()


def _stations(agent: Agent) -> weakref.WeakValueDictionary[str, Station]:
    """The stations on one worker: what is delivered knows its pipeline by name, and keeps nothing alive."""
    found = _all.get(agent)
    if found is None:
        stations: weakref.WeakValueDictionary[str, Station] = weakref.WeakValueDictionary()

        def on_lost(record: Record, why: str) -> None:
            for station in list(stations.values()):
                station.on_lost(record, why)

        found = _all.setdefault(agent, stations)
        agent.on_lost(on_lost)
    return found


def build_stages(
    uid: str,
    makers: Mapping[int, torch.nn.Module | Callable[[], torch.nn.Module]],
    places: Sequence[str],
    driver: str,
    device: str,
    prefixed: bool,
    options: Mapping[str, Any],
) -> RRef[Station]:
    """Make the stages of this worker; ``prefixed`` says whether a stage's number belongs to the names in its state."""
    stages = {}
    for index, maker in makers.items():
        module = maker if isinstance(maker, torch.nn.Module) else maker()
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"stage {index} should be a module, or a function that makes one: {maker!r} is neither")
        stages[index] = Stage(module, index, device=device, prefix=f"{index}." if prefixed else "", **options)
    return RRef(Station(uid, stages, places, driver))


def run_share(rref: RRef[Station], order: Order, inputs: Sequence[Values], targets: Sequence[Values]) -> Done:
    """Do a worker's share of a step."""
    return rref.local_value().run(order, inputs, targets)


def call_station(rref: RRef[Station], method: str, *args: Any) -> Any:
    """Call a method of a station."""
    return getattr(rref.local_value(), method)(*args)


def deliver(uid: str, step: int, kind: str, stage: int, micro_batch: int, wanted: int, *values: Any) -> None:
    """What an operation here needs comes from another worker."""
    station = _stations(current_agent()).get(uid)
    if station is None:
        raise Abandoned("there is no such pipeline here (any more)")
    inbox = station.inbox(step)
    if inbox is not None:
        inbox.put(Op(kind, stage, micro_batch), (wanted, values))


def abandon_step(uid: str, step: int, context_id: int | None, why: str) -> None:
    """A step has failed elsewhere."""
    station = _stations(current_agent()).get(uid)
    if station is not None:
        station.abandon(step, context_id, why)
