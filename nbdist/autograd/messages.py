"""What the workers of a context and of a pass say to each other, behind the topic of a `Cast`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from nbdist.autograd.inherited import Inherited
from nbdist.errors import ProtocolError
from nbdist.rpc.peeking import Histogram
from nbdist.wire import quick
from nbdist.wire.messages import Payload
from nbdist.wire.tensors import Space, is_packable, pack_alone

__all__ = [
    "Cancel",
    "Control",
    "Entered",
    "Failed",
    "Freeze",
    "Go",
    "Gradients",
    "Granted",
    "Happening",
    "Head",
    "Mark",
    "Marked",
    "Message",
    "Missing",
    "Observed",
    "Over",
    "PassId",
    "Release",
    "Report",
    "Steer",
    "Token",
    "Turn",
    "Watch",
    "Watching",
    "decode",
    "encode",
    "encode_usual_gradients",
]


class PassId(msgspec.Struct, array_like=True, frozen=True):
    """Names one pass: the incarnation of the agent that began it, and a number of its."""

    root: int
    number: int


class Token(msgspec.Struct, array_like=True, frozen=True):
    """Names one mark or gradient on its way: who sent it, a number of its, and which of both it is."""

    sender: int
    number: int
    is_mark: bool


class Missing(msgspec.Struct, array_like=True, frozen=True, order=True):
    """A gate whose gradient has not come: the message, the function called, who has the other end."""

    message: int
    function: str
    peer: int


class Control(NamedTuple):
    """How the passes of a context are to go on, as its watch has it; of two, the one with the higher version holds."""

    version: int
    paused: bool = False
    """Halt before each node."""
    until: str = ""
    """Else halt before the first node that is given a NaN or Inf, or after which there is one (``"nan"``), before the
    next that sends a gradient to another worker (``"message"``), or before a certain one (``"node"``)."""
    worker: str = ""
    node: int = -1
    """That one."""


class Watching(NamedTuple):
    """Who wants to know of a context's passes, by which of its watches, and of what besides."""

    watcher: int
    watch: int
    norms: bool
    control: Control


class Happening(NamedTuple):
    """Something that was seen of a pass on one worker; what is not known is negative."""

    time: float
    what: str
    node: int = -1
    message: int = -1
    name: str = ""
    seconds: float = -1.0
    norm: float = -1.0
    histogram: Histogram | None = None
    """Of the gradients whose norm that is."""
    halt: int = -1
    """Which of the worker's halts this is, and by which version of the control."""
    version: int = -1
    inherited: Inherited | None = None
    """Of a NaN or Inf: what is known of it if it is of the forward pass."""


class Head(msgspec.Struct, array_like=True, frozen=True):
    """Of which pass a message is; enough for a worker that hears of it for the first time."""

    id: PassId
    context: int
    smart: bool
    retain_graph: bool
    accumulate: bool
    """Into ``.grad``, rather than into the context."""
    since: int
    """All earlier passes of this root in this context are over."""
    watching: Watching | None = None


class Mark(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """These tensors of these messages are going to get gradients."""

    head: Head
    token: Token
    sends: list[tuple[int, list[int]]]


class Report(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """To the root: what was dealt with here, and what was sent because of that, to whom."""

    id: PassId
    number: int
    settled: list[Token]
    marked: list[Token]
    """What waits here, but all that will come of it has been marked."""
    sent: list[tuple[Token, int]]
    waits: bool
    missing: list[Missing]
    reduces: bool = False
    """Whether gradients are averaged with other workers' here."""
    observed: int = 0
    """How often the pass's watcher was told of it from here."""


class Gradients(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Gradients of some of a message's tensors; they follow in the body."""

    head: Head
    token: Token
    message: int
    outputs: list[int]
    report: Report | None = None
    """Where it goes to the root anyway."""


class Marked(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """From the root: all has been marked that is going to be, and it is this pass's turn to reduce, if it does."""

    id: PassId


class Turn(msgspec.Struct, array_like=True, frozen=True, tag=15):
    """From the root to one of the workers that reduce: a pass wants its turn, or does not any more."""

    id: PassId
    over: bool


class Granted(msgspec.Struct, array_like=True, frozen=True, tag=16):
    """To the root: it is the turn of its pass."""

    id: PassId


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """To the root: the pass cannot go on here; the error follows in the body."""

    id: PassId


class Cancel(msgspec.Struct, array_like=True, frozen=True, tag=6):
    """The pass is given up; told on to whoever was told of it."""

    id: PassId
    context: int


class Entered(msgspec.Struct, array_like=True, frozen=True, tag=7):
    """To the maker of a context: it has come to this worker."""

    context: int


class Release(msgspec.Struct, array_like=True, frozen=True, tag=8):
    """Says that ``maker``'s context is over. Whoever takes a dead maker's place has contexts with the same ids."""

    context: int
    maker: int


class Watch(msgspec.Struct, array_like=True, frozen=True, tag=9):
    """To all that a context touches, by way of its maker: the passes that begin there are watched, or not any more."""

    context: int
    maker: int
    watching: Watching
    over: bool


class Observed(msgspec.Struct, array_like=True, frozen=True, tag=10):
    """To the watcher: what happened on one worker, and by which control."""

    id: PassId
    context: int
    watch: int
    smart: bool
    number: int
    happenings: list[Happening]
    version: int


class Over(msgspec.Struct, array_like=True, frozen=True, tag=11):
    """From the root to the watcher: how a pass ended, and how often each worker has told of it."""

    id: PassId
    context: int
    watch: int
    error: str
    observed: dict[int, int]


class Steer(msgspec.Struct, array_like=True, frozen=True, tag=12):
    """From the watcher: how passes are to go on, and how many halts of each on this worker are over."""

    context: int
    watch: int
    control: Control
    over: list[tuple[PassId, int]]


class Go(msgspec.Struct, array_like=True, frozen=True, tag=13):
    """From the watcher: so many halts of a pass on this worker are over; else it goes on as it did."""

    id: PassId
    context: int
    halts: int


class Freeze(msgspec.Struct, array_like=True, frozen=True, tag=14):
    """To all members: nobody's time is to run as long as a pass is paused from here, or is to run again."""

    number: int
    frozen: bool


Message = (
    Mark
    | Gradients
    | Report
    | Marked
    | Failed
    | Cancel
    | Entered
    | Release
    | Watch
    | Observed
    | Over
    | Steer
    | Go
    | Freeze
    | Turn
    | Granted
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


encode: Callable[[Message], bytes] = _encoder.encode
"""Write a message as it travels."""


def decode(data: bytes) -> Message:
    """Read a message that another worker sent; garbage is a ProtocolError."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of the autograd engine: {error}") from None


_ONE_HOLE = quick.leave_holes([None], quick.LIST, ())


def encode_usual_gradients(
    gradients: Sequence[torch.Tensor | None], space: Space | None
) -> tuple[Payload, list[bytes]] | None:
    """Return the payload and frames of one small gradient, as most messages have one, else None.

    What comes out is what `codec.encode` would make of the list.
    """
    gradient = gradients[0] if len(gradients) == 1 else None
    if gradient is None or gradient.requires_grad or not is_packable(gradient):
        return None
    alone = pack_alone(gradient, False, space)
    if alone is None:
        return None
    meta, data = alone
    payload = Payload([(0, 0, len(data))], [meta], form=quick.LIST, holes=[(0, quick.TENSOR, 0)])
    return payload, [_ONE_HOLE, data]
