"""Learning rates of an optimizer whose parameters are on other workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbdist.optim.distributed import Distributed
from nbdist.optim.local import LocalOptimizer, ask_all
from nbdist.optim.optimizer import DistributedOptimizer
from nbdist.optim.saving import agreed, refuse_old_form
from nbdist.rpc.rref import RRef

__all__ = ["DistributedLRScheduler"]


class DistributedLRScheduler(Distributed):
    """One scheduler of a class of torch's for every local optimizer of a `DistributedOptimizer`.

    Every local optimizer has all groups, so that all schedulers are alike, and arguments that have a value for each
    group are as in one process.
    """

    def __init__(self, scheduler_class: Any, dist_optimizer: DistributedOptimizer, *args: Any, **kwargs: Any) -> None:
        calls = [
            (rref.owner(), new_local_scheduler, (scheduler_class, rref, args, kwargs))
            for rref in dist_optimizer.remote_optimizers
        ]
        super().__init__(ask_all(calls))

    def step(self, *args: Any) -> None:
        """As the scheduler's own, on all workers."""
        self.call_all("step", *args)

    def get_last_lr(self) -> dict[str, list[float]]:
        """Return the learning rates of all groups, by the name of the worker."""
        return self.call_all("get_last_lr")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler, which is the same on all workers, and that of one process.

        Raises:
            UsageError: the workers' schedulers differ: one of them has been changed by itself.
        """
        found: dict[str, Any] = agreed(self.call_all("state_dict"), "the state of the scheduler")
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give all workers' schedulers the state that `state_dict` returned, wherever the parameters were then.

        Raises:
            UsageError: the state is of the older form, by the names of workers.
        """
        of_torch = isinstance(state, Mapping) and any(not isinstance(value, Mapping) for value in state.values())
        refuse_old_form(state, "scheduler", of_torch)
        self.call_all("load_state_dict", dict(state))


def new_local_scheduler(cls: Any, optimizer: RRef[LocalOptimizer], args: Any, kwargs: Any) -> RRef[Any]:
    """Make one where the optimizer is."""
    return RRef(cls(optimizer.local_value().optimizer, *args, **kwargs))
