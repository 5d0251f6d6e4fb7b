"""An optimizer for parameters on other workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nbdist.autograd.api import current_id
from nbdist.errors import UsageError
from nbdist.optim.distributed import Distributed
from nbdist.optim.local import LocalOptimizer, ask_all, new_local_optimizer, refuse_closure
from nbdist.optim.parameters import Key, keys_of, read_groups
from nbdist.optim.saving import gather, scatter
from nbdist.rpc.membership import WorkerInfo
from nbdist.rpc.rref import RRef

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(Distributed):
    """One optimizer of a class of torch's on every worker that owns some of the parameters.

    ``params_rref`` are references to parameters, local ones too, ``(name, reference)`` pairs, or groups as torch's
    optimizers take them: ``[{"params": [rref, …], "lr": 0.1}, …]``. Further arguments are the optimizer's. Every local
    optimizer has all groups, some perhaps without a parameter.

    Raises:
        UsageError: ``params_rref`` has something else than references, or the optimizer calls a closure (LBFGS).
    """

    def __init__(self, optimizer_class: Any, params_rref: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        if not callable(optimizer_class):
            raise UsageError(f"optimizer_class should be a class such as torch.optim.SGD, not {optimizer_class!r}")
        if isinstance(optimizer_class, type):
            refuse_closure(optimizer_class)
        groups = read_groups(params_rref)
        positions: dict[WorkerInfo, list[list[int]]] = {}
        rrefs = [rref for group in groups for rref in group.rrefs]
        numbers = [number for number, group in enumerate(groups) for _ in group.rrefs]
        for position, (rref, number) in enumerate(zip(rrefs, numbers, strict=True)):
            positions.setdefault(rref.owner(), [[] for _ in groups])[number].append(position)
        answers = ask_all(
            [
                (
                    owner,
                    new_local_optimizer,
                    (
                        optimizer_class,
                        [
                            {**group.options, "params": [rrefs[position] for position in own]}
                            for group, own in zip(groups, of_groups, strict=True)
                        ],
                        args,
                        kwargs,
                    ),
                )
                for owner, of_groups in positions.items()
            ]
        )
        self.remote_optimizers: list[RRef[LocalOptimizer]] = [rref for rref, _ in answers]
        super().__init__(self.remote_optimizers)
        known: list[tuple[str | None, list[int]]] = [(None, [])] * len(rrefs)
        for (_, described), of_groups in zip(answers, positions.values(), strict=True):
            for position, found in zip((position for own in of_groups for position in own), described, strict=True):
                known[position] = found
        keys = keys_of([name for group in groups for name in group.names], [name for name, _ in known])
        self._shapes: dict[Key, list[int]] = {key: shape for key, (_, shape) in zip(keys, known, strict=True)}
        self._groups: list[list[Key]] = [
            [key for key, its in zip(keys, numbers, strict=True) if its == number] for number in range(len(groups))
        ]
        self._keys: dict[str, list[list[Key]]] = {
            owner.name: [[keys[position] for position in own] for own in of_groups]
            for owner, of_groups in positions.items()
        }

    def step(self, context_id: int | None = None) -> None:
        """Update all parameters by the gradients of a context, the current one if none is given.

        Each owner updates its own, all at the same time. Steps of several optimizers that share parameters
        follow each other.
        """
        self.call_all("step", current_id() if context_id is None else int(context_id))

    def state_dict(self) -> dict[str, Any]:
        """Return what all workers' optimizers keep, on the CPU, by parameter.

        The key of a parameter of a `Pipeline` is its full name in the model, that of a ``(name, reference)`` pair the
        name, and that of any other one its position among all parameters. So the state fits wherever the parameters
        live when it is loaded. `torch.save` writes it and ``torch.load(weights_only=True)`` reads it.

        Raises:
            UsageError: the workers' optimizers differ in something that belongs to no parameter.
        """
        found = self.call_all("state_dict")
        parts = {worker: (keys, found[worker]) for worker, keys in self._keys.items()}
        return {**gather(self._groups, parts), "shapes": dict(self._shapes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each worker's optimizer its parameters' part of what `state_dict` returned.

        Raises:
            UsageError: the state is of other parameters or groups, or of the older form, by the names of workers. No
                optimizer has been changed.
        """
        self.give_all("load_state_dict", scatter(state, self._groups, self._shapes, self._keys))
