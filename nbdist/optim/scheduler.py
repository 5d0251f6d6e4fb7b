"""Learning rates of an optimizer whose parameters are on other workers."""

from __future__ import annotations

from typing import Any

from nbdist.optim.distributed import Distributed
from nbdist.optim.local import LocalOptimizer, ask_all
from nbdist.optim.optimizer import DistributedOptimizer
from nbdist.rpc.rref import RRef

__all__ = ["DistributedLRScheduler"]


class DistributedLRScheduler(Distributed):
    """One scheduler of a class of torch's for every local optimizer of a `DistributedOptimizer`."""

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
        """The learning rates, by the name of the worker."""
        return self.call_all("get_last_lr")


def new_local_scheduler(cls: Any, optimizer: RRef[LocalOptimizer], args: Any, kwargs: Any) -> RRef[Any]:
    """Make one where the optimizer is."""
    return RRef(cls(optimizer.local_value().optimizer, *args, **kwargs))
