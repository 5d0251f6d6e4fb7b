"""The data of a watch: the events of each backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from nbdist.amounts import counted, duration
from nbdist.autograd.graph import messages
from nbdist.autograd.graph.inherited import Inherited, told
from nbdist.rpc.references.peeking import Histogram

Key = tuple[str, int]  # a node, as (name of its worker, its number there)


class Event(msgspec.Struct, frozen=True, gc=False):  # a struct, and no work for the collector: there are many
    """Something that happened in a backward pass on one worker; `Watch` collects events, which cannot be changed.

    ``what`` is one of these:

    ``began``
        The worker takes part in the pass.
    ``marked``
        Tensors of ``message``, which the worker sent, will get gradients.
    ``arrived``
        Gradients for ``message``, which the worker sent, have arrived.
    ``sent``
        The worker has sent gradients for ``message``, which it received, to the sender.
    ``waiting``
        Nothing more can run on the worker before gradients for ``message``, which it sent, have arrived.
    ``running``
        A node begins. In a watch with norms, ``norm`` and ``histogram`` describe the gradients that it was given.
    ``done``
        A node has run, in ``seconds``.
    ``timed``
        A GPU has run a node, in ``seconds`` on its stream; ``done`` has those of the processor. It comes later than
        ``done``, with the same time. There is none for a node that is given no gradient on a GPU.
    ``failed``
        A node has raised an error, which ends the pass.
    ``halted``
        The pass is halted before a node, or, without a node, before the collective ``name``.
    ``issued``
        A collective goes on, before which the pass was halted.
    ``nan``
        A node was given a NaN or Inf, or has made one. It is reported if `Watch.run` looks for it, and in a watch with
        norms for the first one on each worker.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id, dist_autograd.watch(context_id, paused=True) as watch:
        ...     handle = dist_autograd.backward_async(context_id, (w * 2).sum())
        ...     [event] = watch.step()
        ...     watch.run()
        ...     handle.wait()
        >>> event.what, event.name, event.key
        ('done', 'SumBackward0', ('worker0', 1))
    """

    time: float
    """Seconds since 1970, by the worker's clock."""
    worker: str
    """The name of the worker."""
    what: str
    node: int | None = None
    """The node's number, as in the `trace` of the context."""
    name: str | None = None
    """The node's name in torch, such as ``SumBackward0``."""
    message: int | None = None
    seconds: float | None = None
    norm: float | None = None
    histogram: Histogram | None = None
    inherited: Inherited | None = None
    """For a ``nan``: its origin in the forward pass; None if the backward pass made it, or gave it to the node."""

    @property
    def told(self) -> str:
        """The event in a few words, such as "done" and its node; for a ``nan`` a sentence that says where it began."""
        node = _words_for_node(self.worker, self.name or "", self.node)
        if self.what == "nan":
            return told(self.inherited, node, lambda end: _words_for_node(end.worker, end.name, end.node))
        return f"{self.what} {node}" if self.name else f"{self.what} on {self.worker}"

    @property
    def key(self) -> Key | None:
        """The node, as (worker, number), which `Watch.run` takes as ``until``; None for an event without a node.

        `Watch.run` takes None to halt nowhere.
        """
        return None if self.node is None else (self.worker, self.node)


def _words_for_node(worker: str, name: str, node: int | None) -> str:
    short = name.rsplit("::", 1)[-1].removesuffix("Backward0").removesuffix("Backward")
    return f"{short}@{worker}" + (f" (node {node})" if node is not None else "")


@dataclass
class Share:
    """One worker's progress in a pass, as far as its watch knows."""

    taken: int = 0  # the number of `Observed` messages of the worker that have been read, in their order
    overtaken: dict[int, messages.Observed] = field(default_factory=dict)  # came before earlier ones; by their numbers
    version: int = 0  # of the control that the worker had at its last message
    halt: int = 0  # the number of the worker's last halt that the watch knows
    gone: int = 0  # the number of the last halt that the watch has ended
    at: Event | None = None  # the node before which the worker is halted now
    # The worker's "done" and "issued" events, as they arrived: `Watch.passes` may sort `Pass.events` by time meanwhile.
    done: list[Event] = field(default_factory=list)
    resting: bool = True  # nothing can run on the worker before another message comes


@dataclass
class Pass:
    """One backward pass, as its `Watch` has seen it; `Watch.passes` lists them.

    It grows while the pass runs, and shows itself in one line. To read it changes nothing; `error` has the error of a
    pass that failed, which no property raises.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     watch = dist_autograd.watch()
        ...     dist_autograd.backward(context_id, [(w * 2).sum()])
        ...     seen = watch.passes[0]
        >>> seen
        <Pass 1 of worker0, smart: 3 nodes on 1 worker in ..., over>
        >>> [event.name for event in seen.events if event.what == "done"][:2]
        ['SumBackward0', 'MulBackward0']
    """

    root: str
    """The name of the worker that began the pass."""
    number: int
    """The number of the pass among the passes that began on that worker."""
    mode: str
    """``smart``, ``fast``, or ``local`` for torch's own ``backward()``; empty as long as that is not known."""
    events: list[Event] = field(default_factory=list)
    """The events of the pass, in the order in which the watch learned of them; `Watch.passes` sorts them by time."""
    over: bool = False
    """True once the pass is known to be over."""
    error: str = ""
    """The error that ended the pass, as text; empty if there was none."""
    shares: dict[int, Share] = field(default_factory=dict, repr=False)
    """The progress of each worker, by incarnation."""
    told: dict[int, int] = field(default_factory=dict, repr=False)
    """The number of messages that each worker has sent about the pass, known once it is over."""

    @property
    def complete(self) -> bool:
        """True if the pass is over and all its events have arrived; after an error, as soon as it is over.

        Stays False for a pass that the end of its context has ended.
        """
        return self.over and all(
            worker in self.shares and self.shares[worker].taken >= count for worker, count in self.told.items()
        )

    @property
    def seconds(self) -> float:
        """The seconds from the first event known to the last; 0 without events.

        The time of each event is from its worker's own clock, so clocks that differ between hosts make this wrong.
        """
        times = [event.time for event in self.events]
        return max(times) - min(times) if times else 0.0

    def __repr__(self) -> str:
        ran = [event for event in self.events if event.what == "done"]
        workers = {event.worker for event in ran}
        how = self.error.partition("\n")[0] if self.error else "over" if self.over else "under way"
        return (
            f"<Pass {self.number} of {self.root}, {self.mode}: {counted(len(ran), 'node')} on "
            f"{counted(len(workers), 'worker')} in {duration(self.seconds)}, {how}>"
        )
