"""Finds where a NaN or Inf comes from that a backward pass was given by the forward pass.

A node makes a NaN of finite gradients in one of two ways: by its own arithmetic, or because what it has saved of the
forward pass holds one already. In the latter case this goes back along the graph, from saved value to saved value, and
with the message that brought a tensor to the worker that sent it, which goes on there::

    notebook                           worker2
    Pow  saved self = NaN
     └─ receive (message 7) ─────────>  Log  saved self = -1.0, which is finite, and handed on a NaN: it made it

It looks at what torch has saved for the backward pass anyway, and computes nothing anew. What lies behind hooks for
saved tensors, as in a checkpoint, is not looked at, because those are the user's code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.utils.checkpoint import CheckpointFunction

from nbdist.autograd.edges import RECEIVE, Node
from nbdist.autograd.graph import ACCUMULATE, walk
from nbdist.autograd.measuring import is_finite
from nbdist.autograd.saved import Saved, saved_by
from nbdist.errors import NbdistError
from nbdist.rpc.api import current_agent, rpc_async

if TYPE_CHECKING:
    from nbdist.autograd.contexts import Context
    from nbdist.autograd.recorder import Recorder

__all__ = ["Carried", "Inherited", "explain", "explain_sent", "told"]

_OUTPUTS = ("result", "output", "out", "values")
"""How the names begin under which torch's nodes save what they have returned; all others are of inputs."""
_MOST = 3
"""So many messages are named that may have carried it."""
_PATIENCE = 2.0
"""Seconds for the answer of another worker; the pass waits for it."""

Edge = tuple[Node, int]
"""A tensor of the forward pass: the node that returned it, and as which of its outputs."""


class Carried(NamedTuple):
    """A message that brought a NaN or Inf to another worker."""

    message: int
    """Its ``autograd_message_id`` in the context's `trace`."""
    sender: str
    function: str


class Inherited(NamedTuple):
    """A NaN or Inf that a node was given by the forward pass, and how far back it is known.

    ``end`` says what is known of the node where that ends:

    ``operation``
        its forward operation made it: no input held one.
    ``leaf``
        it is a leaf, such as a parameter, that holds it.
    ``data``
        an input of it that needs no gradient holds it.
    ``kept``
        a Function of the user's keeps it: as an input that needs no gradient, or as what it made.
    ``unknown``
        it, or something behind it, made it: not all that it was given has been saved. ``node`` is negative where only
        the worker is known.
    ``hidden``
        what it has saved lies behind hooks, so the NaN may be of the backward pass as well.
    """

    value: str
    """``NaN`` or ``Inf``."""
    end: str
    worker: str
    node: int = -1
    """Its number in the context's `trace`."""
    name: str = ""
    messages: tuple[Carried, ...] = ()
    """Those that carried it, the last one first."""
    perhaps: tuple[Carried, ...] = ()
    """Those that may have carried it before, where that is not known."""


def explain(
    context: Context, worker: str, name_of: Callable[[int], str], node: Node, saved: Sequence[Saved]
) -> Inherited | None:
    """Return what a node that makes a NaN or Inf was given by the forward pass; None if all of that was finite.

    ``saved`` is what it had saved before it ran. The calling thread runs the node: what lies behind it has not run.
    """
    saved = [*saved, *_set_on(node)]
    search = _Search(context, worker, name_of, node, saved)
    value = search.value_of(each.tensor for each in saved if not each.packed)
    if value:
        return search.follow(node, 0, value)
    if search.hides(node):
        behind = search.nearest(node)
        if behind is not None:
            return search.follow(*behind, search.value_of(search.values.get(behind, ())) or "NaN")
        return search.end("hidden", node, "NaN or Inf")
    return None


def explain_sent(context_id: int, message: int, index: int, value: str) -> Inherited | None:
    """Return where a NaN or Inf comes from that was sent from this worker with a message, as its tensor ``index``."""
    here = cast("Recorder", current_agent().recorder)
    context = here.contexts.find(context_id)
    sent = context.sends.get(message) if context is not None else None
    if context is None or sent is None or len(context.runs) > 1:  # another pass may let go of what is looked at
        return None
    node, output = sent.slots[index].edge
    saved = [*saved_by(node), *_set_on(node)]
    return _Search(context, here.name, here.name_of, node, saved).follow(node, output, value)


class _Search:
    """The values of the forward pass behind a node, as far as they are saved."""

    def __init__(
        self, context: Context, worker: str, name_of: Callable[[int], str], start: Node, saved: Sequence[Saved]
    ) -> None:
        self._context = context
        self._worker = worker
        self._name_of = name_of
        self.values: dict[Edge, list[torch.Tensor]] = {}
        """By what returned them."""
        self._constants: dict[Node, list[torch.Tensor]] = {}
        """By the node that has saved them: they need no gradient."""
        self._hiding = set[Node]()
        self._known: dict[int, str] = {}
        for node in walk([(start, 0)]).nodes:
            kind: Any = type(node)
            if kind is ACCUMULATE:
                self.values[node, 0] = [node.variable]
            for each in saved if node is start else [*saved_by(node), *_set_on(node)]:
                self._enter(node, each)

    def _enter(self, node: Node, saved: Saved) -> None:
        tensor = saved.tensor
        if saved.packed or tensor is None:
            self._hiding.add(node)
        elif tensor.grad_fn is not None:
            self.values.setdefault((tensor.grad_fn, tensor.output_nr), []).append(tensor)
        elif saved.name.startswith(_OUTPUTS):
            digits = saved.name.lstrip("abcdefghijklmnopqrstuvwxyz_")
            self.values.setdefault((node, int(digits) if digits.isdigit() else 0), []).append(tensor)
        elif not tensor.requires_grad:
            self._constants.setdefault(node, []).append(tensor)

    def value_of(self, tensors: Iterable[torch.Tensor | None]) -> str:
        """Return ``"NaN"`` or ``"Inf"`` if one of these holds one, else nothing."""
        found = {self._value(tensor) for tensor in tensors if tensor is not None}
        return next((value for value in ("NaN", "Inf") if value in found), "")

    def _value(self, tensor: torch.Tensor) -> str:
        value = self._known.get(id(tensor))
        if value is None:
            value = ""
            with contextlib.suppress(Exception):  # of a kind of tensor that cannot be looked at
                if (tensor.is_floating_point() or tensor.is_complex()) and not is_finite(tensor.detach()):
                    value = "NaN" if bool(tensor.detach().isnan().any()) else "Inf"
            self._known[id(tensor)] = value
        return value

    def _holds(self, edge: Edge) -> bool | None:
        """Return whether what went along an edge held a NaN or Inf; None if that is not known."""
        node, output = edge
        kind: Any = type(node)
        if kind is RECEIVE and node.first + output in node.end.spoilt:
            return True
        if edge in self.values:
            return bool(self.value_of(self.values[edge]))
        return False if kind is RECEIVE and node.end.looked_at else None

    def hides(self, node: Node) -> bool:
        """Return whether a node computes with what cannot be seen: it is packed by hooks, or computed anew."""
        return node in self._hiding or getattr(node, "_forward_cls", None) is CheckpointFunction

    def nearest(self, node: Node) -> Edge | None:
        """Return the nearest edge behind a node that is known to have held one, behind edges of which it is not known.

        A node that has saved a constant that holds one stands for the first edge out of it.
        """
        seen, queue = {node}, [node]
        while queue:
            behind = _behind(queue.pop(0))
            for edge in behind:
                if self._holds(edge):
                    return edge
            for edge in behind:
                if edge[0] not in seen and self._holds(edge) is None:
                    seen.add(edge[0])
                    if self.value_of(self._constants.get(edge[0], ())):
                        return edge
                    queue.append(edge[0])
        return None

    def follow(self, node: Node, output: int, value: str) -> Inherited:
        """Go back from a node that has returned, or was given, a NaN or Inf."""
        seen = set[Edge]()
        while (node, output) not in seen:
            seen.add((node, output))
            kind: Any = type(node)
            if kind is RECEIVE:
                return self._across(node, output, value)
            if kind is ACCUMULATE:
                return self.end("leaf", node, value)
            behind = _behind(node)
            held = {edge: self._holds(edge) for edge in behind}
            spoilt = next((edge for edge in behind if held[edge]), None)
            if spoilt is None:
                is_users = hasattr(node, "_forward_cls")
                constants = self._constants.get(node, ())
                if constant := self.value_of(constants):
                    return self.end("kept" if is_users else "data", node, constant)
                # The inputs that need no gradient, of which a user's Function may have saved other things instead.
                unknown = len(behind) < len(node.next_functions) - (0 if is_users else len(constants))
                if not unknown and not self.hides(node) and False in held.values() and None not in held.values():
                    return self.end("operation", node, value)
                spoilt = self.nearest(node)
                if spoilt is None:
                    return self.end("unknown", node, value)
            value = self.value_of(self.values.get(spoilt, ())) or value
            node, output = spoilt
        return self.end("unknown", node, value)

    def end(self, how: str, node: Node, value: str) -> Inherited:
        """Return that it is not known, or does not go, further back than to a node."""
        kind: Any = type(node)
        name = type(node.variable).__name__ if kind is ACCUMULATE else node.name()
        perhaps = tuple(self._doubtful(node))[:_MOST] if how in ("unknown", "hidden") else ()
        number = self._context.numbers.of([node])[node]
        return Inherited(value, how, self._worker, number, name, perhaps=perhaps)

    def _doubtful(self, node: Node) -> Iterator[Carried]:
        """Yield the messages behind a node of which it is not known whether they held a NaN or Inf."""
        seen, queue = {node}, [node]
        while queue:
            for edge in _behind(queue.pop(0)):
                if edge[0] not in seen and self._holds(edge) is None:
                    seen.add(edge[0])
                    queue.append(edge[0])
                    kind: Any = type(edge[0])
                    if kind is RECEIVE:
                        yield self._carried(edge[0])

    def _carried(self, node: Node) -> Carried:
        return Carried(node.end.message, self._name_of(node.end.peer), node.end.function)

    def _across(self, node: Node, output: int, value: str) -> Inherited:
        carried = self._carried(node)
        found = _ask(carried.sender, self._context.id, carried.message, node.first + output, value)
        if found is None:
            found = Inherited(value, "unknown", carried.sender)
        return found._replace(messages=(carried, *found.messages))


def _set_on(node: Node) -> Iterator[Saved]:
    """Yield the tensors that a user's Function has set on its ``ctx``."""
    for name, value in getattr(node, "__dict__", {}).items():
        if isinstance(value, torch.Tensor):
            yield Saved(f"ctx.{name}", value, value, False)


def _behind(node: Node) -> list[Edge]:
    return [(to, output) for to, output in node.next_functions if to is not None]


def _ask(worker: str, *args: Any) -> Inherited | None:
    """Have another worker go on; None if it does not answer, or does not know."""
    here = cast("Recorder", current_agent().recorder)
    with here.contexts.outside(), contextlib.suppress(NbdistError, RuntimeError):
        found: Inherited | None = rpc_async(worker, explain_sent, args=args, timeout=_PATIENCE).wait()
        return found
    return None


def told(found: Inherited | None, node: str, where: Callable[[Inherited], str]) -> str:
    """Return a sentence about the NaN or Inf that a pass came to first, at ``node``; ``where`` names where it ends."""
    if found is None:
        return f"the first NaN or Inf came up at {node}"
    if found.end == "hidden":
        return (
            f"the first NaN or Inf was seen at {node}, but may be of the forward pass: what was saved there is packed "
            f"by hooks or computed anew by a checkpoint, and is not looked at{_perhaps(found)}; {_TELLS}"
        )
    parts, receiver = [], ""
    for message in found.messages:
        parts.append(f"{f'and to {receiver}' if receiver else 'it came'} {_with(message)}")
        receiver = message.sender
    way = ", ".join(parts)
    end = where(found) if found.node >= 0 else ""
    ends = {
        "operation": f"made by {end}",
        "leaf": f"held by the leaf {end}",
        "data": f"held by an input, which needs no gradient, of {end}",
        "kept": f"kept by {end}, which was given it or made it",
        "unknown": f"it came out of {end}{_perhaps(found)}; {_TELLS}" if end else _TELLS,
    }
    already = f"{node} was given {found.value} by the forward pass already: "
    return already + "; ".join([way, ends[found.end]] if way else [ends[found.end]])


_TELLS = 'context(check="nan") names the operation that made it'


def _perhaps(found: Inherited) -> str:
    return f"; it may have come {' or '.join(map(_with, found.perhaps))}" if found.perhaps else ""


def _with(message: Carried) -> str:
    return f"with message {message.message} from {message.sender} (call of {message.function})"
