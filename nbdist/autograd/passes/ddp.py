"""Finds the leaves of DistributedDataParallel (DDP) modules, which must all run in one call of torch's engine.

The reducer of such a module averages gradients over processes while the engine runs (it *reduces*), and writes the
averages to ``.grad`` at the end of the call in which the module's last leaf got its gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from nbdist.autograd.graph.edges import Node

# The DDP modules that are alive, by id. Every pass reads it many times, so it is a plain dict and no function.
living: dict[int, weakref.ref[DistributedDataParallel]] = {}


def _notice(module: Any, name: str, submodule: Any) -> None:
    """Note ``module`` in `living` if it is a DDP module, until it is collected."""
    # torch calls this whenever a module gets a submodule, as a DDP module does when it is made.
    if isinstance(module, DistributedDataParallel):
        key = id(module)
        living[key] = weakref.ref(module, lambda _: living.pop(key, None))


def _modules() -> list[DistributedDataParallel]:
    return [module for reference in list(living.values()) if (module := reference()) is not None]


register_module_module_registration_hook(_notice)


def _leaves(module: DistributedDataParallel) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def owned_by_any() -> set[int]:
    """Return the ids of the parameters of all DDP modules."""
    return set[int]().union(*map(_leaves, _modules()))


def own(nodes: Iterable[Node]) -> bool:
    """Return whether one of these nodes accumulates into a parameter of a DDP module."""
    owned = owned_by_any()
    return any(id(node.variable) in owned for node in nodes)


def blocked_by(held: Iterable[int]) -> set[int]:
    """Return the ids of all parameters of each DDP module that has a parameter in ``held``, which has ids, too."""
    waiting = set(held)
    return set[int]().union(*(leaves for leaves in map(_leaves, _modules()) if not leaves.isdisjoint(waiting)))


def in_buckets() -> set[int]:
    """Return the ids of the parameters whose gradients are views of DDP buckets, which the next pass overwrites."""
    return set[int]().union(*(_leaves(module) for module in _modules() if module.gradient_as_bucket_view))
