"""An optimizer for parameters on other workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbdist.autograd.api import current_id
from nbdist.errors import UsageError
from nbdist.optim.local import LocalOptimizer, ask_all, by_owner, call_local, new_local_optimizer
from nbdist.rpc.membership import WorkerInfo
from nbdist.rpc.rref import RRef

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer:
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

    def step(self, context_id: int | None = None) -> None:
        """Update all parameters by the gradients of a context, the current one if none is given.

        Each owner updates its own, all at the same time. Steps of several optimizers that share parameters
        follow each other.
        """
        self.call_all("step", current_id() if context_id is None else int(context_id))

    def state_dict(self) -> dict[str, Any]:
        """The state of every local optimizer, by the name of its worker."""
        states = self.call_all("state_dict")
        return {rref.owner_name(): state for rref, state in zip(self.remote_optimizers, states, strict=True)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give every local optimizer what `state_dict` returned for its worker."""
        names = {rref.owner_name() for rref in self.remote_optimizers}
        if names != set(state):
            raise UsageError(
                f"the state is that of optimizers on {', '.join(sorted(state))}; here they are on "
                f"{', '.join(sorted(names))}"
            )
        ask_all(
            [
                (rref.owner(), call_local, (rref, "load_state_dict", state[rref.owner_name()]))
                for rref in self.remote_optimizers
            ]
        )

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all local optimizers at the same time."""
        return ask_all([(rref.owner(), call_local, (rref, method, *args)) for rref in self.remote_optimizers])
