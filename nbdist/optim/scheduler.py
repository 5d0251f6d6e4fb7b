"""DistributedLRScheduler: learning rates for an optimizer whose parameters live on several workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbdist.optim.local import LocalOptimizer
from nbdist.optim.optimizer import DistributedOptimizer
from nbdist.optim.owners import Distributed, ask_all
from nbdist.optim.saving import agreed, refuse_old_form
from nbdist.rpc.references.rref import RRef


class DistributedLRScheduler(Distributed):
    """A learning rate scheduler over workers: every local optimizer of a `DistributedOptimizer` gets one of torch's.

    Every local optimizer has all parameter groups. So all schedulers are alike, and an argument with a value for each
    group means the same as in one process.

    Args:
        scheduler_class: A class of ``torch.optim.lr_scheduler``.
        dist_optimizer: The optimizer whose learning rates to change.
        *args: Given to every scheduler.
        **kwargs: Given to every scheduler.

    Raises:
        StepFailed: Several workers could not make their scheduler. If one could not, its error is raised: of the class,
            such as TypeError for a missing argument, or WorkerLost.
        NotInitialized: RPC is not running in this process.

    Example:
        >>> weight = rpc.remote("worker1", torch.nn.Parameter, args=(torch.ones(2),))
        >>> optimizer = nbdist.optim.DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
        >>> scheduler = DistributedLRScheduler(torch.optim.lr_scheduler.StepLR, optimizer, step_size=1)
        >>> with dist_autograd.context() as context_id:
        ...     dist_autograd.backward(context_id, [weight.rpc_sync().sum()])
        ...     optimizer.step(context_id)
        >>> scheduler.step()
        >>> scheduler.get_last_lr()
        {'worker1': [0.05]}
    """

    def __init__(self, scheduler_class: Any, dist_optimizer: DistributedOptimizer, *args: Any, **kwargs: Any) -> None:
        optimizers = dist_optimizer.remote_optimizers
        calls = {rref.owner_name(): (scheduler_class, rref, args, kwargs) for rref in optimizers}
        super().__init__(list(ask_all(new_local_scheduler, calls).values()))

    def step(self, *args: Any) -> None:
        """Call ``step(*args)`` of every worker's scheduler; do this after the optimizer's step.

        ``ReduceLROnPlateau`` takes a metric; most other schedulers take no argument.

        Raises:
            StepFailed: It failed on several workers. If it failed on one, its error is raised, such as WorkerLost.
                The schedulers of the other workers have made the step.
            NotInitialized: RPC is not running in this process.
        """
        self.call_all("step", *args)

    def get_last_lr(self) -> dict[str, list[float]]:
        """Return the learning rates of all parameter groups, by worker name.

        `step` changes them, and the next step of the optimizer uses them.

        Raises:
            WorkerLost: An owner is gone; `StepFailed` if several are.
            NotInitialized: RPC is not running in this process.
        """
        return self.call_all("get_last_lr")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler, which is the same on all workers, and the same as in one process.

        Raises:
            UsageError: The workers' schedulers differ, because one of them was changed without the others.
            WorkerLost: An owner is gone; `StepFailed` if several are.
            NotInitialized: RPC is not running in this process.
        """
        return dict(agreed(self.call_all("state_dict"), "the state of the scheduler"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ``state``, which `state_dict` returned, into all schedulers, wherever the parameters lived then.

        Raises:
            UsageError: The state is not the state of a scheduler, or has the older form, keyed by workers. No scheduler
                has been changed.
            WorkerLost: An owner is gone; `StepFailed` if several are. The others have loaded it.
            NotInitialized: RPC is not running in this process.
        """
        # By its form, and here: torch's schedulers load any dict, and all or none must change.
        of_torch = isinstance(state, Mapping) and any(not isinstance(value, Mapping) for value in state.values())
        refuse_old_form(state, "scheduler", of_torch)
        self.call_all("load_state_dict", dict(state))


def new_local_scheduler(cls: Any, optimizer: RRef[LocalOptimizer], args: Any, kwargs: Any) -> RRef[Any]:
    """Make a scheduler for a local optimizer on its owner, and return a reference to the scheduler."""
    return RRef(cls(optimizer.local_value().optimizer, *args, **kwargs))
