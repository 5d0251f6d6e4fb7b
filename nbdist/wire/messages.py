"""The typed headers of everything that agents say to each other.

A message travels as a list of frames: the envelope (msgspec, decoded before anything else and
never able to run code), then, where the message carries values, the pickled body and the raw
buffers. Fields are arrays rather than maps, so that an empty call costs some 60 bytes.

``kind(message)`` is the word by which fault rules and traces name a message.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from nbdist.errors import ProtocolError
from nbdist.ids import GlobalId

__all__ = [
    "VERSION",
    "AskShutdown",
    "Call",
    "Cast",
    "ChildAccept",
    "Envelope",
    "Fork",
    "ForkConfirm",
    "ForkRequest",
    "GiveBack",
    "Goodbye",
    "Hello",
    "Hole",
    "Message",
    "Mode",
    "Nothing",
    "Payload",
    "Ping",
    "Place",
    "Pong",
    "RRefState",
    "Ready",
    "Record",
    "Recording",
    "Refused",
    "Reply",
    "ShutdownState",
    "State",
    "Stop",
    "TensorMeta",
    "UserDelete",
    "Welcome",
    "decode_envelope",
    "encode_envelope",
    "kind",
]

VERSION = 5
"""Raised with every change of what goes over the wire."""


class TensorMeta(msgspec.Struct, array_like=True, frozen=True):
    """How to rebuild one tensor from a buffer: which bytes, and how to look at them."""

    buffer: int
    dtype: int
    shape: list[int]
    strides: list[int] | None
    offset: int
    flags: int
    device: str | None = None


class State(msgspec.Struct, array_like=True, frozen=True):
    """What can be shown of a referenced value without fetching it."""

    module: str
    qualname: str
    shape: list[int] | None = None
    dtype: str | None = None
    device: str | None = None
    requires_grad: bool | None = None
    grad_fn: str | None = None
    nbytes: int | None = None
    names: list[str] | None = None
    error: str | None = None


class Fork(msgspec.Struct, array_like=True, frozen=True):
    """One hand-over of a reference, as it travels inside a message."""

    rref: GlobalId
    fork: GlobalId
    owner: int
    parent: int
    state: State | None = None


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Where in the sender's arena a storage lies: which of its segments, and where in that one."""

    segment: int
    file: int
    """The number under which the sender has the segment's file open."""
    size: int
    """Of the segment."""
    offset: int
    length: int


Hole = tuple[int, int, int]
"""A place in a value, what kind of thing belongs there, and which of that kind."""


class Payload(msgspec.Struct, array_like=True, frozen=True):
    """What the frames behind the envelope hold."""

    buffers: list[tuple[int, int, int]] = []
    tensors: list[TensorMeta] = []
    forks: list[Fork] = []
    plain: bool = True
    definitions: list[tuple[str, str]] = []
    recorded: list[int] = []
    """The tensors of which autograd has made a record: by number, those in the odd frame as -1, -2, …"""
    places: list[Place] = []
    """The storages that are in the sender's arena rather than in frames; `buffers` has them as frames -1, -2, …"""
    form: int = 0
    """How `nbdist.wire.quick` has to look at the body; 0: it is a pickle."""
    holes: list[Hole] = []
    """What has been taken out of the body."""


class Recording(msgspec.Struct, array_like=True, frozen=True):
    """To which autograd context a message belongs, and which edge its tensors make."""

    context: int
    maker: int
    message: int
    """The edge's id; negative where no tensor of the message requires grad."""
    grad: bool
    """Whether autograd was on where the call was made."""
    lines: bool = False
    """Whether to note where in the code nodes are made."""


class Record(msgspec.Struct, array_like=True, frozen=True):
    """Who an agent is and where it listens."""

    name: str
    id: int
    incarnation: int
    addresses: list[str]
    host: str
    pid: int
    started: int
    world_size: int | None
    version: int = VERSION
    device_maps: dict[str, dict[str, str]] = {}
    arena: int | None = None
    """The number of an open file by which others find out whether they can read its arena; None: it has none."""


class Mode(IntEnum):
    """What is to be done with a call's function and its outcome."""

    CALL = 0
    REMOTE = 1
    FETCH = 2
    METHOD = 3
    METHOD_REMOTE = 4


class Nothing(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """No message: the envelope's acknowledgement is the point."""


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """First words on a new connection; repeated until answered."""

    record: Record
    reads: bool = False
    """Whether the sender can read the receiver's arena."""


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """The answer to a Hello."""

    record: Record
    reads: bool = False
    """Whether the sender can read the receiver's arena."""


class Ready(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """The sender has shaken hands with every member."""


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """A message to incarnation ``about`` was not taken, and why."""

    about: int
    reason: str
    version: int = VERSION


class Goodbye(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """The sender leaves; nothing more will come from it. ``orderly``: as all do, the world having ended."""

    reason: str
    orderly: bool = False


class Ping(msgspec.Struct, array_like=True, frozen=True, tag=6):
    """Asks for a Pong: are you there, what has reached you, what are you doing?"""

    number: int


class Pong(msgspec.Struct, array_like=True, frozen=True, tag=7):
    """Answers a Ping."""

    number: int
    doing: str = ""


class Call(msgspec.Struct, array_like=True, frozen=True, tag=8):
    """Run a function (or fetch a value); the body is ``(function, args, kwargs)``."""

    id: int
    mode: int
    function: str
    payload: Payload
    builtin: bool = False
    result: Fork | None = None
    target: GlobalId | None = None
    origin: str = ""
    """Whose work this is: the id of the message with which the user's cell began."""
    recording: Recording | None = None


class Reply(msgspec.Struct, array_like=True, frozen=True, tag=9):
    """The outcome of a call."""

    id: int
    ok: bool
    payload: Payload
    state: State | None = None
    missing: list[tuple[str, str]] = []
    recording: Recording | None = None


class ForkRequest(msgspec.Struct, array_like=True, frozen=True, tag=10):
    """User to owner: I hold this fork."""

    rref: GlobalId
    fork: GlobalId


class ForkConfirm(msgspec.Struct, array_like=True, frozen=True, tag=11):
    """Owner to user: I know that you do."""

    rref: GlobalId
    fork: GlobalId
    state: State | None = None
    gone: bool = False


class ChildAccept(msgspec.Struct, array_like=True, frozen=True, tag=12):
    """User to the user it got the fork from: the owner knows me, you may let go."""

    fork: GlobalId


class UserDelete(msgspec.Struct, array_like=True, frozen=True, tag=13):
    """User to owner: this fork is no more."""

    rref: GlobalId
    fork: GlobalId


class RRefState(msgspec.Struct, array_like=True, frozen=True, tag=14):
    """Owner to users: the value has come to be (or failed to)."""

    rref: GlobalId
    state: State


class AskShutdown(msgspec.Struct, array_like=True, frozen=True, tag=15):
    """Leader to member, again and again: how far are you with ending round ``round``?"""

    round: int
    done: bool
    waits_for: tuple[str, str]
    """Who keeps the next round from beginning, and what they are to do; empty texts before anything is known."""
    look: int


class ShutdownState(msgspec.Struct, array_like=True, frozen=True, tag=16):
    """Member to leader: reached this round, with so many calls sent, taken, and running.

    ``look`` is the question's own: an answer to an earlier look is older than what that look saw of others.
    """

    round: int
    sent: int
    taken: int
    active: int
    look: int = 0


class Cast(msgspec.Struct, array_like=True, frozen=True, tag=17):
    """A one-way message of a higher layer, which registered a handler for its topic."""

    topic: str
    data: bytes
    payload: Payload


class Stop(msgspec.Struct, array_like=True, frozen=True, tag=18):
    """Caller to callee: the user has given up on this call."""

    id: int


class GiveBack(msgspec.Struct, array_like=True, frozen=True, tag=19):
    """Receiver to owner of an arena: what is in the envelope goes back, as nothing else went that way."""

    shared: list[tuple[int, int]]
    """These, too; but a forked process may still read them, and they must not be used again."""


Message = (
    Nothing
    | Hello
    | Welcome
    | Ready
    | Refused
    | Goodbye
    | Ping
    | Pong
    | Call
    | Reply
    | ForkRequest
    | ForkConfirm
    | ChildAccept
    | UserDelete
    | RRefState
    | AskShutdown
    | ShutdownState
    | Cast
    | Stop
    | GiveBack
)

_CALL_KINDS: dict[int, str] = {
    Mode.CALL: "call",
    Mode.REMOTE: "remote",
    Mode.FETCH: "fetch",
    Mode.METHOD: "method",
    Mode.METHOD_REMOTE: "method_remote",
}
_KINDS: dict[type, str] = {
    Nothing: "ack",
    Hello: "hello",
    Welcome: "welcome",
    Ready: "ready",
    Refused: "refused",
    Goodbye: "goodbye",
    Ping: "ping",
    Pong: "pong",
    Reply: "reply",
    ForkRequest: "fork_request",
    ForkConfirm: "fork_confirm",
    ChildAccept: "child_accept",
    UserDelete: "user_delete",
    RRefState: "rref_state",
    AskShutdown: "ask_shutdown",
    ShutdownState: "shutdown_state",
    Stop: "stop",
    GiveBack: "give_back",
}


def kind(message: Message) -> str:
    """The word for ``message`` in fault rules and traces."""
    if isinstance(message, Call):
        return _CALL_KINDS[message.mode]
    if isinstance(message, Cast):
        return message.topic
    return _KINDS[type(message)]


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """Who speaks to whom, and what has arrived so far.

    ``seq`` numbers what must arrive (0: what need not). ``ack`` and ``more`` say what has arrived from the
    other side: all up to ``ack``, and those above it. Below ``base`` the sender awaits nothing any more.
    """

    sender: int
    receiver: int
    seq: int
    base: int
    ack: int
    more: list[int]
    message: Message
    back: list[tuple[int, int]] = []
    """Blocks of the receiver's arena, by segment and offset, that the sender needs no longer."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode_envelope(envelope: Envelope) -> bytes:
    """The first frame of a message."""
    return _encoder.encode(envelope)


def decode_envelope(frame: bytes) -> Envelope:
    """Read a first frame; garbage is a ProtocolError, and nothing in it can run code."""
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of nbdist: {error}") from None
