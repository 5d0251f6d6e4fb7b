"""A pipeline's part on one worker: the stages that live there, and their share of each step.

The owner of the pipeline calls `run_step` on every worker once a step. The call runs the worker's row of the
schedule, one operation after the other. Activations and gradients go directly from worker to worker, by calls of
`deliver`, and wait in the step's `Inbox` until the operation that needs them runs::

    the step's state here    begins with                          run_step    deliver      abandon
    ───────────────────────  ───────────────────────────────────  ──────────  ───────────  ─────────────────
    unknown                                                       runs        is stored    step is over
    open (`_inboxes`)        the first `deliver`, or `run_step`   runs        is stored    step is over
    over (`_over`)           the end of `run_step`, or abandon    raises      is dropped   stays over

The inbox of a step that is over fails, which ends the step's `run_step` if that still runs. In every state, `abandon`
withdraws the gradients that this worker has added to the context for the step.

`Pipeline.train_step` does not record its calls for distributed autograd. Each stage keeps the graph of each
micro-batch, which ends at the stage's input (`nbdist.nn.shared_inputs`), until the gradient of its output arrives. Then
the stage runs backward and sends the gradient of its input on. So the schedule fixes the order of all sums.
`Pipeline.forward` cannot know what the user will do with its output. So its calls are recorded like all other calls in
a context, and `nbdist.autograd.passes.ordering` fixes the order of the sums.
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
from torch.nn.parameter import is_lazy

from nbdist import trace
from nbdist.autograd.api import recorder
from nbdist.autograd.graph.messages import Head
from nbdist.autograd.passes.claims import lent
from nbdist.autograd.passes.gradient_store import GradientStore
from nbdist.autograd.passes.local_passes import local_passes
from nbdist.autograd.passes.ordering import ordered
from nbdist.errors import UsageError, WorkerLost
from nbdist.gpus import spans
from nbdist.nn.batches import Values, as_tuple, wants_grad
from nbdist.nn.inbox import Abandoned, Inbox
from nbdist.nn.losses import Reduction, loss_of
from nbdist.nn.randomness import random_state, restore_random_state
from nbdist.nn.schedules import KINDS, Op, OpTimes, goes_to
from nbdist.nn.shared_inputs import SharedInputs, enter
from nbdist.nn.stage import Stage, shapes_of
from nbdist.nn.watched import Look, WatchedShare
from nbdist.optim.local import on_cpu
from nbdist.optim.parameters import name_parameter
from nbdist.rpc.api import current_agent
from nbdist.rpc.devices import results_stay_on_gpus, takes_gpu_tensors
from nbdist.rpc.latch import Latch
from nbdist.rpc.references.rref import RRef
from nbdist.wire.messages import Record

# Finished steps to remember, to drop their late deliveries. No delivery arrives as late as this.
_STEPS_REMEMBERED = 1000
_NOT_WATCHED: AbstractContextManager[Look] = nullcontext(lambda made: None)


@dataclass(frozen=True, slots=True)
class Order:
    """One worker's orders for one step."""

    # An id that occurs once in the life of a pipeline: deliveries and abandonments name it.
    step: int
    # The count of steps, which seeds the stages' random draws; loading a state sets it to the saved count.
    number: int
    row: list[Op]  # of the schedule
    sizes: list[int]  # the rows of each micro-batch
    reduction: Reduction
    train: bool  # True for `Pipeline.train_step`, False for `Pipeline.forward`
    recorded: bool  # True to record a forward step in the current distributed autograd context
    finite: bool = True  # raise an error for a loss that is NaN or infinite
    loss_fn: Callable[..., torch.Tensor] | None = None  # only for the last stage's worker, in training
    # The step's id and its watch, which the reports to the watcher name; None if nobody watches the context.
    head: Head | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The result of one worker's share of a step."""

    spans: list[OpTimes]  # by the worker's own monotonic clock
    losses: list[torch.Tensor] = field(default_factory=list)  # shares, if the last stage is here and the step trains
    outputs: list[Any] = field(default_factory=list)  # if the last stage is here and the step does not train
    told: int = 0  # messages that this worker has sent to the step's watcher


class PipelinePart:
    """The stages of one pipeline on one worker.

    A reference of the pipeline's owner keeps a part alive. Calls of several threads use it: `run` blocks one thread
    for each step, and the deliveries come on others.
    """

    def __init__(self, uid: str, stages: dict[int, Stage], places: Sequence[str], driver: str) -> None:
        """Register the part on this worker, and give its parameters their names; stage ``s`` is on ``places[s]``."""
        self.uid = uid
        self.stages = stages
        self.places = places
        self.driver = driver
        self.agent = current_agent()
        self._needed = {self.agent.find(name).incarnation for name in {driver, *places}}
        self._inboxes: dict[int, Inbox] = {}
        self._over: OrderedDict[int, str] = OrderedDict()
        self._lock = threading.Lock()
        for stage in reversed(stages.values()):  # so a shared parameter ends up with its name in the first stage
            for name, parameter in reversed(list(stage.module.named_parameters())):
                name_parameter(parameter, stage.prefix + name)
        self.agent.named.publish(f"pipeline {uid}", self, "deliver", "abandon")
        tell = partial(_tell_loss, weakref.ref(self))  # weak, or the agent would keep the part
        for forget in self.agent.on_lost(tell), self.agent.at_close(partial(tell, self.agent.me, "has ended")):
            weakref.finalize(self, forget).atexit = False

    # -- a step -------------------------------------------------------------------------------

    def run(self, order: Order, inputs: Sequence[Values], targets: Sequence[Values]) -> Done:
        """Run this worker's share of a step; return a `Done`: when each operation ran, and the losses or outputs."""
        # Raises `Abandoned` if the step has failed elsewhere. The inputs are empty on workers that do not need them.
        with self._lock:
            if order.step in self._over:
                raise Abandoned(f"{self._over[order.step]} (this worker had not begun the step)")
            inbox = self._inboxes.setdefault(order.step, Inbox())
        # `on_lost` may have been called for a worker that is gone, or for this one, before the inbox existed.
        if self.agent.closed:
            self.on_lost(self.agent.me, "has ended")
        if gone := [each for each in self._needed if self.agent.member(each) is None]:
            names = ", ".join(map(self.agent.name_of, gone))
            inbox.fail(WorkerLost(f"{names} is gone; the step of a pipeline needed it. Make a new pipeline"))
        try:
            return _Step(self, order, inbox, inputs, targets).run()
        finally:
            with self._lock:
                self._end(order.step, f"step {order.step} of the pipeline is over")

    def deliver(self, step: int, kind: str, stage: int, micro_batch: int, wanted: int, *values: Any) -> None:
        """Store the input of an operation, sent by the worker of a neighbouring stage, in the step's inbox."""
        # Bit ``i`` of ``wanted`` says whether value ``i`` needs a gradient.
        if (inbox := self.inbox(step)) is not None:
            inbox.put(Op(kind, stage, micro_batch), (wanted, values))

    def inbox(self, step: int) -> Inbox | None:
        """Return the `Inbox` that keeps the step's inputs from other workers; None if the step is over."""
        with self._lock:
            inbox = self._inboxes.get(step)
            if inbox is None and step not in self._over:  # a delivery may arrive before the step's own thread
                inbox = self._inboxes[step] = Inbox()
            return inbox

    def commit(self, order: Order, inbox: Inbox, gradients: GradientStore) -> None:
        """Add the gradients of a finished share to the current context; raise the error of a step that has failed."""
        if (context := recorder().contexts.current) is None:
            raise UsageError(
                "the distributed autograd context ended during train_step, so the gradients have no place: leave the "
                "context's with block only after train_step has returned"
            )
        with self._lock:  # an `abandon` comes first, and `check` raises; or later, and withdraws the gradients
            inbox.check()
            context.contribute((self.uid, order.step), gradients)

    def abandon(self, step: int, context_id: int | None, why: str) -> None:
        """Give up a step that failed elsewhere: wake the thread that runs it, or never begin it; drop its gradients."""
        with self._lock:
            self._end(step, why)
            context = recorder().contexts.find(context_id) if context_id is not None else None
            if context is not None:
                context.withdraw((self.uid, step))

    def on_lost(self, record: Record, why: str) -> None:
        """Fail the running steps if an agent that is gone, maybe this one, has stages of this pipeline or owns it."""
        if record.incarnation in self._needed:
            with self._lock:
                inboxes = list(self._inboxes.values())
            for inbox in inboxes:
                inbox.fail(WorkerLost(f"{record.name} {why}; the step of a pipeline needed it. Make a new pipeline"))

    def _end(self, step: int, why: str) -> None:
        """Mark a step as over, so that late deliveries are dropped; the caller holds the part's lock."""
        if (inbox := self._inboxes.pop(step, None)) is not None:
            inbox.fail(Abandoned(why))  # after the end of `run_step`, too: else its error would keep the values
        self._over.setdefault(step, why)  # the first reason is the one that a later `run` raises
        if len(self._over) > _STEPS_REMEMBERED:
            self._over.popitem(last=False)

    # -- its modules --------------------------------------------------------------------------

    def parameter_rrefs(self) -> dict[int, list[RRef[Any]]]:
        """Return references to the parameters, by stage; one that stages share is in the first one's list only."""
        # The first stage comes last, and so counts.
        first = {id(parameter): index for index in reversed(self.stages) for parameter in self.stages[index].parameters}
        return {
            index: [RRef(parameter) for parameter in stage.parameters if first[id(parameter)] == index]
            for index, stage in self.stages.items()
        }

    def train(self, mode: bool) -> None:
        """Put the modules into training or evaluation mode."""
        for stage in self.stages.values():
            stage.module.train(mode)

    def state(self) -> dict[int, dict[str, Any]]:
        """Return the state of each stage, with the names that the model has for it, tensors on the CPU."""
        return {
            index: {stage.prefix + name: value for name, value in on_cpu(stage.module.state_dict()).items()}
            for index, stage in self.stages.items()
        }

    def shapes(self) -> dict[int, dict[str, torch.Size | None]]:
        """Return the shape of each tensor in the state of each stage, by name as in `state`; None for other values."""
        # A parameter of a lazy module has no shape before the module's first run.
        return {
            index: {
                stage.prefix + name: None if is_lazy(value) else getattr(value, "shape", None)
                for name, value in stage.module.state_dict().items()
            }
            for index, stage in self.stages.items()
        }

    def load(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Load states, as `state` returned them, into their stages. Raises torch's RuntimeError if one does not fit."""
        for index, state in states.items():
            stage = self.stages[index]
            stage.module.load_state_dict({name.removeprefix(stage.prefix): value for name, value in state.items()})

    def random_states(self) -> dict[int, dict[str, Any]]:
        """Return, for each stage, the states of this process's random generators, with the generator of its GPU."""
        return {index: random_state(stage.device) for index, stage in self.stages.items()}

    def restore_random(self, seed: int, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Set the stages' seed, and this process's random generators to the states saved for them."""
        # The process has one set of generators, so the last state that is set counts: the first stage's.
        for index in sorted(self.stages, reverse=True):
            self.stages[index].seed = seed
            restore_random_state(states[index], self.stages[index].device)


class _Step:
    """One worker's share of one step, run by one thread."""

    def __init__(
        self, part: PipelinePart, order: Order, inbox: Inbox, inputs: Sequence[Values], targets: Sequence[Values]
    ) -> None:
        self._part = part
        self._agent = part.agent
        self._me = self._agent.me.name
        self._order = order
        self._inbox = inbox
        self._stages = len(part.places)
        self._targets = targets
        # By stage and micro-batch: the gradients of a forward's inputs, and its output, until the backward.
        self._kept: dict[tuple[int, int], tuple[list[torch.Tensor | None], Any]] = {}
        # By stage: the sum of the gradients so far of each parameter that is not frozen.
        self._sums: dict[int, dict[torch.Tensor, torch.Tensor | None]] = {
            index: dict.fromkeys((p for p in stage.parameters if p.requires_grad), None)
            for index, stage in part.stages.items()
        }
        self._sent: list[Latch] = []
        self._losses: list[torch.Tensor] = []
        self._outputs: list[Any] = []
        for micro_batch, values in enumerate(inputs):
            inbox.put(Op("F", 0, micro_batch), (0, values))

    def run(self) -> Done:
        """Run all operations of this worker, in order; add the gradients of a training step that succeeds."""
        try:
            return self._run()
        finally:  # the traceback of a kept error holds this object: drop the tensors and break the cycles
            self._kept.clear()
            self._sums.clear()
            self._targets = ()
            for latch in self._sent:
                latch.on_settle = None  # it holds the latch

    def _run(self) -> Done:
        times = []
        order, places = self._order, self._part.places
        with self._mode(), WatchedShare.of(order.head, order.row, places, self._me, self._inbox) as watched:
            for op in order.row:
                if watched is not None and not self._inbox.has(op):
                    watched.waits(op)
                wanted, given = self._inbox.take(op)
                start = time.monotonic()
                device = self._part.stages[op.stage].device
                span = spans.begin(device) if trace.listeners else None
                with watched.doing(op, given, device) if watched is not None else _NOT_WATCHED as look:
                    if op.kind == "F":
                        self._forward(op, given, wanted, look)
                    else:
                        self._backward(op, given, look)
                del given  # or it would stay during the wait for the next input
                times.append(OpTimes(op, start, time.monotonic()))
                if trace.listeners:
                    gpu = span.end() if span is not None else None
                    ran = op._replace(kind=KINDS[op.kind].name)
                    trace.emit("micro_batch.ran", agent=self._me, start=start, gpu=gpu, **ran._asdict())
            told = watched.told if watched is not None else 0
        for latch in self._sent:  # before `commit`: a delivery that failed makes the step fail
            latch.wait()
        if self._order.train:
            gradients = GradientStore()
            for sums in self._sums.values():
                for leaf, gradient in sums.items():
                    if gradient is not None:
                        gradients.add(leaf, gradient)
            self._part.commit(self._order, self._inbox, gradients)
        return Done(times, self._losses, self._outputs, told)

    def _mode(self) -> AbstractContextManager[Any]:
        """Return a block that sets the grad mode: on if the step trains, or is recorded and the mode is on now."""
        if self._order.train:
            return torch.enable_grad()
        return torch.set_grad_enabled(self._order.recorded and torch.is_grad_enabled())

    def _forward(self, op: Op, given: Values, wanted: int, look: Look) -> None:
        """Run one stage on one micro-batch; send the output on, or keep it as the loss or the output of the step."""
        stage, order, after = self._part.stages[op.stage], self._order, goes_to(op, self._stages)
        entry: list[torch.Tensor | None] = []
        if order.train:
            given, entry = enter(given, wanted)
        shared = SharedInputs(given if order.train else ())
        try:
            value = stage(given, order.number, op.micro_batch)
            shared.check()
            if after is not None:
                _check_output(value)
            elif order.train:
                value = self._loss(op.micro_batch, value)
        except Exception as error:  # the user's module or loss: the note says where it was
            error.add_note(f"this was stage {op.stage} of {self._stages}, on {self._me}")
            raise
        look(as_tuple(value))
        if order.train:
            self._kept[op.stage, op.micro_batch] = entry, value
        elif order.recorded and (after is None or self._part.places[after.stage] != self._me):
            # The output leaves this worker: else its gradients would be added in the order in which they arrive.
            group = self._part.uid, order.step, op.stage
            value = _map(
                value, lambda tensor: ordered(tensor, group, op.micro_batch) if tensor.requires_grad else tensor
            )
        if after is not None:
            self._send(after, as_tuple(value))
        elif order.train:
            self._send(op._replace(kind="B"), (None,))  # the backward begins at the loss, which needs no gradient
        else:
            driver = self._agent.find(self._part.driver)
            if not results_stay_on_gpus(driver, self._agent.me):
                value = _map(value, torch.Tensor.cpu)
            self._outputs.append(value)

    def _loss(self, micro_batch: int, output: Any) -> torch.Tensor:
        """Return a micro-batch's share of the batch's loss, with its graph, and keep a detached copy for the result."""
        order = self._order
        assert order.loss_fn is not None  # the last stage's worker gets one if the step trains
        sizes = order.sizes
        targets = self._targets[micro_batch] if self._targets else ()
        if isinstance(output, torch.Tensor):
            targets = tuple(_map(targets, lambda target: target.to(output.device)))
        loss = loss_of(order.loss_fn, output, targets, sizes[micro_batch], sum(sizes), order.reduction)
        if order.finite and not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss of micro-batch {micro_batch} is {loss.item()}; the output of the model was "
                f"{shapes_of(output)}. If such a loss is all right, call train_step with finite=False"
            )
        self._losses.append(loss.detach().cpu())
        return loss

    def _backward(self, op: Op, given: Values, look: Look) -> None:
        """Run one stage backward for one micro-batch; add up its parameters' gradients, send its inputs'."""
        # ``given`` has the gradient of each of the stage's outputs, or None for an output without one and for the loss.
        entry, value = self._kept.pop((op.stage, op.micro_batch))
        roots = [
            (root, gradient.to(root.device) if gradient is not None else None)
            for root, gradient in zip(as_tuple(value), given, strict=True)
            if wants_grad(root) and (gradient is not None or op.stage == self._stages - 1)
        ]
        del value
        sums = self._sums[op.stage]
        try:
            if roots:
                # The sums lie in .grad meanwhile, so torch adds each micro-batch to them in place, as in one process.
                with lent(sums.items()), local_passes.unseen():
                    torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
                    for leaf in sums:
                        sums[leaf] = leaf.grad
        except Exception as error:  # whatever a function of the module raises: the note says where it was
            error.add_note(f"in stage {op.stage}, backward of micro-batch {op.micro_batch}, on {self._me}")
            raise
        look(entry)
        if (after := goes_to(op, self._stages)) is not None:
            self._send(after, tuple(entry))

    def _send(self, op: Op, values: Values) -> None:
        """Give an operation its input: put it into the inbox if its stage is here, else send it to its worker."""
        wanted = 0
        if self._order.train and op.kind == "F":
            wanted = sum(1 << index for index, value in enumerate(values) if wants_grad(value))
            values = _each_once(values, torch.Tensor.detach)  # the graph ends here: see `nbdist.nn.shared_inputs`
        place = self._part.places[op.stage]
        if place == self._me:
            self._inbox.put(op, (wanted, values))
            return
        if any(isinstance(value, torch.Tensor) and not value.is_cpu for value in values) and not takes_gpu_tensors(
            self._agent.me, self._agent.find(place)
        ):
            values = _each_once(values, torch.Tensor.cpu)
        args = self._order.step, *op, wanted, *values  # flat: such calls are encoded fast
        try:
            latch = self._agent.at(place, f"pipeline {self._part.uid}").begin("deliver", *args)
        except WorkerLost as error:
            self._inbox.fail(error.with_traceback(None))  # its frames would keep the values alive
            return
        self._sent.append(latch)
        latch.on_settle = partial(_fail_if_failed, latch, self._inbox)
        if latch.is_settled:  # it may have settled before it had `on_settle`
            latch.on_settle()


def _fail_if_failed(latch: Latch, inbox: Inbox) -> None:
    """Fail the step if a delivery failed: the worker that did not get it will never send anything back."""
    if latch.error is not None:
        inbox.fail(latch.error)


def _each_once(values: Values, function: Callable[[torch.Tensor], torch.Tensor]) -> Values:
    """Return the values with the function applied to each tensor; a tensor that occurs twice stays one object."""
    made = {id(value): function(value) for value in values if isinstance(value, torch.Tensor)}
    return tuple(made.get(id(value), value) for value in values)


def _check_output(value: Any) -> None:
    """Raise `UsageError` if a stage returns nested containers: only the tensors at the top are sent with gradients."""
    if any(isinstance(part, dict | list | tuple) for part in as_tuple(value)):
        raise UsageError(
            f"this stage returned {shapes_of(value)}: a stage before the last must return a tensor, or a flat tuple "
            "of tensors and numbers"
        )


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with ``change`` applied to the tensors in it, also to those in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        parts = [_map(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: _map(part, change) for key, part in value.items()}
    return value


# --- functions that other agents call ---------------------------------------------------------------


def _tell_loss(part: weakref.ref[PipelinePart], record: Record, why: str) -> None:
    if (found := part()) is not None:
        found.on_lost(record, why)


def build_stages(
    uid: str,
    makers: Mapping[int, torch.nn.Module | Callable[[], torch.nn.Module]],
    places: Sequence[str],
    driver: str,
    device: str,
    prefixed: bool,
    options: Mapping[str, Any],
) -> RRef[PipelinePart]:
    """Make this worker's stages and a part for them, and return a reference to the part."""
    stages = {}
    for index, maker in makers.items():
        module = maker if isinstance(maker, torch.nn.Module) else maker()
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"stage {index} should be a module, or a function that makes one: {maker!r} is neither")
        prefix = f"{index}." if prefixed else ""
        stages[index] = Stage(module, index, device=torch.device(device), prefix=prefix, **options)
    return RRef(PipelinePart(uid, stages, places, driver))


def run_step(rref: RRef[PipelinePart], order: Order, inputs: Sequence[Values], targets: Sequence[Values]) -> Done:
    """Run a worker's share of one step, and return its result; the pipeline's owner calls this on each worker."""
    return rref.local_value().run(order, inputs, targets)
