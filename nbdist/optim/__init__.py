"""Optimizers for parameters that live on other workers; each worker updates its own parameters.

::

    DistributedOptimizer      DistributedLRScheduler      clip_grad_norm_         on the worker that calls
            |  step                   |  step                   |  norms, factor
    LocalOptimizer            a scheduler of torch        the context's gradients on every owner of parameters

Users call `optimizer`, `scheduler` and `clipping`. `local` has the code that runs on an owner; `owners` calls
all owners, and raises `StepFailed` if several fail. `parameters` reads and names the parameters, and `saving`
joins the owners' states into one that does not depend on the workers.
"""

from nbdist.optim.clipping import clip_grad_norm_
from nbdist.optim.optimizer import DistributedOptimizer
from nbdist.optim.owners import StepFailed
from nbdist.optim.scheduler import DistributedLRScheduler

__all__ = ["DistributedLRScheduler", "DistributedOptimizer", "StepFailed", "clip_grad_norm_"]
