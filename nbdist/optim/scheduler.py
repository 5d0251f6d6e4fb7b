"""Learning rates of an optimizer whose parameters are on other workers."""

from __future__ import annotations

from typing import Any

from nbdist.optim.local import LocalOptimizer, ask_all, call_local
from nbdist.optim.optimizer import DistributedOptimizer
from nbdist.rpc.rref import RRef

__all__ = ["DistributedLRScheduler"]


class DistributedLRScheduler:
    """One scheduler of a class of torch's for every local optimizer of a `DistributedOptimizer`."""

    def __init__(self, scheduler_class: Any, dist_optimizer: DistributedOptimizer, *args: Any, **kwargs: Any) -> None:
        self._schedulers: list[RRef[Any]] = ask_all(
            [
                (rref.owner(), new_local_scheduler, (scheduler_class, rref, args, kwargs))
                for rref in dist_optimizer.remote_optimizers
            ]
        )

    def step(self, *args: Any) -> None:
        """As the scheduler's own, on all workers."""
        self._call_all("step", *args)

    def get_last_lr(self) -> dict[str, list[float]]:
        """The learning rates, by the name of the worker."""
        return self._named(self._call_all("get_last_lr"))

    def state_dict(self) -> dict[str, Any]:
        """The state of every scheduler, by the name of its worker."""
        return self._named(self._call_all("state_dict"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give every scheduler what `state_dict` returned for its worker."""
        ask_all(
            [
                (rref.owner(), call_local, (rref, "load_state_dict", state[rref.owner_name()]))
                for rref in self._schedulers
            ]
        )

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        return ask_all([(rref.owner(), call_local, (rref, method, *args)) for rref in self._schedulers])

    def _named(self, results: list[Any]) -> dict[str, Any]:
        return {rref.owner_name(): result for rref, result in zip(self._schedulers, results, strict=True)}


def new_local_scheduler(cls: Any, optimizer: RRef[LocalOptimizer], args: Any, kwargs: Any) -> RRef[Any]:
    """Make one where the optimizer is."""
    return RRef(cls(optimizer.local_value().optimizer, *args, **kwargs))
