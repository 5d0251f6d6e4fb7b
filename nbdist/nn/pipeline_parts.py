"""The parts of a pipeline on all of its workers, as the process uses them that made the pipeline."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nbdist.errors import NbdistError, NotInitialized, UsageError
from nbdist.nn.batches import Values
from nbdist.nn.cutting import Maker
from nbdist.nn.pipeline_part import Done, Order, build_stages, run_step
from nbdist.optim.owners import Distributed, ask_all
from nbdist.optim.saving import differing
from nbdist.rpc.agent import Agent
from nbdist.rpc.calls.collecting import Collection
from nbdist.rpc.failures import text_of_error
from nbdist.rpc.futures import Future
from nbdist.rpc.latch import Latch
from nbdist.rpc.world.clocks import offset

_ABANDON_SECONDS = 5.0  # for each worker to confirm that it has abandoned a failed step


class PipelineParts(Distributed):
    """The parts of a pipeline: makes a `PipelinePart` on each worker, and calls all of them at once.

    Every method that calls them raises NotInitialized once the world of the pipeline has ended, the error of a part,
    and `WorkerLost` if a worker is gone.
    """

    def __init__(
        self, agent: Agent, devices: Mapping[str, str], stages: Sequence[Maker], *, prefixed: bool, **options: Any
    ) -> None:
        """Build the stages; ``devices`` has the device of each worker, the rest is as for `build_stages`."""
        self.names = names = list(devices)
        self._agent = agent
        self._offsets: list[float] | None = None
        self._uid = secrets.token_hex(8)
        where = [names[stage % len(names)] for stage in range(len(stages))]
        calls = {}
        for name, own in self._by_worker(dict(enumerate(stages))).items():
            calls[name] = self._uid, own, where, agent.me.name, devices[name], prefixed, options
        super().__init__(list(ask_all(build_stages, calls).values()))

    def run(
        self,
        step: int,
        context_id: int | None,
        orders: Sequence[tuple[Order, list[Values], list[Values]]],
        on_failure: Callable[[BaseException], object],
    ) -> list[Done]:
        """Run one step, with each worker's order, inputs and targets; return the answers by worker."""
        # If a worker fails or the user interrupts, all workers abandon the step, and ``on_failure(error)`` is called.
        agent = self._agent
        outcome = Latch()
        outcome.on_interrupt = lambda: self._abandon(step, context_id, "it was interrupted")
        answers: list[Future[Done]] = []
        try:
            for (name, rref), order in zip(self._parts.items(), orders, strict=True):
                # Without a time limit: a step takes as long as it takes.
                answers.append(agent.call(name, run_step, rref, *order, timeout=0))
            Collection(answers, outcome)
            outcome.wait(agent.read_as_guest)
            return [answer.value() for answer in answers]
        except BaseException as error:  # also Ctrl-C: no worker may wait for the others for ever
            abandoned = self._abandon(step, context_id, f"{type(error).__name__}: {text_of_error(error)}")
            on_failure(error)
            if isinstance(error, Exception):  # Ctrl-C does not wait
                # so that no worker's gradients are in the context when the caller sees the error
                for latch in abandoned:
                    with contextlib.suppress(Exception):
                        latch.wait()
            raise
        finally:
            outcome.on_interrupt = None
            del answers  # else an error would keep itself alive, through its traceback and this frame

    def check_open(self) -> None:
        """Raise NotInitialized if the world has ended in which the pipeline was made, whether or not RPC runs again."""
        if self._agent.closed:
            raise NotInitialized("the RPC world in which this pipeline was made has ended: make a new pipeline")

    def clock_offsets(self) -> list[float]:
        """Return the seconds by which each worker's clock is ahead of ours; the first call measures them."""
        agent = self._agent
        self._offsets = self._offsets or [offset(agent.me, agent.find(name), agent.ask) for name in self.names]
        return self._offsets

    def call_all(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of each worker's `PipelinePart` at once, as `ask_all` does; return the answers by worker."""
        self.check_open()
        return super().call_all(method, *args)

    def call_by_stage(self, method: str, by_stage: Mapping[int, Any], *args: Any) -> None:
        """Call a method of each worker's `PipelinePart` with ``args`` and the values ``by_stage`` of its own stages."""
        self.check_open()
        self.give_all(method, self._by_worker(by_stage), *args)

    def gather(self, method: str) -> dict[int, Any]:
        """Call a method of each worker's `PipelinePart` that returns a dict by stage; return the dicts' union."""
        return {stage: value for part in self.call_all(method).values() for stage, value in part.items()}

    def load_model(self, state: Mapping[str, Any]) -> None:
        """Load the state of a model into the stages, after a check of all names and shapes."""
        shapes = self.gather("shapes")
        shape_of = {name: shape for own in shapes.values() for name, shape in own.items()}
        missing, unexpected = shape_of.keys() - state.keys(), state.keys() - shape_of.keys()
        if missing or unexpected:
            raise UsageError(
                f"this is not the state of these stages: {differing(missing, unexpected)}. Nothing was loaded"
            )
        for name, value in state.items():
            shape = shape_of[name]
            if shape is not None and shape != getattr(value, "shape", None):
                raise UsageError(
                    f"this is not the state of these stages: {name} has the shape {tuple(shape)}, and the state has "
                    f"{tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__}. Nothing was "
                    "loaded"
                )
        # From here on, workers change. A name or shape that does not fit has been found before.
        self.call_by_stage("load", {stage: {name: state[name] for name in own} for stage, own in shapes.items() if own})

    def _abandon(self, step: int, context_id: int | None, why: str) -> list[Latch]:
        """Tell all workers to abandon a step; return a latch for each worker that could be told. Does not wait."""
        args = step, context_id, f"step {step} of a pipeline failed elsewhere: {why}"
        told = []
        for name in self.names:
            with contextlib.suppress(NbdistError):  # a worker that is gone has nothing to abandon
                part = self._agent.at(name, f"pipeline {self._uid}")
                told.append(part.begin("abandon", *args, timeout=_ABANDON_SECONDS))
        return told

    def _by_worker(self, by_stage: Mapping[int, Any]) -> dict[str, dict[int, Any]]:
        """Return, for each worker, the values of the stages that live there, by stage number."""
        shares: dict[str, dict[int, Any]] = {name: {} for name in self.names}
        for stage, value in by_stage.items():
            shares[self.names[stage % len(self.names)]][stage] = value
        return shares
