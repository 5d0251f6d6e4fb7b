"""Calls torch's engine for the steps of a part, and checks all other calls of the engine in this process.

========================================= ======================================================================
a call of torch's engine                  what `_Engine` does
========================================= ======================================================================
with ``inputs``, as by autograd.grad      lets torch run it unchanged
by a local pass                           lets torch run it, in the block of who watches it (`local_passes`); refuses
                                          it if it reaches leaves of a halted pass
by a node that a part runs                claims the leaves that the call reaches, for the part's pass
by a part, with `run_backward`            is not asked: this goes to torch's engine directly
========================================= ======================================================================

A node calls the engine itself in a reentrant checkpoint, and in a user's Function whose backward does so. The gradients
that such an inner call accumulates belong to the pass as well, but its leaves are known only when it begins. So
importing this module puts `_Engine` in the place where torch.autograd looks for its engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from nbdist import torch_private, trace
from nbdist.autograd.graph.edges import current_part
from nbdist.autograd.graph.walk import walk
from nbdist.autograd.passes.claims import current_claim, halted_leaves
from nbdist.autograd.passes.local_passes import local_passes
from nbdist.errors import UsageError

_native: Any = torch_private.engine


def run_backward(roots: Sequence[Any], gradients: Sequence[torch.Tensor], *, retain_graph: bool) -> None:
    """Run all nodes that the roots depend on, leaves included, as ``torch.autograd.backward`` does."""
    _native.run_backward(
        tuple(roots), tuple(gradients), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


class _Engine(type(_native)):  # type: ignore[misc]  # the class of an object
    """The engine that torch.autograd calls from Python: torch's own, with the rules of the module's table."""

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
        """Run a backward pass for torch.autograd; arguments and result are as for torch's engine."""
        __tracebackhide__ = True  # IPython leaves this frame out of tracebacks: a local pass has no use for it
        if current_part() is None and not inputs:
            _refuse_halted(tensors)
            start = time.monotonic()
            with local_passes.around(tensors, edge_of):
                found = _native.run_backward(tensors, grad_tensors, keep_graph, create_graph, inputs, *args, **options)
            if trace.listeners and torch_private.graph_task() < 0:  # else the pass belongs to a node
                trace.emit("pass.ran", start=start)
            return found
        if inputs:
            return _native.run_backward(tensors, grad_tensors, keep_graph, create_graph, inputs, *args, **options)
        region = walk([edge_of(tensor) for tensor in tensors])
        if region.receives:
            raise UsageError(
                "a reentrant checkpoint, or a Function whose backward calls backward(), contains a call to another "
                "worker, whose backward pass cannot run inside of a node: give the checkpoint use_reentrant=False"
            )
        claim = current_claim()
        taken = claim.adopt(region.leaves)
        if not taken:
            # The usual case: nobody else has one of the leaves, so the engine may accumulate into ``.grad``.
            return _native.run_backward(tensors, grad_tensors, keep_graph, create_graph, inputs, *args, **options)
        # Others hold some of the leaves: have the engine return the gradients, and do not accumulate. To wait for the
        # leaves here could be for ever, as the other call may wait for this one.
        edges = tuple(torch.autograd.graph.GradientEdge(node, 0) for node in region.leaves)
        captured = _native.run_backward(
            tensors, grad_tensors, keep_graph, create_graph, edges, allow_unreachable=True, accumulate_grad=False
        )
        for node, gradient in zip(region.leaves, captured, strict=True):
            if gradient is not None:
                claim.add(node.variable, gradient, elsewhere=node in taken)
        return ()


def _refuse_halted(roots: Sequence[Any]) -> None:
    # That pass has set their ``.grad`` aside. Afterwards, it would take the local pass's gradients there for its own.
    halted = halted_leaves()
    if halted and any(id(node.variable) in halted for node in walk([edge_of(root) for root in roots]).leaves):
        raise UsageError(
            "a paused backward pass is writing the .grad of leaves that this pass reaches: let it go on first "
            "(`watch.run()`), or use torch.autograd.grad, which does not write .grad"
        )


def edge_of(root: Any) -> tuple[Any, int]:
    """Return the graph edge of a root, which is a tensor or a graph edge of torch's."""
    edge = torch.autograd.graph.get_gradient_edge(root) if isinstance(root, torch.Tensor) else root
    return edge.node, edge.output_nr


torch_private.set_engine(_Engine())
