"""The two ends of an edge: the nodes in torch's graphs for the tensors of a message from one worker to another.

One message with two tensors; the arrows show the way of the gradients::

    sender (Sent)                                       receiver (Received)
    history of x <--- gate (Slot 0) <---+            +--- receive node <--- what was computed from x
                                        |<- message -|
    history of y <--- gate (Slot 1) <---+            +--- receive node <--- what was computed from y

A *gate* is the node in front of the history of a tensor that was sent. The tensor's gradient enters right behind it, at
`EdgeSlot.edge`; the gate itself runs only as a barrier, or if the gradient that has arrived is None. When a *receive
node* runs, it hands its gradient to the part of the pass. The part sends it to the worker that the tensor came from,
together with the gradients of the message's other tensors.

Both kinds of nodes need to know the part for which they run (`current_part`). It belongs to the thread that calls
torch's engine, and the engine hands it on to its threads for other devices.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.autograd import Function

from nbdist.autograd.graph.measuring import Gradients, is_finite
from nbdist.errors import UsageError
from nbdist.thread_frames import thread_name
from nbdist.torch_private import (
    direct_apply,
    innermost_transform,
    keep_in_thread,
    set_grad_enabled,
    take_from_thread,
    thread_has,
    thread_value,
    unwrap_if_dead,
)

# A node of torch's graph. Nodes made in C++ have no class that could be named here. Call a node's methods by way of its
# class: ``type(node).name(node)``. The node of a user's `torch.autograd.Function` is the ``ctx`` of that function as
# well, and may have attributes of the user's with the names of methods, such as ``name``.
Node = Any
GraphEdge = tuple[Node, int]  # a node, and the number of one of its outputs

_PART = "nbdist.autograd.part"  # the key of a thread's part among the values of torch's threads


class RunningPart(Protocol):
    """The methods of a part that its nodes call while torch's engine runs them."""

    def enter(self, slot: EdgeSlot) -> torch.Tensor | None:
        """Return None as the gradient of a gate that the engine runs; raise `HeldBack` if the gate is a barrier."""

    def cross(self, end: Received, first: int, gradients: Gradients) -> None:
        """Take the gradients that a receive node was given, for the tensors of ``end`` from index ``first`` on."""


def current_part() -> RunningPart | None:
    """Return the part for which the calling thread runs nodes; None for a plain ``backward()`` of torch, or outside."""
    return thread_value(_PART) if thread_has(_PART) else None


def swap_part(part: RunningPart | None) -> RunningPart | None:
    """Set the part for which the calling thread runs nodes, or None; return the one before, to be put back later."""
    outer: RunningPart | None = None
    if thread_has(_PART):
        outer = thread_value(_PART)
        take_from_thread(_PART)
    if part is not None:  # never stored as None: a thread that ends with an entry there waits for the GIL for ever
        keep_in_thread(_PART, part)
    return outer


class HeldBack(Exception):
    """Raised by a barrier to end a contested call of torch's engine: no other node can run now."""


class EdgeSlot:
    """One tensor that was sent: its gate, and the graph edge at which its gradient enters this worker's graph."""

    __slots__ = ("__weakref__", "device", "edge", "gate", "index", "message", "node")

    def __init__(self, message: int, index: int, tensor: torch.Tensor) -> None:
        self.message = message
        self.index = index
        self.device: torch.device = tensor.device  # where its gradient must be, too
        make = _make_gate if innermost_transform() is None else _Gate.apply  # which raises torch's error
        self.gate: torch.Tensor = make(self, unwrap_if_dead(tensor))  # the gate's output; it keeps the node alive
        self.node: Node = self.gate.grad_fn
        self.edge: GraphEdge = self.node.next_functions[0]  # the graph edge behind the gate

    def __repr__(self) -> str:
        return f"<Slot {self.index} of message {self.message}>"


class Sent:
    """The sending end of an edge: the slots of a message's tensors, the receiver, and the function called."""

    has_gpu_tensors = False  # or tensors on another device than the CPU

    def __init__(self, message: int, peer: int, tensors: Sequence[torch.Tensor], function: str) -> None:
        self.message = message
        self.peer = peer
        self.function = function
        self.slots: list[EdgeSlot] = []
        for index, tensor in enumerate(tensors):
            self.slots.append(EdgeSlot(message, index, tensor))
            if not tensor.is_cpu:
                self.has_gpu_tensors = True


class Received:
    """The receiving end of an edge: the receive nodes of a message's tensors, the sender, and the function called."""

    looked_at = False  # True if the tensors were searched for NaN and Inf when they arrived, as in a watched context
    spoilt: frozenset[int] = frozenset()  # the indices of the tensors that held one then, if `looked_at`

    def __init__(self, message: int, peer: int, function: str, context: int = 0, thread: int = 0) -> None:
        self.message = message
        self.peer = peer
        self.function = function
        self.context = context  # its id, and the ident of the thread that has opened it, if one of this worker's has
        self.thread = thread
        # Of each tensor of the message, in the order in which they were sent.
        self.like: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        # Weak, because each receive node refers to this object: a cycle through torch's nodes would never be freed.
        self.node_references: list[weakref.ref[Node]] = []

    @property
    def nodes(self) -> list[Node]:
        """The receive nodes that are still alive."""
        return [node for reference in self.node_references if (node := reference()) is not None]

    def look(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note which of the received tensors hold a NaN or Inf; waits for the GPU if they are on one."""
        # A tensor that cannot be searched, whatever error its class raises: a view must not fail the user's call.
        with suppress(Exception):
            self.spoilt = frozenset(index for index, tensor in enumerate(tensors) if not is_finite(tensor))
            self.looked_at = True


def _make_gate_node(ctx: Any, slot: EdgeSlot, tensor: torch.Tensor) -> torch.Tensor:
    ctx.slot = weakref.ref(slot)  # weak, because the slot refers to this node
    # Empty, as it only serves as a root for torch's engine. On the tensor's GPU, because the engine has a queue of
    # nodes for each device, and a gate has to wait in the same queue as the nodes that come first.
    return torch.empty((), device=tensor.device if tensor.is_cuda else "cpu")


def _run_gate(ctx: Any, _: torch.Tensor) -> tuple[None, torch.Tensor | None]:
    part = current_part()
    assert part is not None  # only the steps of a part have a gate's output as a root
    return None, part.enter(ctx.slot())


def _make_receive_node(
    ctx: Any, anchor: torch.Tensor, end: Received, first: int, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    # ``anchor`` is not used: it requires grad, without which torch would make no node.
    ctx.set_materialize_grads(False)  # else torch would make zeros for the tensors that get no gradient
    ctx.end = end
    ctx.first = first
    return tuple(tensors)  # as they are: torch gives them this node as their history


def _run_receive_node(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None, None]:
    part: RunningPart | None = thread_value(_PART) if thread_has(_PART) else None
    if part is None:
        end = ctx.end
        is_others = end.thread not in (0, threading.get_ident())
        whose = f" in context {end.context}, which thread {thread_name(end.thread)!r} has opened" if is_others else ""
        raise UsageError(
            f"this pass has come to a tensor that was received from another worker ({end.function}){whose}, and a "
            f"local backward() or autograd.grad() cannot go on there: write "
            f"`dist_autograd.backward(context_id, [loss])` inside of the `with dist_autograd.context() as context_id:`"
        )
    part.cross(ctx.end, ctx.first, gradients)
    return None, None, None, None


def new_function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """Return an autograd Function whose nodes have this name, with torch's suffix Backward."""
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__module__": __name__}
    return type(name, (Function,), members)


# These are the names of torch's own nodes, without the suffix: programs that search a graph for them find ours.
_Gate = new_function("torch::distributed::autograd::SendRpc", _make_gate_node, _run_gate)
_Receive = new_function("torch::distributed::autograd::RecvRpc", _make_receive_node, _run_receive_node)

_make_gate, _make_received = direct_apply(_Gate), direct_apply(_Receive)

# The class of receive nodes. Typed as Any, since mypy narrows a node whose type is compared with a `type`.
RECEIVE: Any = _Receive._backward_cls

# True to make one receive node for all tensors of a message, as torch does: `nbdist.compat` sets it. Otherwise each
# tensor has a node of its own, because a node calls the hooks of all its outputs, even if only one was used.
one_node_a_message = False

# The input of every receive node: torch makes a node only for a Function with an input that requires grad.
_anchor = torch.zeros((), device="cpu", requires_grad=True)


def receive(end: Received, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of a message with receive nodes as their history, and note these nodes in ``end``."""
    made: list[torch.Tensor] = []
    size = len(tensors) if one_node_a_message else 1
    apply = _make_received if innermost_transform() is None else _Receive.apply
    before = torch.is_grad_enabled()
    set_grad_enabled(True)  # else torch would make no nodes
    try:
        for first in range(0, len(tensors), size):
            new = apply(_anchor, end, first, tensors[first : first + size])
            end.node_references.append(weakref.ref(new[0].grad_fn))
            made += new
    finally:
        set_grad_enabled(before)
    for tensor in made:
        end.like.append((tensor.shape, tensor.dtype, tensor.device))
    return made
