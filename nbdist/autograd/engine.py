"""torch's engine, called for a part of a pass; and what else calls it meanwhile.

A node may call the engine itself: reentrant checkpoints do, and Functions of users who write their backward that
way. What such an inner call accumulates belongs to the pass as well, and the leaves that it reaches are not known
before. So there is one place through which every call of the engine goes, where torch lets a Python subclass of
its engine stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nbdist import torch_private
from nbdist.autograd.edges import current_part
from nbdist.autograd.graph import walk
from nbdist.autograd.leaves import current_claim, halted_leaves
from nbdist.errors import UsageError

__all__ = ["run_backward"]

_native: Any = torch_private.engine


def run_backward(roots: Sequence[Any], gradients: Sequence[torch.Tensor], *, retain_graph: bool) -> None:
    """Run what the roots depend on, all leaves included, as ``torch.autograd.backward`` does."""
    _native.run_backward(
        tuple(roots), tuple(gradients), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


class _Engine(type(_native)):  # type: ignore[misc]  # the class of an object
    """Stands where every call of torch's engine passes."""

    def run_backward(
        self,
        tensors: Sequence[Any],
        grad_tensors: Sequence[Any],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        *args: Any,
        **options: Any,
    ) -> Any:
        """As torch's."""
        __tracebackhide__ = True  # IPython leaves this frame out, in which a local pass has no part
        if current_part() is None and not inputs:
            _refuse_halted(tensors)
        if current_part() is None or inputs:
            return _native.run_backward(tensors, grad_tensors, keep_graph, create_graph, inputs, *args, **options)
        region = walk([_edge(tensor) for tensor in tensors])
        if region.receives:
            raise UsageError(
                "a checkpoint, or a Function that calls backward() itself, holds a call to another worker, and such "
                "a call cannot be run backward from inside of a node: give the checkpoint use_reentrant=False"
            )
        claim = current_claim()
        taken = claim.adopt(region.leaves)
        if not taken:
            return _native.run_backward(tensors, grad_tensors, keep_graph, create_graph, inputs, *args, **options)
        edges = tuple(torch.autograd.graph.GradientEdge(node, 0) for node in region.leaves)
        captured = _native.run_backward(
            tensors, grad_tensors, keep_graph, create_graph, edges, allow_unreachable=True, accumulate_grad=False
        )
        for node, gradient in zip(region.leaves, captured, strict=True):
            if gradient is not None:
                claim.add(node.variable, gradient, elsewhere=node in taken)
        return ()


def _refuse_halted(roots: Sequence[Any]) -> None:
    """What a local pass would put into ``.grad`` would be taken for a paused one's, which has it set aside."""
    halted = halted_leaves()
    if halted and any(id(node.variable) in halted for node in walk([_edge(root) for root in roots]).leaves):
        raise UsageError(
            "a paused backward pass has leaves of this one in hand: let it go on first (`watch.run()`), or use "
            "torch.autograd.grad, which leaves .grad alone"
        )


def _edge(root: Any) -> tuple[Any, int]:
    edge = torch.autograd.graph.get_gradient_edge(root) if isinstance(root, torch.Tensor) else root
    return edge.node, edge.output_nr


torch_private.set_engine(_Engine())
