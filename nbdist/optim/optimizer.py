"""An optimizer for parameters on other workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbdist.autograd.api import current_id
from nbdist.errors import UsageError
from nbdist.optim.distributed import Distributed
from nbdist.optim.local import LocalOptimizer, ask_all, by_owner, new_local_optimizer
from nbdist.rpc.membership import WorkerInfo
from nbdist.rpc.rref import RRef

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(Distributed):
    """One optimizer of a class of torch's on every worker that owns some of the parameters.

    ``params_rref`` are references to parameters, local ones too, or groups as torch's optimizers take them:
    ``[{"params": [rref, …], "lr": 0.1}, …]``. Further arguments are the optimizer's.
    """

    def __init__(
        self, optimizer_class: Any, params_rref: Sequence[RRef[Any] | Mapping[str, Any]], *args: Any, **kwargs: Any
    ) -> None:
        groups = [entry if isinstance(entry, Mapping) else {"params": [entry]} for entry in params_rref]
        if not groups:
            raise UsageError("optimizer got an empty parameter list")
        if not any(isinstance(entry, Mapping) for entry in params_rref):
            groups = [{"params": list(params_rref)}]
        per_owner: dict[WorkerInfo, list[dict[str, Any]]] = {}
        for group in groups:
            for owner, rrefs in by_owner(group["params"]).items():
                per_owner.setdefault(owner, []).append({**group, "params": rrefs})
        self.remote_optimizers: list[RRef[LocalOptimizer]] = ask_all(
            [(owner, new_local_optimizer, (optimizer_class, local, args, kwargs)) for owner, local in per_owner.items()]
        )
        super().__init__(self.remote_optimizers)

    def step(self, context_id: int | None = None) -> None:
        """Update all parameters by the gradients of a context, the current one if none is given.

        Each owner updates its own, all at the same time. Steps of several optimizers that share parameters
        follow each other.
        """
        self.call_all("step", current_id() if context_id is None else int(context_id))
