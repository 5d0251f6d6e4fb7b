"""Optimizers whose parameters live on other workers, and are updated there.

`optimizer` has one local optimizer on every worker that owns parameters, and `local` is what runs there;
`scheduler` changes their learning rates, and `distributed` is what the two have in common; `clipping` looks at the
gradients of all of them together.
"""

from __future__ import annotations

from nbdist.optim.clipping import clip_grad_norm_
from nbdist.optim.local import StepFailed
from nbdist.optim.optimizer import DistributedOptimizer
from nbdist.optim.scheduler import DistributedLRScheduler

__all__ = ["DistributedLRScheduler", "DistributedOptimizer", "StepFailed", "clip_grad_norm_"]
