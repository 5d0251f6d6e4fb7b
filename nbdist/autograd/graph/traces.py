"""The graph of a context, and the plan of a pass over it, as plain data that draws itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nbdist import registry
from nbdist.autograd.graph.events import Key, Pass
from nbdist.autograd.graph.hooks import Note
from nbdist.autograd.graph.messages import Mode
from nbdist.autograd.graph.origins import NodeOrigin

_NOWHERE = NodeOrigin()


class NodeInfo(msgspec.Struct, frozen=True, gc=False):  # a struct, as there are many: see `Event`
    """One node of a worker's autograd graph."""

    number: int
    """The node's number on its worker; `Event.node` and `Watch.run` use it too."""
    name: str
    kind: str
    """``operation``, ``leaf`` or ``receive``."""
    shape: tuple[int, ...] | None
    """The shape of the tensor that the node made (its first output), or None if it is not known."""
    dtype: str | None
    inputs: tuple[int, ...]
    """The numbers of the nodes that made the inputs of this one; its gradients go to them."""
    message: int | None = None
    """For a receive: the ``autograd_message_id`` of the edge that ends here."""
    tensors: tuple[int, ...] = ()
    """For a receive: the indices of the tensors that this node made, among the edge's tensors."""
    origin: NodeOrigin = _NOWHERE
    """The module and the line that made the node, if the context notes lines."""
    label: str | None = None
    """For a leaf: the parameter's path in its outermost module, `fc1.weight`, or a variable's name in `__main__`."""
    parameter_of: str | None = None
    """For a parameter: its module, as the class of the outermost module and a path, `Net.fc1`."""
    notes: tuple[Note, ...] = ()
    """Hooks of yours that run with the node, and so on: each as a word for the picture, and a sentence."""

    @property
    def module(self) -> str | None:
        """The module whose forward made the node, or None."""
        return self.origin.module

    @property
    def line(self) -> str | None:
        """The line of the user's code that made the node, or None."""
        return self.origin.line


@dataclass(frozen=True)
class Edge:
    """An edge from one worker to another: the tensors of one message, and the nodes that made them."""

    autograd_message_id: int
    sender: str
    receiver: str
    function: str
    tensors: tuple[tuple[tuple[int, ...], str, int], ...]
    """The shape, dtype and size in bytes of each tensor."""
    sources: tuple[int, ...]
    """The number of the sender's node that made each tensor."""

    @property
    def nbytes(self) -> int:
        """The size in bytes of all tensors of the edge."""
        return sum(size for _, _, size in self.tensors)


class _Drawn:
    """The base of the data that views draw: the repr is text, and a notebook shows a picture."""

    def __repr__(self) -> str:
        return registry.text_of(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return registry.pictures_of(self)


@dataclass(repr=False)
class Trace(_Drawn):
    """The graph of a context as plain data: nodes by worker, and the edges between workers. `trace` makes one.

    Its repr is text; in a notebook it shows itself as a picture, as in notebooks/02_distributed_autograd.ipynb. Its
    nodes and edges stay as they are when the context goes on or ends.
    """

    context_id: int
    nodes: dict[str, list[NodeInfo]] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    """The workers of the context that were lost while they were asked. Those lost before are left out."""
    of_step: bool = False
    """True for a step of a pipeline: its nodes are operations of the schedule, and run in this order.

    The nodes of a graph are in the order of the forward pass, and a backward pass runs against it.
    """
    passes: list[Pass] = field(default_factory=list)
    """The backward passes in the context that the watch on this worker has seen."""

    @property
    def workers(self) -> list[str]:
        """The names of the workers that the context reaches, without those that are lost: a new list."""
        return list(self.nodes)


@dataclass(repr=False)
class Plan(_Drawn):
    """The plan of a pass as plain data: which nodes would run, and for how many gradients each waits. `plan` makes one.

    Its repr is text; in a notebook it shows itself as a picture. It stays as it is when the context goes on or ends.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.mul, args=(w, 3)).sum()
        ...     planned = dist_autograd.plan(context_id, loss)
        >>> planned.workers, planned.unused
        (['worker0', 'worker1'], [])
    """

    trace: Trace
    roots: list[Key]
    waits_for: dict[Key, int]
    """By node that takes part: the number of gradients that it gets from other nodes and other workers."""
    edges: list[Edge]
    """The edges along which gradients go, for some of their tensors or all."""
    unused: list[Edge]
    """The edges along which no gradient goes. A FAST pass would fail because of them."""
    mode: Mode = "smart"

    @property
    def workers(self) -> list[str]:
        """The names of the workers on which at least one node would run, without those that are lost: a new list."""
        return [worker for worker in self.trace.workers if any(worker == name for name, _ in self.waits_for)]


def planned(recorded: Trace, roots: Sequence[Key], mode: Mode = "smart") -> Plan:
    """Return the plan of a pass from ``roots``, nodes of a recorded trace given as (worker, number). Pure."""
    nodes = {(worker, node.number): node for worker, each in recorded.nodes.items() for node in each}
    sources = {(edge.autograd_message_id, i): (edge, s) for edge in recorded.edges for i, s in enumerate(edge.sources)}
    waits_for = Counter(dict.fromkeys(roots, 0))
    used = set[int]()
    if mode == "fast":  # FAST waits for a gradient of everything that was sent
        waits_for.update((edge.sender, source) for edge in recorded.edges for source in edge.sources)
    stack = list(waits_for)  # not recursive: a graph may be deeper than Python's recursion limit
    while stack:
        key = stack.pop()
        node = nodes[key]
        behind: list[Key] = [(key[0], number) for number in node.inputs]
        if node.message is not None:
            for index in node.tensors:
                if (node.message, index) not in sources:  # its sender was lost
                    continue
                edge, source = sources[node.message, index]
                used.add(edge.autograd_message_id)
                if mode == "smart":  # FAST has begun at everything that was sent: the gradient counts already
                    behind.append((edge.sender, source))
        for other in behind:
            if other not in waits_for:
                stack.append(other)
            waits_for[other] += 1
    taken = [edge for edge in recorded.edges if edge.autograd_message_id in used]
    unused = [edge for edge in recorded.edges if edge.autograd_message_id not in used]
    return Plan(recorded, list(roots), dict(waits_for), taken, unused, mode)
