"""A pipeline's arithmetic in one process, without workers and messages. Tests compare `Pipeline` with it, bit by bit.

Read this module before `nbdist.nn.pipeline`: two short loops send the micro-batches through the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from nbdist.errors import UsageError
from nbdist.nn.batches import as_tuple, check_micro_batches, join, portions, rows_of, rows_of_both, split
from nbdist.nn.losses import Reduction, check_reduction, loss_of, total
from nbdist.nn.stage import Stage


class Reference:
    """Run the stages of a pipeline one after the other in this process, to check or to debug a `Pipeline`.

    A `Reference` gives the same outputs, losses and gradients as a `Pipeline` of the same stages, to the last bit. It
    needs no workers and no autograd context: its gradients are added to ``.grad``, as torch does it. The modules are
    used, not copied, so they are trained in place.

    Args:
        stages: the modules, in order; `nbdist.nn.cut` makes them from a Sequential.
        micro_batches: the number of slices of a batch. A batch of fewer rows has one micro-batch for each row.
        seed: seeds the stages' random draws, together with the step, the stage and the micro-batch.
        checkpoint: keep only the inputs of the stages, and compute the rest again in the backward pass.
        reduction: the way in which the loss function of `train_step` combines its rows: ``"mean"`` or ``"sum"``.

    Raises:
        UsageError: there is no stage, no such reduction, or ``micro_batches`` is no whole number of at least 1.

    Example:
        >>> reference = Reference([torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)], micro_batches=2)
        >>> loss = reference.train_step(torch.ones(8, 4), torch.zeros(8, 2), torch.nn.functional.mse_loss)
        >>> reference.stages[0].module.weight.grad.shape
        torch.Size([8, 4])
    """

    def __init__(
        self,
        stages: Sequence[torch.nn.Module],
        *,
        micro_batches: int = 4,
        seed: int = 0,
        checkpoint: bool = False,
        reduction: Reduction = "mean",
    ) -> None:
        if not stages:
            raise UsageError("a pipeline has at least one stage, but the list of stages is empty")
        self.reduction: Literal["mean", "sum"] = check_reduction(reduction)
        self.stages = [Stage(module, index, seed=seed, checkpoint=checkpoint) for index, module in enumerate(stages)]
        self.micro_batches = check_micro_batches(micro_batches)
        self.steps = 0

    def __call__(self, *inputs: Any) -> Any:
        """Return the output of a batch, computed micro-batch by micro-batch and joined as `Pipeline.forward` does.

        Raises:
            UsageError: the batch has no tensor with rows, its tensors have different numbers of rows, or an output has
                other rows than its micro-batch.
            Exception: a stage raised it; a note names the stage and the micro-batch.
        """
        step, self.steps = self.steps, self.steps + 1
        sizes = portions(rows_of(inputs), self.micro_batches)
        outputs = [self._through(values, step, number) for number, values in enumerate(split(inputs, sizes))]
        return join(outputs, sizes)

    def train_step(self, inputs: Any, targets: Any, loss_fn: Callable[[Any, Any], torch.Tensor]) -> torch.Tensor:
        """Compute the loss of a batch, add its gradients to ``.grad``, and return the loss, detached.

        Args:
            inputs: a tensor, or a tuple of inputs of the first stage.
            targets: a tensor, or a tuple of arguments that ``loss_fn`` takes after the output.
            loss_fn: called as ``loss_fn(output, *targets)`` for each micro-batch; returns a scalar tensor.

        Raises:
            UsageError: the batch has no rows to split, inputs and targets have different numbers of rows, or
                ``loss_fn`` returned no scalar or a detached one.
            Exception: a stage or ``loss_fn`` raised it. The gradients of earlier micro-batches stay in ``.grad``.
        """
        inputs, targets = as_tuple(inputs), as_tuple(targets)
        rows = rows_of_both(inputs, targets)
        sizes = portions(rows, self.micro_batches)
        step, self.steps = self.steps, self.steps + 1  # not for a refused batch: `Pipeline` counts none there
        losses = []
        parts = zip(sizes, split(inputs, sizes), split(targets, sizes), strict=True)
        for number, (size, values, target) in enumerate(parts):
            loss = loss_of(loss_fn, self._through(values, step, number), target, size, rows, self.reduction)
            loss.backward()  # in the order of the micro-batches, as in every schedule: sums depend on the order
            losses.append(loss.detach())
        return total(losses)

    def _through(self, value: Any, step: int, micro_batch: int) -> Any:
        for stage in self.stages:
            value = stage(as_tuple(value), step, micro_batch)
        return value
