"""Finds where a NaN or Inf of a backward pass comes from, if the forward pass has made it.

A node turns finite gradients into a NaN in one of two ways: by its own arithmetic, or because the values that it saved
in the forward pass hold a NaN. In the second case the search goes back along the graph, from saved value to saved
value. At a tensor that was received, the worker that sent it continues the search::

    notebook                           worker2
    Pow  saved self = NaN
     └─ receive (message 7) ─────────>  Log  saved self = -1.0, which is finite, but its output was NaN: Log made it

The search reads only values that torch has saved for the backward pass, and computes nothing again. Values behind hooks
for saved tensors, as in a checkpoint, are not read, because unpacking them runs the user's code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from nbdist.autograd.graph.edges import RECEIVE, GraphEdge, Node
from nbdist.autograd.graph.inherited import Carried, Inherited
from nbdist.autograd.graph.measuring import is_finite
from nbdist.autograd.graph.saved import Saved, saved_by
from nbdist.autograd.graph.transport import Transport
from nbdist.autograd.graph.walk import ACCUMULATE, walk
from nbdist.autograd.passes.context import Context
from nbdist.errors import NbdistError
from nbdist.rpc.api import current_agent, rpc_async

_OUTPUTS = ("result", "output", "out", "values")  # torch's names of saved outputs begin so; all others are of inputs
_PERHAPS_NAMED = 3  # in ``Inherited.perhaps``
_ANSWER_TIMEOUT = 2.0  # seconds for the answer of another worker; the pass waits meanwhile


def explain(context: Context, here: Transport, node: Node, saved: Sequence[Saved]) -> Inherited | None:
    """Return how the forward pass gave a node the NaN or Inf that the node has made; None if all values were finite."""
    # In the thread that runs the node: the nodes behind it have not run then, and their saved values are there. What
    # the node itself had saved is given, as torch may have freed it since.
    saved = [*saved, *_set_on(node)]
    search = _Search(context, here, node, saved)
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
    """Return where a NaN or Inf comes from that this worker sent as tensor ``index`` of a message."""
    # The worker that received the message calls this by RPC.
    recorder: Any = current_agent().recorder
    context: Context | None = recorder.contexts.find(context_id)
    sent = context.sends.get(message) if context is not None else None
    if context is None or sent is None or len(context.runs) > 1:  # another pass may free the saved values
        return None
    node, output = sent.slots[index].edge
    saved = [*saved_by(node), *_set_on(node)]
    return _Search(context, recorder.transport, node, saved).follow(node, output, value)


class _Search:
    """The saved values of the forward pass behind a node on this worker, and the search through them."""

    # A tensor of the forward pass is named by its graph edge: the node that returned it, and the number of the output.

    def __init__(self, context: Context, here: Transport, start: Node, saved: Sequence[Saved]) -> None:
        self._context = context
        self._here = here
        # The saved tensors by the node and output that returned them; and those that need no gradient by the node that
        # saved them.
        self.values: dict[GraphEdge, list[torch.Tensor]] = {}
        self._constants: dict[Node, list[torch.Tensor]] = {}
        self._hiding = set[Node]()
        self._known: dict[int, str] = {}
        for node in walk([(start, 0)]).nodes:
            if type(node) is ACCUMULATE:
                self.values[node, 0] = [node.variable]
            for each in saved if node is start else [*saved_by(node), *_set_on(node)]:
                self._sort_in(node, each)

    def _sort_in(self, node: Node, saved: Saved) -> None:
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
        """Return ``"NaN"`` or ``"Inf"`` if one of these tensors holds one, NaN first; an empty string if not."""
        found = {self._nan_or_inf(tensor) for tensor in tensors if tensor is not None}
        return next((value for value in ("NaN", "Inf") if value in found), "")

    def _nan_or_inf(self, tensor: torch.Tensor) -> str:
        value = self._known.get(id(tensor))  # each is read once, as on a GPU the reading waits
        if value is None:
            value = ""
            with contextlib.suppress(Exception):  # of any kind of tensor that cannot be read: it counts as finite
                if (tensor.is_floating_point() or tensor.is_complex()) and not is_finite(tensor.detach()):
                    value = "NaN" if bool(tensor.detach().isnan().any()) else "Inf"
            self._known[id(tensor)] = value
        return value

    def _edge_held(self, edge: GraphEdge) -> bool | None:
        """Return whether a tensor held a NaN or Inf when it was made; None if that is not known."""
        node, output = edge
        is_received = type(node) is RECEIVE
        if is_received and node.first + output in node.end.spoilt:
            return True
        if edge in self.values:
            return bool(self.value_of(self.values[edge]))
        # A received tensor that was searched when it arrived, and is not among the spoilt ones, was finite.
        return False if is_received and node.end.looked_at else None

    def hides(self, node: Node) -> bool:
        """Return whether a node's saved values cannot be read: hooks packed them, or a checkpoint recomputes them."""
        return node in self._hiding or getattr(node, "_forward_cls", None) is CheckpointFunction

    def nearest(self, node: Node) -> GraphEdge | None:
        """Return the nearest tensor behind a node that is known to have held a NaN or Inf; or None."""
        seen, queue = {node}, [node]
        while queue:
            # Level by level, and only behind tensors about which nothing is known.
            behind = _edges_behind(queue.pop(0))
            for edge in behind:
                if self._edge_held(edge):
                    return edge
            for edge in behind:
                if edge[0] not in seen and self._edge_held(edge) is None:
                    seen.add(edge[0])
                    # The tensor is not known, but its node was given a NaN or Inf that needs no gradient.
                    if self.value_of(self._constants.get(edge[0], ())):
                        return edge
                    queue.append(edge[0])
        return None

    def follow(self, node: Node, output: int, value: str) -> Inherited:
        """Return where a NaN or Inf comes from that a node returned as ``output``, going back from node to node."""
        seen = set[GraphEdge]()
        while (node, output) not in seen:
            seen.add((node, output))
            if type(node) is RECEIVE:
                return self._ask_sender(node, output, value)
            if type(node) is ACCUMULATE:
                return self.end("leaf", node, value)
            behind = _edges_behind(node)
            held = {edge: self._edge_held(edge) for edge in behind}
            spoilt = next((edge for edge in behind if held[edge]), None)
            if spoilt is None:
                is_users = hasattr(node, "_forward_cls")
                constants = self._constants.get(node, ())
                if constant := self.value_of(constants):
                    return self.end("kept" if is_users else "data", node, constant)
                # Inputs that need no gradient have no edge. A node of torch's has saved them as constants, as far as it
                # needs them; a user's Function may have saved something else.
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
        """Return an answer whose search ended at a node of this worker; ``how`` is its ``Inherited.end``."""
        kind = type(node)
        name = type(node.variable).__name__ if kind is ACCUMULATE else kind.name(node)
        perhaps = tuple(self._doubtful_messages(node))[:_PERHAPS_NAMED] if how in ("unknown", "hidden") else ()
        number = self._context.numbers.of([node])[node]
        return Inherited(value, how, self._here.name, number, name, perhaps=perhaps)

    def _doubtful_messages(self, node: Node) -> Iterator[Carried]:
        """Yield the messages behind a node that may have held a NaN or Inf, as far as this worker knows."""
        seen, queue = {node}, [node]
        while queue:
            for edge in _edges_behind(queue.pop(0)):
                if edge[0] not in seen and self._edge_held(edge) is None:
                    seen.add(edge[0])
                    queue.append(edge[0])
                    if type(edge[0]) is RECEIVE:
                        yield self._message_of(edge[0])

    def _message_of(self, node: Node) -> Carried:
        return Carried(node.end.message, self._here.name_of(node.end.peer), node.end.function)

    def _ask_sender(self, node: Node, output: int, value: str) -> Inherited:
        """Return where the NaN or Inf of a received tensor comes from; ``unknown`` if its sender does not answer."""
        carried = self._message_of(node)
        found = Inherited(value, "unknown", carried.sender)
        arguments = self._context.id, carried.message, node.first + output, value
        # Outside of the context, so that this call of nbdist's own is not recorded in it.
        recorder: Any = current_agent().recorder
        with recorder.contexts.outside(), contextlib.suppress(NbdistError, RuntimeError):
            found = rpc_async(carried.sender, explain_sent, args=arguments, timeout=_ANSWER_TIMEOUT).wait() or found
        return found._replace(messages=(carried, *found.messages))


def _set_on(node: Node) -> Iterator[Saved]:
    """Yield the tensors that a user's Function has set as attributes of its ``ctx``."""
    for name, value in getattr(node, "__dict__", {}).items():
        if isinstance(value, torch.Tensor):
            yield Saved(f"ctx.{name}", value, value, False)


def _edges_behind(node: Node) -> list[GraphEdge]:
    return [(to, output) for to, output in node.next_functions if to is not None]
