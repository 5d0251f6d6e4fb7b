"""`Owners`: tells which parameters got a gradient in a watched cell, and belong to no optimizer."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable

import torch
from torch.optim import optimizer as optimizers

from nbdist.autograd.graph.edges import Node
from nbdist.autograd.graph.parameters import instances, root_of, walk
from nbdist.autograd.graph.walk import ACCUMULATE
from nbdist.cluster.output.arranger import grouped
from nbdist.rpc.references.inert import mro

PASSES_KEPT = 8


class Owners:
    """The parameters of a cell's last passes in this process, and those of the optimizers that step in the cell."""

    def __init__(self) -> None:
        self._leaves: dict[int, dict[int, weakref.ref[torch.Tensor]]] = {}  # by pass, and number of the node
        # The `id` of each parameter that has been stepped: a function may let go of its optimizer before the cell ends.
        self._stepped = set[int]()
        self.close = optimizers.register_optimizer_step_post_hook(self._after_step).remove

    def add(self, number: int, nodes: dict[Node, int]) -> None:
        """Note the leaves among the nodes of a pass, which have these numbers."""
        leaves = {at: weakref.ref(node.variable) for node, at in nodes.items() if type(node) is ACCUMULATE}
        self._leaves = dict([*self._leaves.items(), (number, leaves)][-PASSES_KEPT:])

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._stepped |= _parameters(optimizer)

    def unowned(self) -> dict[int, list[int]]:
        """Return the nodes of parameters, by pass, that no optimizer has although one has others of their model."""
        if not any(self._leaves.values()):
            return {}
        owned = self._stepped.union(*map(_parameters, instances(torch.optim.Optimizer)))
        return {number: list(_unowned(leaves, owned)) for number, leaves in self._leaves.items()}


def _unowned(leaves: dict[int, weakref.ref[torch.Tensor]], owned: Collection[int]) -> Iterable[int]:
    alive = {number: leaf for number, reference in leaves.items() if (leaf := reference()) is not None}
    # By dtype, too: an optimizer may have copies in float32 of parameters in bfloat16, and itself those in float32.
    for alike in grouped(alive, lambda number: (id(root_of(alive[number])), alive[number].dtype)).values():
        root = root_of(alive[alike[0]])
        missing = [number for number in alike if id(alive[number]) not in owned]
        # Of a model of FSDP2, the leaves are not the parameters that the optimizer has.
        kinds = (kind.__name__ for _, module in walk(root) for kind in mro(type(module))) if root is not None else ()
        if root is not None and 0 < len(missing) < len(alike) and "FSDPModule" not in kinds:
            yield from missing


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    with contextlib.suppress(Exception):  # one of the user's, with groups of another form, must not fail
        return {id(each) for group in getattr(optimizer, "param_groups", ()) for each in group["params"]}
    return set()
