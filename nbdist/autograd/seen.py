"""What has been seen of a backward pass, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbdist.autograd import inherited, messages
from nbdist.autograd.inherited import Inherited
from nbdist.rpc.peeking import Histogram

__all__ = ["Event", "Key", "Pass", "Share"]

Key = tuple[str, int]
"""A node: the name of its worker, and its number there."""


@dataclass(frozen=True)
class Event:
    """Something that happened in a pass.

    ``began``
        a worker takes part.
    ``marked``, ``arrived``, ``sent``
        a message's tensors are going to get gradients, have got them, and have sent them on.
    ``waiting``
        nothing more can run on a worker before a message's gradients have come.
    ``running``, ``done``
        a node, with the norm and the distribution of the gradients it was given where norms are asked for, and the
        time it took.
    ``halted``, ``nan``
        a node before which the pass was paused; a NaN or Inf that was looked for was given to it or made by it, also
        the first that a worker comes to in a pass whose norms are asked for.
    """

    time: float
    """Seconds since 1970, by the worker's clock."""
    worker: str
    what: str
    node: int | None = None
    """Its number in the context's `trace`."""
    name: str | None = None
    message: int | None = None
    seconds: float | None = None
    norm: float | None = None
    histogram: Histogram | None = None
    inherited: Inherited | None = None
    """Of a ``nan``: where it is from, if the forward pass gave it to the node; None if the backward pass made it."""

    @property
    def told(self) -> str:
        """In a sentence: of a ``nan``, also whether the forward pass gave it to the node, and from where."""
        node = _named(self.worker, self.name or "", self.node)
        if self.what == "nan":
            return inherited.told(self.inherited, node, lambda end: _named(end.worker, end.name, end.node))
        return f"{self.what} {node}" if self.name else f"{self.what} on {self.worker}"

    @property
    def key(self) -> Key | None:
        """The node, as `run` takes it."""
        return None if self.node is None else (self.worker, self.node)


def _named(worker: str, name: str, node: int | None) -> str:
    """Return how a node is called in a sentence."""
    short = name.rsplit("::", 1)[-1].removesuffix("Backward0").removesuffix("Backward")
    return f"{short}@{worker} (node {node})"


@dataclass
class Share:
    """How far one worker is known to be with a pass."""

    taken: int = 0
    overtaken: dict[int, messages.Observed] = field(default_factory=dict)
    version: int = 0
    halt: int = 0
    """The halt at which it is, or was last."""
    gone: int = 0
    """The halts that it was allowed to leave."""
    at: Event | None = None
    """Where it is halted."""
    resting: bool = True


@dataclass
class Pass:
    """One backward pass, as it was seen."""

    root: str
    """The worker that began it."""
    number: int
    mode: str
    events: list[Event] = field(default_factory=list)
    over: bool = False
    error: str = ""
    shares: dict[int, Share] = field(default_factory=dict, repr=False)
    told: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def complete(self) -> bool:
        """Whether it is over, and all is here that was seen of it."""
        return self.over and all(
            worker in self.shares and self.shares[worker].taken >= count for worker, count in self.told.items()
        )

    @property
    def seconds(self) -> float:
        """From its first event to its last."""
        times = [event.time for event in self.events]
        return max(times) - min(times) if times else 0.0

    def __repr__(self) -> str:
        ran = [event for event in self.events if event.what == "done"]
        workers = {event.worker for event in ran}
        how = self.error.partition("\n")[0] if self.error else "over" if self.over else "under way"
        return (
            f"<Pass {self.number} of {self.root}, {self.mode}: {len(ran)} nodes on {len(workers)} workers in "
            f"{self.seconds * 1000:.1f} ms, {how}>"
        )
