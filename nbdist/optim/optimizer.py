"""DistributedOptimizer: an optimizer for parameters that live on several workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from nbdist.autograd.api import current_id
from nbdist.errors import UsageError
from nbdist.optim.local import LocalOptimizer, new_local_optimizer, refuse_closure
from nbdist.optim.owners import Distributed, ask_all
from nbdist.optim.parameters import Key, keys_of, read_groups
from nbdist.optim.saving import gather, scatter
from nbdist.rpc.references.rref import RRef


class DistributedOptimizer(Distributed):
    """An optimizer over workers: every worker that owns some of the parameters runs one of torch's optimizers for them.

    The local optimizers are made at once, on the owners. Each of them has all parameter groups, some perhaps empty, so
    group numbers mean the same on every worker.

    Args:
        optimizer_class: A class of torch's, such as ``torch.optim.Adam``, or a function that returns an optimizer.
        params_rref: A list of references to parameters (local ones too), of ``(name, reference)`` pairs, or of groups
            as torch's optimizers take them: ``[{"params": [rref, ...], "lr": 0.1}, ...]``. `state_dict` uses the names.
        *args: Given to every local optimizer.
        **kwargs: Given to every local optimizer, such as ``lr``.

    Raises:
        UsageError: ``optimizer_class`` is not callable or makes an optimizer that needs a closure (LBFGS),
            ``params_rref`` is empty or has an entry that is no reference, or two parameters have the same name.
        StepFailed: Several workers could not make their optimizer. If one could not, its error is raised: of the class,
            as for a bad ``lr``, or WorkerLost.
        NotInitialized: RPC is not running in this process.

    Example:
        >>> weight = rpc.remote("worker1", torch.nn.Parameter, args=(torch.ones(2),))
        >>> optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
        >>> with dist_autograd.context() as context_id:
        ...     loss = weight.rpc_sync().mul(torch.tensor([2.0, 4.0])).sum()
        ...     dist_autograd.backward(context_id, [loss])
        ...     optimizer.step(context_id)
        >>> weight.to_here().detach()
        tensor([ 0., -1.])
    """

    def __init__(self, optimizer_class: Any, params_rref: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        if not callable(optimizer_class):
            raise UsageError(f"optimizer_class should be a class such as torch.optim.SGD, not {optimizer_class!r}")
        if isinstance(optimizer_class, type):  # a function shows the class only when it is called, in `LocalOptimizer`
            refuse_closure(optimizer_class)
        groups = read_groups(params_rref)
        positions: dict[str, list[list[int]]] = {}
        rrefs = [rref for group in groups for rref in group.rrefs]
        numbers = [number for number, group in enumerate(groups) for _ in group.rrefs]
        # An owner's groups are all groups, empty ones too, so that group numbers mean the same on every worker.
        for position, (rref, number) in enumerate(zip(rrefs, numbers, strict=True)):
            positions.setdefault(rref.owner_name(), [[] for _ in groups])[number].append(position)
        calls = {}
        for owner, of_groups in positions.items():
            own = [[rrefs[position] for position in of_group] for of_group in of_groups]
            local = [{**group.options, "params": params} for group, params in zip(groups, own, strict=True)]
            calls[owner] = optimizer_class, local, args, kwargs
        # The answers name the parameters, if their owners know names: the keys of saved states are made of these.
        answers = ask_all(new_local_optimizer, calls)
        self.remote_optimizers: list[RRef[LocalOptimizer]] = [rref for rref, _ in answers.values()]
        super().__init__(self.remote_optimizers)
        known: dict[int, tuple[str | None, list[int]]] = {}
        for owner, (_, described) in answers.items():
            known.update(zip(itertools.chain.from_iterable(positions[owner]), described, strict=True))
        names = [known[position][0] for position in range(len(rrefs))]
        keys = keys_of([name for group in groups for name in group.names], names)
        self._shapes: dict[Key, list[int]] = {key: known[position][1] for position, key in enumerate(keys)}
        self._groups: list[list[Key]] = [[] for _ in groups]
        for key, number in zip(keys, numbers, strict=True):
            self._groups[number].append(key)
        self._keys: dict[str, list[list[Key]]] = {
            owner: [[keys[position] for position in own] for own in of_groups] for owner, of_groups in positions.items()
        }

    def step(self, context_id: int | None = None) -> None:
        """Update all parameters with the gradients of a context; parameters without a gradient there stay as they are.

        All owners make their step at the same time. This returns when the last step is done. Steps of two optimizers
        that share a parameter run one after the other on its owner.

        Args:
            context_id: The context; None means the one that the calling thread is in.

        Raises:
            UsageError: The context has ended or is not known on the owner, or the thread is in none and no id is given.
            StepFailed: The step failed on several workers, also because the context has ended or they are dead. If it
                failed on one, its error is raised: WorkerLost for a dead one. The parameters of the other workers are
                updated in either case.
            NotInitialized: RPC is not running in this process.
        """
        self.call_all("step", current_id() if context_id is None else int(context_id))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all workers' optimizers as one state, keyed by parameter, with all tensors on the CPU.

        A parameter's key is the name it was given in a ``(name, reference)`` pair, or its full name in the model if it
        belongs to a `Pipeline`, or else its position among all parameters. The state does not name the workers, so it
        can be loaded when the parameters live on other workers. `torch.save` writes it, and
        ``torch.load(weights_only=True)`` reads it.

        Raises:
            UsageError: The workers' optimizers differ in something that belongs to no parameter, so one state cannot
                hold both.
            WorkerLost: An owner is gone; `StepFailed` if several are.
            NotInitialized: RPC is not running in this process.
        """
        found = self.call_all("state_dict")
        parts = {worker: (keys, found[worker]) for worker, keys in self._keys.items()}
        return {**gather(self._groups, parts), "shapes": dict(self._shapes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ``state``, which `state_dict` returned, on whichever workers the parameters lived then.

        Each worker's optimizer gets the part that belongs to its parameters.

        Raises:
            UsageError: The state has other parameters, shapes or groups, is not the state of an optimizer, or has the
                older form, keyed by workers. No optimizer has been changed.
            WorkerLost: An owner is gone; `StepFailed` if several are. The others have loaded their part.
            NotInitialized: RPC is not running in this process.
        """
        # `scatter` checks the whole state first, so that after its error no optimizer has changed.
        self.give_all("load_state_dict", scatter(state, self._groups, self._shapes, self._keys))
