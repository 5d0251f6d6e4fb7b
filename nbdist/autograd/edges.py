"""The two ends of an edge: what stands in the autograd graphs for tensors that went from worker to worker.

Where tensors leave, each of them gets a *gate*: a node behind which its local history lies, and through which its
gradient enters. Where they arrive, each gets a *receive* node; when it runs, the tensor's gradient goes back to the
worker from which it came, together with those of the other tensors of its message. Both only do anything inside of
a pass, which the thread that runs it carries along (`current_part`), also to the engine's threads for other devices.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function

from nbdist.autograd.measuring import is_finite
from nbdist.errors import UsageError
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

if TYPE_CHECKING:
    from nbdist.autograd.part import Part

__all__ = ["RECEIVE", "Held", "Node", "Received", "Sent", "Slot", "current_part", "receive", "swap_part"]

Node = Any
"""A node of torch's graph; those of C++ have no class that could be named here."""

_PART = "nbdist.autograd.part"


def current_part() -> Part | None:
    """The part of a pass that the calling thread executes."""
    return thread_value(_PART) if thread_has(_PART) else None


def swap_part(part: Part | None) -> Part | None:
    """Make ``part`` the one that the calling thread executes, or none; return the part before, to be put back.

    It is kept in torch's thread-local storage, because the engine hands that on to the threads of other devices.
    It is removed rather than replaced by None: a thread that ends with an entry there waits for the GIL for ever.
    """
    outer: Part | None = None
    if thread_has(_PART):
        outer = thread_value(_PART)
        take_from_thread(_PART)
    if part is not None:
        keep_in_thread(_PART, part)
    return outer


class Held(Exception):
    """Raised by a gate whose gradient has not come: nothing else can run before it does."""


class Slot:
    """One tensor that was sent: the place where its gradient enters this worker's graph."""

    __slots__ = ("__weakref__", "edge", "gate", "index", "message", "node")

    def __init__(self, message: int, index: int, tensor: torch.Tensor) -> None:
        self.message = message
        self.index = index
        make = _make_gate if innermost_transform() is None else _Gate.apply  # which says that a gate has no transform
        self.gate: torch.Tensor = make(self, unwrap_if_dead(tensor))
        self.node: Node = self.gate.grad_fn
        self.edge: tuple[Node, int] = self.node.next_functions[0]

    def __repr__(self) -> str:
        return f"<Slot {self.index} of message {self.message}>"


class Sent:
    """The sending end: what the tensors of one message left behind."""

    def __init__(self, message: int, peer: int, tensors: Sequence[torch.Tensor], function: str) -> None:
        self.message = message
        self.peer = peer
        self.function = function
        self.slots: list[Slot] = []
        for index, tensor in enumerate(tensors):
            self.slots.append(Slot(message, index, tensor))


class Received:
    """The receiving end of a message's tensors."""

    looked_at = False
    """Whether it is known which of the tensors held a NaN or Inf when they came: in a context that is watched,"""
    spoilt: frozenset[int] = frozenset()
    """and which those were."""

    def __init__(self, message: int, peer: int, function: str) -> None:
        self.message = message
        self.peer = peer
        self.function = function
        self.like: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        """The shape, dtype and device of each tensor of the message, in the order in which they were sent."""
        self.node_references: list[weakref.ref[Node]] = []
        """Weak references to the receive nodes: a node holds this object, and would never be freed if held in turn."""

    @property
    def nodes(self) -> list[Node]:
        """The nodes, as far as they live."""
        return [node for reference in self.node_references if (node := reference()) is not None]

    def look(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note which of the tensors that have come hold a NaN or Inf."""
        with suppress(Exception):  # of a kind of tensor that cannot be looked at
            self.spoilt = frozenset(index for index, tensor in enumerate(tensors) if not is_finite(tensor))
            self.looked_at = True


def _enter(ctx: Any, slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
    ctx.slot = weakref.ref(slot)  # which holds this node
    return torch.empty((), device="cpu")


def _let_in(ctx: Any, _: torch.Tensor) -> tuple[None, torch.Tensor | None]:
    part = current_part()
    assert part is not None  # nobody but a pass has the tensor behind which a gate lies
    return None, part.enter(ctx.slot())


def _arrive(
    ctx: Any, anchor: torch.Tensor, end: Received, first: int, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    ctx.set_materialize_grads(False)
    ctx.end = end
    ctx.first = first
    return tuple(tensors)


def _send_back(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None, None]:
    part: Part | None = thread_value(_PART) if thread_has(_PART) else None
    if part is None:
        raise UsageError(
            f"this pass has come to a tensor that was received from another worker ({ctx.end.function}), and a "
            f"local backward() or autograd.grad() cannot go on there: write "
            f"`dist_autograd.backward(context_id, [loss])` inside of the `with dist_autograd.context() as context_id:`"
        )
    part.cross(ctx.end, ctx.first, gradients)
    return None, None, None, None


# The names are torch's: programs that look at the graph find what they look for.
_Gate: Any = type(
    "torch::distributed::autograd::SendRpc",
    (Function,),
    {"forward": staticmethod(_enter), "backward": staticmethod(_let_in), "__module__": __name__},
)
_Receive: Any = type(
    "torch::distributed::autograd::RecvRpc",
    (Function,),
    {"forward": staticmethod(_arrive), "backward": staticmethod(_send_back), "__module__": __name__},
)

_make_gate, _make_received = direct_apply(_Gate), direct_apply(_Receive)

RECEIVE: type = _Receive._backward_cls
"""The class of receive nodes."""

one_node_a_message = False
"""As torch has it; for programs that look at its graph."""

_anchor = torch.zeros((), device="cpu", requires_grad=True)
"""What makes autograd record a receive: a node needs an input that requires grad."""


def receive(end: Received, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Give tensors that have come their history: the gradients they get go back through ``end``.

    Each has a node of its own, because a node runs with all of its outputs' hooks, also where only one is used.
    """
    made: list[torch.Tensor] = []
    size = len(tensors) if one_node_a_message else 1
    apply = _make_received if innermost_transform() is None else _Receive.apply
    before = torch.is_grad_enabled()
    set_grad_enabled(True)
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
