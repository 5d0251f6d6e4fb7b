"""Knows the leaves of DistributedDataParallel modules, which cannot be treated one by one.

Their reducer averages gradients over processes while the engine runs, and puts the averages into ``.grad`` at the end
of the call in which the last leaf of the module got its gradient. So a module's leaves all have to run in one and the
same call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from nbdist.autograd.edges import Node

__all__ = ["blocked_by", "in_buckets", "living", "own", "owned_by_any"]

living: dict[int, weakref.ref[DistributedDataParallel]] = {}
"""The modules that live, by id. Whether there are any is asked many times in each pass, so no function answers it."""


def _notice(module: Any, name: str, submodule: Any) -> None:
    if isinstance(module, DistributedDataParallel):
        key = id(module)
        living[key] = weakref.ref(module, lambda _: living.pop(key, None))


def _modules() -> list[DistributedDataParallel]:
    return [module for reference in list(living.values()) if (module := reference()) is not None]


register_module_module_registration_hook(_notice)


def _leaves(module: DistributedDataParallel) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def owned_by_any() -> set[int]:
    """The leaves of all such modules, by id."""
    return set[int]().union(*map(_leaves, _modules()))


def own(nodes: Iterable[Node]) -> bool:
    """Whether one of these nodes stands for a leaf of such a module."""
    owned = owned_by_any()
    return any(id(node.variable) in owned for node in nodes)


def blocked_by(held: Iterable[int]) -> set[int]:
    """All leaves of those modules some of whose leaves have to wait."""
    waiting = set(held)
    blocked = set[int]()
    for module in _modules():
        leaves = _leaves(module)
        if leaves & waiting:
            blocked |= leaves
    return blocked


def in_buckets() -> set[int]:
    """The leaves whose gradients lie in memory that their modules will use again."""
    return set[int]().union(*(_leaves(module) for module in _modules() if module.gradient_as_bucket_view))
