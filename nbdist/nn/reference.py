"""A pipeline's arithmetic in one process, without a worker or a message: what the distributed one has to equal.

It is also what to read first: the same micro-batches through the same stages in the same order, in two short loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from nbdist.nn.batches import as_tuple, join, portions, rows_of, split
from nbdist.nn.losses import Reduction, loss_of, total
from nbdist.nn.stage import Stage

__all__ = ["Reference"]


class Reference:
    """The stages of a pipeline, one after the other in this process.

    Gradients go to ``.grad``, as usual. In everything else it is used as `nbdist.nn.Pipeline`, and gives the same
    outputs, losses and gradients, to the last bit.
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
        self.stages = [Stage(module, index, seed=seed, checkpoint=checkpoint) for index, module in enumerate(stages)]
        self.micro_batches = micro_batches
        self.reduction: Literal["mean", "sum"] = reduction
        self.steps = 0

    def __call__(self, *inputs: Any) -> Any:
        """Compute the outputs."""
        step, self.steps = self.steps, self.steps + 1
        sizes = portions(rows_of(inputs), self.micro_batches)
        outputs = []
        for number, values in enumerate(split(inputs, sizes)):
            outputs.append(self._through(values, step, number))
        return join(outputs, sizes)

    def train_step(self, inputs: Any, targets: Any, loss_fn: Callable[[Any, Any], torch.Tensor]) -> torch.Tensor:
        """Compute the loss, and add its gradients to ``.grad``."""
        step, self.steps = self.steps, self.steps + 1
        inputs, targets = as_tuple(inputs), as_tuple(targets)
        rows = rows_of(inputs)
        sizes = portions(rows, self.micro_batches)
        losses = []
        parts = zip(sizes, split(inputs, sizes), split(targets, sizes), strict=True)
        for number, (size, values, target) in enumerate(parts):
            loss = loss_of(loss_fn, self._through(values, step, number), target, size, rows, self.reduction)
            loss.backward()
            losses.append(loss.detach())
        return total(losses)

    def _through(self, value: Any, step: int, micro_batch: int) -> Any:
        for stage in self.stages:
            value = stage(as_tuple(value), step, micro_batch)
        return value
