"""The messages of contexts and passes between workers. Each travels as the data of a `Cast`, a one-way message.

================== ================================ ====================================================
message            from, to                         sent when
================== ================================ ====================================================
`Entered`          a worker, to the maker           a third worker's message has brought the context to it
`Release`          the maker, to all workers        the context has ended
`Mark`             one worker, to another           tensors that the other sent will get gradients
`Gradients`        one worker, to another           the gradients of those tensors are computed
`Report`           a worker, to the root            tokens were settled or sent
`Marked`           the root, to a worker            the marking is over, and the pass has its turn
`Turn`             the root, to one worker          a pass asks for its turn to reduce, or no longer needs it
`Granted`          that worker, to the root         the pass has its turn
`Failed`           a worker, to the root            the pass failed there
`Cancel`           a worker, to others              the pass is given up
`WatchChanged`     the watcher, to all workers      a watch begins or ends; the maker passes it on
`Observed`         a worker, to the watcher         a watched pass has done something on the worker
`Over`             the root, to the watcher         a watched pass is over
`Steer`            the watcher, to a worker         the user has changed the control, or ended halts
`Go`               the watcher, to a worker         a halt is over: the node may run
`Freeze`           the watcher, to all members      no call may time out from now on, because a pass is paused;
                                                    or calls may time out again
================== ================================ ====================================================

Workers are named by their incarnations, and the tensors of a message by their indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Union

import msgspec
import torch

from nbdist.autograd.graph.inherited import Inherited
from nbdist.errors import ProtocolError
from nbdist.rpc.references.peeking import Histogram
from nbdist.wire import quick
from nbdist.wire.messages import Payload
from nbdist.wire.tensors import Space, is_packable, pack_alone

Mode = Literal["smart", "fast"]  # marks tell which gates will get a gradient; or all gates must get one


class PassId(msgspec.Struct, array_like=True, frozen=True):
    """The id of a pass: the incarnation of the worker that began it, its root, and a number that the root has given."""

    root: int
    number: int


class Token(msgspec.Struct, array_like=True, frozen=True):
    """The name of one mark or gradient message: its sender, a number that the sender has given, and its kind."""

    sender: int
    number: int
    is_mark: bool


class Missing(msgspec.Struct, array_like=True, frozen=True, order=True):
    """The sent message of a gate without a gradient: its number, the function called, and the receiver."""

    message: int
    function: str
    peer: int


class Control(NamedTuple):
    """The order of a watch to the passes of its context: run, halt, or run until something happens."""

    version: int  # of two controls, the one with the higher version wins, whichever arrives first
    paused: bool = False
    # Where to halt if not paused; empty for nowhere. "nan" halts before a node that is given a NaN or Inf, or after one
    # that returns it; "message" before the next node that sends a gradient to another worker; "node" before the one
    # that `worker` and `node` name.
    until: str = ""
    worker: str = ""
    node: int = -1


class Watching(NamedTuple):
    """The watch to which passes report: the watcher, the number of its watch, whether norms are wanted, the control."""

    watcher: int
    watch: int
    norms: bool
    control: Control


class Happening(msgspec.Struct, array_like=True, frozen=True):
    """One event of a watched pass on one worker, as it travels to the watcher."""

    time: float
    # From here to `inherited`, the fields are those of an `Event` after its worker, in the same order.
    what: str
    node: int | None = None
    name: str | None = None
    message: int | None = None
    seconds: float | None = None
    norm: float | None = None
    histogram: Histogram | None = None  # of the gradients whose norm is `norm`
    inherited: Inherited | None = None  # the way of a NaN or Inf through the forward pass
    halt: int = -1  # the number of this halt among the pass's halts on the worker
    version: int = -1  # of the control that caused the halt, or the search for NaN


class Head(msgspec.Struct, array_like=True, frozen=True):
    """The pass that a message belongs to, with all that a worker needs to begin its part of the pass."""

    id: PassId
    context: int
    smart: bool
    retain_graph: bool
    accumulate: bool  # in ``.grad``, and not in the context
    since: int  # passes of this root in this context with lower numbers are over
    watching: Watching | None = None


class PassMessage(msgspec.Struct, array_like=True, frozen=True):
    """The base class of the messages below. Each type of message is a subclass with its own tag."""


class Mark(PassMessage, frozen=True, tag=0):
    """From one worker to another: some tensors of some messages that the other sent will get gradients."""

    head: Head
    token: Token
    sends: list[tuple[int, list[int]]]


class Report(PassMessage, frozen=True, tag=2):
    """To the root: the tokens that this worker has settled, and those it has sent because of that, with receivers."""

    id: PassId
    number: int  # 1, 2, … on each worker, because one report may overtake another
    settled: list[Token]
    marked: list[Token]  # they only wait for the end of the marking: all marks that follow from them have been sent
    sent: list[tuple[Token, int]]
    waits: bool  # the worker must be told of the end of the marking
    missing: list[Missing]
    reduces: bool = False  # the pass reaches a DistributedDataParallel module on this worker
    observed: int = 0  # the number of `Observed` messages that the worker has sent to the watcher of the pass


class Gradients(PassMessage, frozen=True, tag=1):
    """From one worker to another: gradients for tensors of a message that the other sent. They are in the payload."""

    head: Head
    token: Token
    message: int
    outputs: list[int]
    report: Report | None = None  # travels along if the gradients go to the root anyway


class Marked(PassMessage, frozen=True, tag=3):
    """From the root: the marking is over, and the pass has its turn to reduce if it needs one."""

    id: PassId


class Turn(PassMessage, frozen=True, tag=15):
    """From the root to the worker that gives turns: a pass asks for its turn, or (``over``) needs it no more."""

    id: PassId
    over: bool


class Granted(PassMessage, frozen=True, tag=16):
    """To the root: its pass has its turn."""

    id: PassId


class Failed(PassMessage, frozen=True, tag=5):
    """To the root: the pass has failed on this worker; the error is in the payload."""

    id: PassId


class Cancel(PassMessage, frozen=True, tag=6):
    """To all workers that take part: the pass is given up. A worker passes it on to those it has sent something."""

    id: PassId
    context: int


class Entered(PassMessage, frozen=True, tag=7):
    """To the maker of a context: a third worker has brought the context to the sender of this message."""

    context: int


class Release(PassMessage, frozen=True, tag=8):
    """To all workers of a context: it has ended. The worker that takes a dead maker's place reuses the ids."""

    context: int
    maker: int


class WatchChanged(PassMessage, frozen=True, tag=9):
    """To all workers of a context, through its maker: its passes are watched from now on, or (``over``) no more."""

    context: int
    maker: int
    watching: Watching
    over: bool


class Observed(PassMessage, frozen=True, tag=10):
    """To the watcher: events of a pass on this worker, and the version of the control that holds there."""

    id: PassId
    context: int
    watch: int
    smart: bool
    number: int  # 1, 2, … for each worker and pass, because one batch may overtake another
    happenings: list[Happening]
    version: int


class Over(PassMessage, frozen=True, tag=11):
    """From the root to the watcher: a pass is over, by ``error`` if there is one."""

    id: PassId
    context: int
    watch: int
    error: str
    observed: dict[int, int]  # how many `Observed` messages each worker has sent; empty after an error


class Steer(PassMessage, frozen=True, tag=12):
    """From the watcher: a new control, and for each pass the number of its halts on this worker that are over."""

    context: int
    watch: int
    control: Control
    over: list[tuple[PassId, int]]


class Go(PassMessage, frozen=True, tag=13):
    """From the watcher: the number of a pass's halts on this worker that are over; the control stays as it is."""

    id: PassId
    context: int
    halts: int


class Freeze(PassMessage, frozen=True, tag=14):
    """To all members: calls must not time out while this worker pauses a pass, or may time out again."""

    number: int
    frozen: bool


# A type of message that is defined below this line, or is not a direct subclass, would not be decoded.
_types: Any = Union[tuple(PassMessage.__subclasses__())]  # noqa: UP007
_decoder: msgspec.msgpack.Decoder[PassMessage] = msgspec.msgpack.Decoder(_types)

encode: Callable[[PassMessage], bytes] = msgspec.msgpack.Encoder().encode


def decode(data: bytes) -> PassMessage:
    """Decode a message from another worker; raises ProtocolError if the bytes are not a message."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"not a message of the autograd engine: {error}. The sender has another version of nbdist: install the "
            "same version everywhere"
        ) from None


_ONE_HOLE = quick.leave_holes([None], quick.LIST, ())


def encode_usual_gradients(
    gradients: Sequence[torch.Tensor | None], space: Space | None
) -> tuple[Payload, list[bytes]] | None:
    """Return what `codec.encode` returns for a list with one small gradient, but faster; None for any other list."""
    gradient = gradients[0] if len(gradients) == 1 else None
    if gradient is None or gradient.requires_grad or not is_packable(gradient):
        return None
    alone = pack_alone(gradient, False, space)
    if alone is None:
        return None
    meta, data = alone
    payload = Payload([(0, 0, len(data))], [meta], form=quick.LIST, holes=[(0, quick.TENSOR, 0)])
    return payload, [_ONE_HOLE, data]
