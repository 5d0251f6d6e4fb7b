"""A model cut into stages on several workers; the micro-batches of a batch flow through the stages.

::

    Pipeline ─── `run_step`, with an `Order`: the worker's row of the schedule ───┐
       ▲                                                                          │  one call to each worker
       └──────── `Done`: losses, outputs, times ───────────────────────────┐      │  in each step
                                                                           │      ▼
    part of worker0 ── `deliver` ──> part of worker1 ── `deliver` ──> part of worker2 ──> …

`Pipeline` is the handle. It cuts and joins batches; `PipelineParts` calls the `PipelinePart` on each worker, once in
each step. If one part fails, all workers are told to abandon the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from nbdist.amounts import counted
from nbdist.autograd.api import recorder
from nbdist.autograd.passes.context import Context
from nbdist.errors import EncodeError, UsageError
from nbdist.nn.batches import Values, as_tuple, check_micro_batches, join, portions, rows_of, split, training_rows
from nbdist.nn.cutting import Maker, check_sharing, parts_of
from nbdist.nn.losses import Reduction, check_loss_fn, check_reduction, total
from nbdist.nn.pipeline_part import Done, Order
from nbdist.nn.pipeline_parts import PipelineParts
from nbdist.nn.placement import place_of
from nbdist.nn.randomness import random_state, restore_random_state
from nbdist.nn.schedules import OpTimes, Table, forward_only, tables_of
from nbdist.nn.timeline import PipelineTimeline
from nbdist.nn.watched import WatchedStep
from nbdist.rpc.api import current_agent
from nbdist.rpc.core.members import WorkerInfo
from nbdist.rpc.references.rref import RRef


class Pipeline:
    """Train or run a model whose stages live on several workers, a batch sliced into micro-batches.

    Outputs, losses and gradients are the same as with `Reference`, to the last bit, whatever the schedule. Several
    threads may use one pipeline. `forward` and `train_step` wait without a time limit, the other methods as long as
    calls may take by default (`RpcTimeout`). After the error of a stage, the next step works. A worker of the pipeline
    that dies ends the running step with `WorkerLost`, and the pipeline cannot be used any more: make a new one, and
    give it a state that was saved before. The notebook ``04_pipeline_resnet50.ipynb`` shows all of this.

    Args:
        model: a Sequential, which is cut into stages; or a list of the stages. Each stage of a list is a module, which
            is sent to its worker, or a function that is called on the worker and makes the module there.
        workers: names or ids of workers, or names with a device, such as ``"worker1/cuda:0"``; each worker once. Stage
            ``s`` lives on ``workers[s % len(workers)]``, so the number of stages must be a multiple of the workers.
        stages: the number of stages to cut a Sequential into; by default, one for each worker.
        at: names of the layers of a Sequential at which the second and later stages begin, instead of ``stages``.
        balance: the cost that becomes about the same for all stages of a Sequential: see `nbdist.nn.cut`.
        sample: for ``balance="time"``, an input of the model, or a tuple of inputs. The layers are timed on it here.
        micro_batches: the number of slices of a batch. A batch of fewer rows has one micro-batch for each row.
        schedule: the order of the forwards and backwards in `train_step`: ``"gpipe"``, ``"1f1b"`` (the default for one
            stage on each worker), or ``"interleaved"`` (the default for several). They differ in time and memory only.
        checkpoint: keep only the inputs of the stages, and compute the rest again in the backward pass.
        seed: seeds the stages' random draws, together with the step, the stage and the micro-batch.
        reduction: the way in which the loss function of `train_step` combines its rows: ``"mean"`` or ``"sum"``.

    Raises:
        UsageError: the arguments do not fit together, a value is not possible, or a worker is not in this world.
        WorkerLost: a worker died, or left; `StepFailed` if the stages could not be made on several workers.
        NotInitialized: RPC is not running in this process.
        Exception: a function that makes a stage raised it on its worker.

    Example:
        >>> stages = [torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)]
        >>> pipe = Pipeline(stages, ["worker0", "worker1"], micro_batches=2)
        >>> optimizer = nbdist.optim.DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.1)
        >>> with dist_autograd.context() as context_id:
        ...     loss = pipe.train_step(torch.ones(8, 4), torch.zeros(8, 2), torch.nn.functional.mse_loss)
        ...     optimizer.step(context_id)
        >>> pipe(torch.ones(8, 4)).shape
        torch.Size([8, 2])
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
        self._agent = current_agent()
        places = [place_of(worker) for worker in workers]
        if not places:
            raise UsageError("a pipeline needs a worker: name at least one, as in Pipeline(model, ['worker0'])")
        parts, self._cut = parts_of(model, stages, len(places), at, balance, sample)
        self.micro_batches = check_micro_batches(micro_batches)
        self.reduction: Reduction = check_reduction(reduction)
        if schedule is None:
            schedule = "1f1b" if len(parts) == len(places) else "interleaved"
        self._table = tables_of(schedule, len(places), len(parts))
        names = self.workers = [self._agent.find(on).name for on, _ in places]
        if len(set(names)) < len(names):
            raise UsageError(
                f"these workers are not all different: {', '.join(names)}. A worker is named once, also if it has "
                "several stages: stage s goes to workers[s % len(workers)]"
            )
        check_sharing(parts, len(names))
        self.stages = len(parts)
        self.schedule = schedule
        self.training = True
        self._seed = seed
        self._orders = 0
        # The number of steps so far: it is saved, and seeds the next step's draws. `load_state_dict` sets it back,
        # unlike `_orders`, which numbers the steps that are sent to the parts.
        self._steps = 0
        self._counting = threading.Lock()
        self._last: tuple[int, list[list[OpTimes]]] | None = None
        devices = dict(zip(names, (device for _, device in places), strict=True))
        prefixed = not isinstance(model, torch.nn.Sequential)
        self._parts = PipelineParts(self._agent, devices, parts, prefixed=prefixed, seed=seed, checkpoint=checkpoint)

    def __repr__(self) -> str:
        return (
            f"Pipeline({counted(self.stages, 'stage')} on {', '.join(self.workers)}; "
            f"{counted(self.micro_batches, 'micro-batch', 'micro-batches')}, {self.schedule})"
        )

    def __reduce__(self) -> Any:
        raise EncodeError(
            "a pipeline stays in the process that made it: it cannot be sent, copied or saved. Save its state, "
            "`torch.save(pipe.state_dict(), file)`, and load that into a new pipeline with `load_state_dict`"
        )

    # -- computing ----------------------------------------------------------------------------

    def __call__(self, *inputs: Any) -> Any:
        """Call `forward`."""
        return self.forward(*inputs)

    def forward(self, *inputs: Any) -> Any:
        """Return the output of a batch, computed micro-batch by micro-batch and joined by rows.

        Inside a distributed autograd context the computation is recorded, so a backward pass from any loss of the
        output goes through all stages. Outside of a context no graph is kept, and the output does not require grad.
        Ctrl-C ends the step on all workers.

        Args:
            inputs: the arguments of the first stage. The tensors among them are split by rows, their first dimension;
                every micro-batch gets all other values.

        Returns:
            The last stage's output for the whole batch: tensors with the rows of the batch, scalar tensors stacked to
            one row for each micro-batch, any other value as a list by micro-batch; tuples, lists and dicts of them.

        Raises:
            UsageError: the batch has no rows to split, or an output has other rows than its micro-batch.
            WorkerLost: one or more workers of the pipeline died, or left. It cannot be used any more.
            NotInitialized: RPC, or the world in which the pipeline was made, has ended.
            Exception: a stage raised it; its notes name the stage, the micro-batch, the worker and the shapes.

        Example:
            >>> pipe = Pipeline([torch.nn.Identity(), torch.nn.Identity()], ["worker0", "worker1"], micro_batches=2)
            >>> with dist_autograd.context() as context_id:
            ...     x = torch.ones(3, requires_grad=True)
            ...     dist_autograd.backward(context_id, [pipe.forward(x).sum()])
            ...     dist_autograd.get_gradients(context_id)[x]
            tensor([1., 1., 1.])
        """
        sizes = portions(rows_of(inputs), self.micro_batches)
        table = forward_only(len(self.workers), self.stages, len(sizes))
        context = recorder().contexts.current
        done = self._step(table, sizes, inputs, (), context, train=False, recorded=context is not None)
        return join([output for part in done for output in part.outputs], sizes)

    def train_step(
        self, inputs: Any, targets: Any, loss_fn: Callable[..., torch.Tensor], *, finite: bool = True
    ) -> torch.Tensor:
        """Run forward and backward of a batch in the schedule's order, and return the loss, detached.

        The gradients of the parameters are added to the current distributed autograd context, where
        `DistributedOptimizer` and `clip_grad_norm_` find them; a failed step adds none. Inputs and targets get no
        gradients: for that, use `forward` and a backward pass. Ctrl-C ends the step on all workers.

        Args:
            inputs: a tensor, or a tuple of arguments of the first stage. Tensors are split by rows.
            targets: a tensor, or a tuple of arguments that ``loss_fn`` takes after the output. Tensors are split too.
            loss_fn: called as ``loss_fn(output, *targets)`` on the last stage's worker, once for each micro-batch;
                returns a scalar tensor. A module is copied to that worker, so none of its parameters may require grad.
            finite: raise an error for a loss that is NaN or infinite. False computes its gradients all the same.

        Raises:
            UsageError: there is no current context, or the inputs, targets or ``loss_fn`` cannot be used.
            FloatingPointError: a micro-batch's loss is NaN or infinite, and ``finite`` is True.
            WorkerLost: one or more workers of the pipeline died, or left. It cannot be used any more.
            NotInitialized: RPC, or the world in which the pipeline was made, has ended.
            Exception: a stage or ``loss_fn`` raised it; its notes name the stage and the worker, and if the stage
                raised it, the micro-batch.
        """
        if (context := recorder().contexts.current) is None:
            raise UsageError(
                "train_step needs a distributed autograd context for its gradients: call it inside of "
                "`with dist_autograd.context() as context_id:`, and optimizer.step(context_id) there"
            )
        inputs, targets = as_tuple(inputs), as_tuple(targets)
        sizes = portions(training_rows(inputs, targets), self.micro_batches)
        check_loss_fn(loss_fn)
        table = self._table(len(sizes))
        done = self._step(table, sizes, inputs, targets, context, loss_fn, train=True, recorded=False, finite=finite)
        return total([loss for part in done for loss in part.losses])

    def _step(
        self,
        table: Table,
        sizes: list[int],
        inputs: Values,
        targets: Values,
        context: Context | None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        **options: bool,
    ) -> list[Done]:
        """Run one step on all workers; return a `Done` by worker. ``options`` are fields of `Order`."""
        self._parts.check_open()
        with self._counting:  # several threads may use one pipeline
            step, self._orders = self._orders, self._orders + 1
            number, self._steps = self._steps, self._steps + 1
        last = (self.stages - 1) % len(self.workers)
        # Split here, not on the workers, so that no two micro-batches on a worker share autograd history.
        given, wanted = split(inputs, sizes), split(targets, sizes)
        watched = WatchedStep(context if options["train"] else None, table, self.workers, self.stages)
        orders = []
        for worker, row in enumerate(table):
            loss = loss_fn if worker == last else None
            order = Order(step, number, row, sizes, self.reduction, loss_fn=loss, head=watched.head, **options)
            orders.append((order, given if worker == 0 else [], wanted if worker == last else []))
        # After an error the watcher awaits no reports.
        end = partial(watched.end, told={})
        done = self._parts.run(step, context.id if context is not None else None, orders, end)
        if watched.head is not None:
            who = [self._agent.find(name).incarnation for name in self.workers]
            watched.end(None, dict(zip(who, (each.told for each in done), strict=True)))
        self._last = number, [part.spans for part in done]
        return done

    # -- parameters and state -----------------------------------------------------------------

    def parameter_rrefs(self) -> list[RRef[Any]]:
        """Return references to all parameters, stage by stage, as `DistributedOptimizer` takes them.

        A parameter that several stages share occurs once. Asks all workers.

        Raises:
            WorkerLost: a worker is gone; `StepFailed` if several are.
            NotInitialized: RPC, or the world of the pipeline, has ended.

        Example:
            >>> pipe = Pipeline([torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)], ["worker0", "worker1"])
            >>> [rref.owner_name() for rref in pipe.parameter_rrefs()]
            ['worker0', 'worker0', 'worker1', 'worker1']
        """
        found = self._parts.gather("parameter_rrefs")
        return [rref for stage in range(self.stages) for rref in found[stage]]

    def train(self, mode: bool = True) -> Pipeline:
        """Put all stages into training mode, or with ``mode=False`` into evaluation mode. Returns the pipeline.

        Asks all workers. After an error, some stages may have changed, and ``training`` has not.

        Raises:
            WorkerLost: a worker is gone; `StepFailed` if several are.
            NotInitialized: RPC, or the world of the pipeline, has ended.
            StepFailed: ``mode`` is not a bool (ValueError if the pipeline has one worker).
        """
        self._parts.call_all("train", mode)
        self.training = mode
        return self

    def eval(self) -> Pipeline:
        """Put all stages into evaluation mode, and return the pipeline.

        Raises WorkerLost (StepFailed if several workers fail), RpcTimeout or NotInitialized, as `train` does.
        """
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which `load_state_dict` continues with the same numbers, on any workers.

        `torch.save` writes the state, and ``torch.load(weights_only=True)`` reads it. The optimizer's state is not in
        it. All workers are asked. Do not call it while a step runs.

        Raises:
            WorkerLost: a worker is gone; `StepFailed` if several are.
            NotInitialized: RPC, or the world of the pipeline, has ended.

        Returns:
            A dict. ``"model"``: the state of all stages, on the CPU, with the names of the model that was cut, or, of
            a list, the stage's number before each name. ``model.load_state_dict(pipe.state_dict()["model"])`` loads it
            into a model in one process. ``"steps"``: the number of calls of `forward` and `train_step` so far.
            ``"seed"``: with the steps, it decides what the stages draw at random. ``"cut"``: the layer at which each
            stage begins. ``"random"``: the states of the random generators (torch's, Python's, numpy's) of the
            caller's process and of each stage's process.

        Example:
            >>> pipe = Pipeline([torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)], ["worker0", "worker1"])
            >>> sorted(pipe.state_dict()["model"])
            ['0.bias', '0.weight', '1.bias', '1.weight']
            >>> pipe.load_state_dict(pipe.state_dict())
        """
        found, generators = self._parts.gather("state"), self._parts.gather("random_states")
        with self._counting:
            steps = self._steps
        return {
            "model": {name: value for stage in range(self.stages) for name, value in found[stage].items()},
            "steps": steps,
            "seed": self._seed,
            "cut": list(self._cut),
            "random": {"driver": random_state(), "stages": [generators[stage] for stage in range(self.stages)]},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, which `state_dict` returned, of this pipeline or of one with the same model and cut.

        The pipeline takes over the weights, the seed and the count of steps; the caller's process and the workers'
        processes take over the states of the random generators. A worker with several stages takes the states that were
        saved for its first stage. To load the weights alone, call `load_model`.

        Raises:
            UsageError: the state is of another model, of one that was cut elsewhere, or has no count of steps. Nothing
                has been changed.
            WorkerLost: a worker is gone; `StepFailed` if several are. Some workers may have loaded their part.
            NotInitialized: RPC, or the world of the pipeline, has ended.
        """
        if not isinstance(state, Mapping) or not {"model", "steps", "seed", "cut", "random"} <= state.keys():
            raise UsageError(
                "this is not what a pipeline's state_dict() returns. If it is the state of a model alone, it lacks the "
                "count of steps, which decides what the stages draw at random: load weights alone with "
                "load_model(state)"
            )
        if list(state["cut"]) != self._cut:
            raise UsageError(
                f"the state is of a pipeline whose stages begin at {', '.join(state['cut'])}; those of this one begin "
                f"at {', '.join(self._cut)}, so they would draw other numbers. Cut the model in the same way (several "
                'stages may be on one worker), or load the weights alone with load_model(state["model"])'
            )
        self.load_model(state["model"])  # first: it checks everything before it changes anything
        generators = dict(enumerate(state["random"]["stages"]))
        self._parts.call_by_stage("restore_random", generators, state["seed"])
        restore_random_state(state["random"]["driver"])
        self._seed = state["seed"]
        with self._counting:
            self._steps = state["steps"]

    def load_model(self, state: Mapping[str, Any]) -> None:
        """Load ``state``, the ``state_dict()`` of a model, into all stages. The count of steps does not change.

        Raises:
            UsageError: a name is missing or unknown, or a shape is another one. Nothing has been changed.
            WorkerLost: a worker is gone; `StepFailed` if several are. Some workers may have loaded their part.
            NotInitialized: RPC, or the world of the pipeline, has ended.

        Example:
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
            >>> pipe = Pipeline(model, ["worker0", "worker1"])
            >>> pipe.load_model(model.state_dict())
        """
        self._parts.load_model(state)

    def timeline(self) -> PipelineTimeline:
        """Return when each operation of the last completed step ran, beside the ideal schedule.

        The last step is the last call of `forward` or `train_step`. A notebook draws the result. Times of workers on
        other hosts are moved to this host's clock; the first call measures by how much the clocks differ. If no worker
        is on another host, or that has been measured, it asks nobody, and also works after a worker's death.

        Raises:
            UsageError: no step has been completed yet.
            WorkerLost: a worker on another host is gone, in the first call.

        Example:
            >>> pipe = Pipeline([torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)], ["worker0", "worker1"])
            >>> output = pipe(torch.ones(8, 4))
            >>> [len(row) for row in pipe.timeline().rows]
            [4, 4]
        """
        if self._last is None:
            raise UsageError("no step has been done yet: call the pipeline, or its train_step, before timeline()")
        step, rows = self._last
        moved = [
            [OpTimes(op, start - ahead, end - ahead) for op, start, end in row]
            for row, ahead in zip(rows, self._parts.clock_offsets(), strict=True)
        ]
        return PipelineTimeline(self.workers, self.stages, moved, step)
