"""A model cut into stages on several workers, through which micro-batches go one after the other.

This is the handle: it has references to what is on the workers (`nbdist.nn.station`), orders their share of a step
from each by one call, and puts together what they answer. Nothing goes through it from stage to stage.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from nbdist.autograd.api import recorder
from nbdist.errors import NbdistError, NotInitialized, UsageError
from nbdist.nn.batches import Values, as_tuple, join, portions, rows_of, split
from nbdist.nn.cutting import Maker, check_sharing, parts_of
from nbdist.nn.losses import Reduction, total
from nbdist.nn.placement import place_of
from nbdist.nn.randomness import random_state, restore_random_state
from nbdist.nn.reports import PipelineTimeline
from nbdist.nn.schedules import SCHEDULES, Span, Table, forward_only
from nbdist.nn.station import Done, Order, Station, abandon_step, build_stages, call_station, run_share
from nbdist.nn.watched import WatchedStep
from nbdist.optim.local import ask_all
from nbdist.optim.saving import differing
from nbdist.rpc.api import current_agent
from nbdist.rpc.clocks import offset
from nbdist.rpc.futures import Future, Latch
from nbdist.rpc.membership import WorkerInfo
from nbdist.rpc.rref import RRef

__all__ = ["Pipeline"]

_TABLES = 16
"""Schedules that a pipeline remembers: one for each number of micro-batches; the last batch may have fewer."""

_PATIENCE = 5.0
"""Seconds for which a worker is waited for that has to be told that a step has failed."""


class _Outcomes:
    """What all workers answer, or the first error among that."""

    def __init__(self, count: int) -> None:
        self._found: list[Any] = [None] * count
        self._left = count
        self._lock = threading.Lock()
        self.all = Latch()

    def add(self, index: int, future: Future[Any]) -> None:
        """One who is to answer."""
        future.add_done_callback(lambda done: self._take(index, done))

    def _take(self, index: int, done: Any) -> None:
        error = done.exception()
        if error is not None:
            self.all.try_settle(None, error)
            return
        self._found[index] = done.value()
        with self._lock:
            self._left -= 1
            over = not self._left
        if over:
            self.all.try_settle(self._found, None)


class Pipeline:
    """Stages on workers: ``Pipeline([first, second], ["worker0", "worker1"])``.

    ``model``
        a list of the stages, each a module, which is sent, or a function that makes one where it is to live; or a
        Sequential, which is cut: into as many ``stages`` as there are workers unless said otherwise, ``at`` the layers
        of these names, or by ``balance``, as `nbdist.nn.cut` has it.
    ``workers``
        names, ids, or with a device ``"worker1/cuda:0"``. Stage ``s`` lives on ``workers[s % len(workers)]``.
    ``micro_batches``
        so many slices of a batch are on their way at once; a batch of fewer rows has fewer.
    ``schedule``
        that of `train_step`: ``"gpipe"``, ``"1f1b"``, or ``"interleaved"``, for several stages on each worker. They
        differ in time and memory only.
    ``checkpoint``
        keep the inputs of stages only, and compute them once more backward.
    ``seed``
        what a stage draws at random follows from it, the step, the stage and the micro-batch, as in `Reference`.
    ``reduction``
        what a loss function given to `train_step` does with the rows of a micro-batch: their ``"mean"``, or ``"sum"``.
    """

    def __init__(
        self,
        model: torch.nn.Sequential | Sequence[Maker],
        workers: Sequence[str | int | WorkerInfo],
        *,
        stages: int | None = None,
        at: Sequence[str] = (),
        balance: Literal["count", "size", "time"] = "count",
        sample: Any = None,
        micro_batches: int = 4,
        schedule: Literal["gpipe", "1f1b", "interleaved"] | None = None,
        checkpoint: bool = False,
        seed: int = 0,
        reduction: Reduction = "mean",
    ) -> None:
        agent = current_agent()
        places = [place_of(worker) for worker in workers]
        if not places:
            raise UsageError("a pipeline needs a worker")
        parts, self._cut = parts_of(model, stages, len(places), at, balance, sample)
        if len(parts) % len(places):
            raise UsageError(f"{len(parts)} stages do not go evenly onto {len(places)} workers")
        if not isinstance(micro_batches, int) or micro_batches < 1:
            raise UsageError(
                f"a batch has at least one micro-batch: micro_batches is a whole number, not {micro_batches!r}"
            )
        if schedule is None:
            schedule = "1f1b" if len(parts) == len(places) else "interleaved"
        if schedule not in SCHEDULES:
            raise UsageError(f"the schedules are {', '.join(SCHEDULES)}; there is no {schedule!r}")
        names = [agent.find(on).name for on, _ in places]
        if len(set(names)) < len(names):
            raise UsageError(f"a worker may have several stages, but is named once: {', '.join(names)}")
        check_sharing(parts, len(names))
        # For each number of micro-batches that a batch really has: it has no more than rows.
        self._table = functools.lru_cache(_TABLES)(partial(SCHEDULES[schedule], len(names), len(parts)))
        self._table(1)  # raises if the schedule does not fit the stages
        self.stages = len(parts)
        self.workers = names
        self.micro_batches = micro_batches
        self.schedule = schedule
        self.reduction: Reduction = reduction
        self.training = True
        self._agent = agent
        self._seed = seed
        self._orders = 0
        self._steps = 0
        """How many steps have been counted; what is drawn in the next one follows from it, and it is saved."""
        self._counting = threading.Lock()
        self._last: tuple[int, list[list[Span]]] | None = None
        self._offsets: list[float] | None = None
        self._uid = secrets.token_hex(8)
        where = [names[stage % len(names)] for stage in range(len(parts))]
        options = {"seed": seed, "checkpoint": checkpoint}
        prefixed = not isinstance(model, torch.nn.Sequential)
        self._stations: list[RRef[Station]] = ask_all(
            [
                (
                    agent.membership.info_of(agent.find(name).incarnation),
                    build_stages,
                    (self._uid, _every(parts, worker, len(names)), where, agent.me.name, device, prefixed, options),
                )
                for worker, (name, (_, device)) in enumerate(zip(names, places, strict=True))
            ]
        )

    def __repr__(self) -> str:
        return (
            f"Pipeline({self.stages} stages on {', '.join(self.workers)}; {self.micro_batches} micro-batches, "
            f"{self.schedule})"
        )

    # -- computing ----------------------------------------------------------------------------

    def __call__(self, *inputs: Any) -> Any:
        """As `forward`."""
        return self.forward(*inputs)

    def forward(self, *inputs: Any) -> Any:
        """The output of a batch, computed micro-batch by micro-batch.

        Inside of a distributed autograd context it is recorded, so that a backward pass from any loss goes through all
        stages; elsewhere no gradient is kept.
        """
        sizes = portions(rows_of(inputs), self.micro_batches)
        table = forward_only(len(self.workers), self.stages, len(sizes))
        recorded = recorder().contexts.current is not None
        done = self._step(table, sizes, inputs, (), train=False, recorded=recorded)
        return join([output for part in done for output in part.outputs], sizes)

    def train_step(
        self, inputs: Any, targets: Any, loss_fn: Callable[..., torch.Tensor], *, finite: bool = True
    ) -> torch.Tensor:
        """Forward and backward of a batch by the pipeline's schedule; its loss.

        ``loss_fn(output, targets)`` is called on the last stage's worker, for each micro-batch. The gradients are the
        current distributed autograd context's, where a `DistributedOptimizer` and `clip_grad_norm_` find them. A loss
        that is not ``finite`` is an error, unless it is asked for. Several inputs, or targets, go in a tuple.
        """
        if recorder().contexts.current is None:
            raise UsageError(
                "train_step leaves its gradients in a context: call it inside of "
                "`with dist_autograd.context() as context_id:`, and optimizer.step(context_id) there"
            )
        inputs, targets = as_tuple(inputs), as_tuple(targets)
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in (*inputs, *targets)):
            raise UsageError("train_step gives its inputs and targets no gradient: detach() them, or use forward")
        if isinstance(loss_fn, torch.nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
            raise UsageError("a loss function goes by copy, and its parameters would not learn: make it the last stage")
        rows = rows_of(inputs)
        if not any(isinstance(target, torch.Tensor) for target in targets):
            raise UsageError("the targets of train_step have no tensor whose rows could go to the micro-batches")
        if rows_of(targets) != rows:
            raise UsageError(f"{rows} rows of inputs, and {rows_of(targets)} of targets")
        sizes = portions(rows, self.micro_batches)
        table = self._table(len(sizes))
        done = self._step(table, sizes, inputs, targets, train=True, recorded=False, loss_fn=loss_fn, finite=finite)
        return total([loss for part in done for loss in part.losses])

    def _step(self, table: Table, sizes: list[int], inputs: Values, targets: Values, **options: Any) -> list[Done]:
        agent = self._agent
        if agent.closed:
            raise NotInitialized("the RPC world in which this pipeline was made has ended")
        with self._counting:
            step, self._orders = self._orders, self._orders + 1
            number, self._steps = self._steps, self._steps + 1
        last = (self.stages - 1) % len(self.workers)
        loss_fn = options.pop("loss_fn", None)
        outcome = _Outcomes(len(self.workers))
        context = recorder().contexts.current
        context_id = context.id if context is not None else None
        outcome.all.on_interrupt = lambda: self._abandon(step, context_id, "it was interrupted")
        # Split here: no micro-batch on a worker has a history in common with another one.
        given, wanted = split(inputs, sizes), split(targets, sizes)
        watched = WatchedStep(table, self.workers, self.stages) if options["train"] else None
        try:
            for worker, (name, rref) in enumerate(zip(self.workers, self._stations, strict=True)):
                order = Order(
                    step,
                    number,
                    table[worker],
                    sizes,
                    reduction=self.reduction,
                    loss_fn=loss_fn if worker == last else None,
                    head=watched.head if watched is not None else None,
                    **options,
                )
                args = rref, order, given if worker == 0 else [], wanted if worker == last else []
                outcome.add(worker, agent.call(name, run_share, *args, timeout=0))
            done: list[Done] = outcome.all.wait(agent.read_as_guest)
        except BaseException as error:
            abandoned = self._abandon(step, context_id, f"{type(error).__name__}: {error}")
            if watched is not None:
                watched.end(error, {})
            if isinstance(error, Exception):
                for latch in abandoned:  # so that nothing of the step is in the context when its error is seen
                    with contextlib.suppress(Exception):
                        latch.wait()
            raise
        finally:
            outcome.all.on_interrupt = None
        if watched is not None:
            told = {agent.find(name).incarnation: part.told for name, part in zip(self.workers, done, strict=True)}
            watched.end(None, told)
        self._last = number, [part.spans for part in done]
        return done

    def _abandon(self, step: int, context_id: int | None, why: str) -> list[Latch]:
        args = self._uid, step, context_id, f"step {step} of a pipeline failed elsewhere: {why}"
        told = []
        for name in self.workers:
            with contextlib.suppress(NbdistError):  # whoever is gone has nothing that goes on
                told.append(self._agent.begin(name, abandon_step, *args, timeout=_PATIENCE))
        return told

    # -- what it is made of -------------------------------------------------------------------

    def parameter_rrefs(self) -> list[RRef[Any]]:
        """References to all parameters, stage by stage, as `DistributedOptimizer` takes them."""
        found = self._gather("parameter_rrefs")
        return [rref for stage in range(self.stages) for rref in found[stage]]

    def train(self, mode: bool = True) -> Pipeline:
        """Put all stages in training mode, or out of it."""
        self._all("train", mode)
        self.training = mode
        return self

    def eval(self) -> Pipeline:
        """Put all stages in evaluation mode."""
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """Return what a pipeline needs to go on from here with the same numbers, on whichever workers.

        ``"model"`` has the state of all stages, on the CPU, with the names of the model that was cut, or of the list:
        ``model.load_state_dict(pipe.state_dict()["model"])`` gives it to a model in one process. ``"steps"`` counts the
        calls of `forward` and `train_step` so far; with ``"seed"`` it decides what stages draw. ``"cut"`` says at which
        layer each stage begins. ``"random"`` has the random generators (torch's, Python's, numpy's) of the caller's
        process and of each stage's.

        `torch.save` writes all of it, and ``torch.load(weights_only=True)`` reads it.
        """
        found, generators = self._gather("state"), self._gather("random_states")
        with self._counting:
            steps = self._steps
        return {
            "model": {name: value for stage in range(self.stages) for name, value in found[stage].items()},
            "steps": steps,
            "seed": self._seed,
            "cut": list(self._cut),
            "random": {
                "driver": random_state(),
                "stages": [generators[stage] for stage in range(self.stages)],
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` returned, here or of the same model on other workers.

        The pipeline takes the seed and the count of steps from the state, and the caller's process and the workers
        take the states of the random generators. A worker with several stages takes those of its first one. For the
        weights alone there is `load_model`.

        Raises:
            UsageError: the state is of another model, of one that was cut elsewhere, or has no count of steps. Nothing
                has been changed.
        """
        if not isinstance(state, Mapping) or not {"model", "steps", "seed", "cut", "random"} <= state.keys():
            raise UsageError(
                "this is not what a pipeline's state_dict() returns. If it is the state of a model alone, as pipelines "
                "returned it formerly, it lacks the count of steps, which decides what the stages draw at random: give "
                "weights alone with load_model(state)"
            )
        if list(state["cut"]) != self._cut:
            raise UsageError(
                f"the state is of a pipeline whose stages begin at {', '.join(state['cut'])}; those of this one begin "
                f"at {', '.join(self._cut)}, and would draw other numbers. Cut the model in the same way (several "
                'stages may be on one worker), or give the weights alone with load_model(state["model"])'
            )
        self.load_model(state["model"])
        generators = dict(enumerate(state["random"]["stages"]))
        self._give("restore_random", generators, state["seed"])
        restore_random_state(state["random"]["driver"])
        self._seed = state["seed"]
        with self._counting:
            self._steps = state["steps"]

    def load_model(self, state: Mapping[str, Any]) -> None:
        """Give all stages the weights and buffers of a model's ``state_dict()``; the count of steps stays.

        Raises:
            UsageError: a name is missing, or unknown. Nothing has been changed.
        """
        names = self._gather("names")
        stage_of = {name: stage for stage, own in names.items() for name in own}
        missing, unexpected = stage_of.keys() - state.keys(), state.keys() - stage_of.keys()
        if missing or unexpected:
            raise UsageError(f"this is not the state of these stages: {differing(missing, unexpected)}")
        by_stage: dict[int, dict[str, Any]] = {}
        for name, value in state.items():
            by_stage.setdefault(stage_of[name], {})[name] = value
        self._give("load", by_stage)

    def timeline(self) -> PipelineTimeline:
        """The last step as it ran, beside the ideal."""
        if self._last is None:
            raise UsageError("no step has been done yet")
        step, rows = self._last
        offsets = self._offsets = self._offsets or [
            offset(self._agent.me, self._agent.find(name), self._agent.ask) for name in self.workers
        ]
        moved = [
            [Span(op, start - ahead, end - ahead) for op, start, end in row]
            for row, ahead in zip(rows, offsets, strict=True)
        ]
        return PipelineTimeline(self.workers, self.stages, moved, step)

    def _all(self, method: str, *args: Any) -> list[Any]:
        return ask_all([(rref.owner(), call_station, (rref, method, *args)) for rref in self._stations])

    def _give(self, method: str, by_stage: Mapping[int, Any], *args: Any) -> None:
        """Call a method of all stations, each with the part for its stages."""
        ask_all(
            [
                (rref.owner(), call_station, (rref, method, *args, _every(by_stage, worker, len(self.workers))))
                for worker, rref in enumerate(self._stations)
            ]
        )

    def _gather(self, method: str) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for part in self._all(method):
            found.update(part)
        return found


def _every(parts: Sequence[Any] | Mapping[int, Any], worker: int, workers: int) -> dict[int, Any]:
    """Those of the stages that are on a worker."""
    items = parts.items() if isinstance(parts, Mapping) else enumerate(parts)
    return {stage: part for stage, part in items if stage % workers == worker}
