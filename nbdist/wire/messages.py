"""The typed headers of everything that agents say to each other.

A message travels as a list of frames: the envelope (msgspec, decoded before anything else and
never able to run code), then, where the message carries values, the pickled body and the raw
buffers. Fields are arrays rather than maps, so that an empty call costs some 60 bytes.

Each message is a class, which says all that the layers above have to know of it: see `Message`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, Union

import msgspec

from nbdist.errors import ProtocolError
from nbdist.ids import GlobalId

__all__ = [
    "VERSION",
    "AnyMessage",
    "AskShutdown",
    "Call",
    "Carrier",
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
    "NOT_A_MESSAGE",
    "decode",
    "decode_envelope",
    "encode_envelope",
]

VERSION = 8
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
    """The definitions of the sender's ``__main__`` in the body, by name and digest; with a body that names no function,
    the one to call."""
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
    check: bool = False
    """Whether to look for NaN in what is computed."""


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


class Message(msgspec.Struct, array_like=True, frozen=True):
    """A message, which says of itself all that others have to know; a new one is a subclass with a tag of its own.

    Messages that must arrive are numbered, kept until they are acknowledged, and sent again. Those that can give back
    take blocks of the receiver's arena along.
    """

    kind: ClassVar[str]
    """The word by which fault rules and traces name it."""
    must_arrive: ClassVar[bool] = False
    gives_back: ClassVar[bool] = False


class Carrier(Message, frozen=True):
    """A message with a value in the frames behind its envelope."""

    must_arrive: ClassVar[bool] = True
    gives_back: ClassVar[bool] = True

    @property
    def payload(self) -> Payload:
        """The description of those frames; a field of each subclass."""
        raise NotImplementedError


_CALL_KINDS: dict[int, str] = {mode: mode.name.lower() for mode in Mode}


class Nothing(Message, frozen=True, tag=0):
    """No message: the envelope's acknowledgement is the point."""

    kind: ClassVar[str] = "ack"


class Hello(Message, frozen=True, tag=1):
    """First words on a new connection; repeated until answered."""

    kind: ClassVar[str] = "hello"

    record: Record
    reads: bool = False
    """Whether the sender can read the receiver's arena."""


class Welcome(Message, frozen=True, tag=2):
    """The answer to a Hello."""

    kind: ClassVar[str] = "welcome"

    record: Record
    reads: bool = False
    """Whether the sender can read the receiver's arena."""


class Ready(Message, frozen=True, tag=3):
    """The sender has shaken hands with every member."""

    kind: ClassVar[str] = "ready"


class Refused(Message, frozen=True, tag=4):
    """A message to incarnation ``about`` was not taken, and why."""

    kind: ClassVar[str] = "refused"

    about: int
    reason: str
    version: int = VERSION


class Goodbye(Message, frozen=True, tag=5):
    """The sender leaves; nothing more will come from it. ``orderly``: as all do, the world having ended."""

    kind: ClassVar[str] = "goodbye"

    reason: str
    orderly: bool = False


class Ping(Message, frozen=True, tag=6):
    """Asks for a Pong: are you there, what has reached you, what are you doing?"""

    kind: ClassVar[str] = "ping"

    number: int


class Pong(Message, frozen=True, tag=7):
    """Answers a Ping."""

    kind: ClassVar[str] = "pong"

    number: int
    doing: str = ""


class Call(Carrier, frozen=True, tag=8):
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

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The word for what the call does, by its mode."""
        return _CALL_KINDS[self.mode]


class Reply(Carrier, frozen=True, tag=9):
    """The outcome of a call."""

    kind: ClassVar[str] = "reply"

    id: int
    ok: bool
    payload: Payload
    state: State | None = None
    missing: list[tuple[str, str]] = []
    recording: Recording | None = None


class ForkRequest(Message, frozen=True, tag=10):
    """User to owner: I hold this fork."""

    kind: ClassVar[str] = "fork_request"
    must_arrive: ClassVar[bool] = True

    rref: GlobalId
    fork: GlobalId


class ForkConfirm(Message, frozen=True, tag=11):
    """Owner to user: I know that you do."""

    kind: ClassVar[str] = "fork_confirm"
    must_arrive: ClassVar[bool] = True

    rref: GlobalId
    fork: GlobalId
    state: State | None = None
    gone: bool = False


class ChildAccept(Message, frozen=True, tag=12):
    """User to the user it got the fork from: the owner knows me, you may let go."""

    kind: ClassVar[str] = "child_accept"
    must_arrive: ClassVar[bool] = True

    fork: GlobalId


class UserDelete(Message, frozen=True, tag=13):
    """User to owner: this fork is no more."""

    kind: ClassVar[str] = "user_delete"
    must_arrive: ClassVar[bool] = True

    rref: GlobalId
    fork: GlobalId


class RRefState(Message, frozen=True, tag=14):
    """Owner to users: the value has come to be (or failed to)."""

    kind: ClassVar[str] = "rref_state"
    must_arrive: ClassVar[bool] = True

    rref: GlobalId
    state: State


class AskShutdown(Message, frozen=True, tag=15):
    """Leader to member, again and again: how far are you with ending round ``round``?"""

    kind: ClassVar[str] = "ask_shutdown"

    round: int
    done: bool
    waits_for: tuple[str, str]
    """Who keeps the next round from beginning, and what they are to do; empty texts before anything is known."""
    look: int


class ShutdownState(Message, frozen=True, tag=16):
    """Member to leader: reached this round, and has sent so many messages; ``active`` things are under way here.

    ``look`` is the question's own: an answer to an earlier look is older than what that look saw of others.
    """

    kind: ClassVar[str] = "shutdown_state"

    round: int
    sent: int
    active: int
    look: int = 0


class Cast(Carrier, frozen=True, tag=17):
    """A one-way message of a higher layer, which registered a handler for its topic."""

    topic: str
    data: bytes
    payload: Payload

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The topic, which stands for the message as well."""
        return self.topic


class Stop(Message, frozen=True, tag=18):
    """Caller to callee: the user has given up on this call."""

    kind: ClassVar[str] = "stop"
    must_arrive: ClassVar[bool] = True

    id: int


class GiveBack(Message, frozen=True, tag=19):
    """Receiver to owner of an arena: what is in the envelope goes back, as nothing else went that way."""

    kind: ClassVar[str] = "give_back"
    must_arrive: ClassVar[bool] = True
    gives_back: ClassVar[bool] = True

    shared: list[tuple[int, int]]
    """These, too; but a forked process may still read them, and they must not be used again."""


if TYPE_CHECKING:
    AnyMessage = Message
else:
    AnyMessage = Union[tuple(set(Message.__subclasses__()) - {Carrier} | set(Carrier.__subclasses__()))]  # noqa: UP007  # what a decoder has to be told


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
    message: AnyMessage
    back: list[tuple[int, int]] = []
    """Blocks of the receiver's arena, by segment and offset, that the sender needs no longer."""
    deletes: list[UserDelete] = []
    """Forks that the sender has released. They ride on this message, which saves messages of their own."""


encode_envelope: Callable[[Envelope], bytes] = msgspec.msgpack.Encoder().encode
"""Write the first frame of a message."""

decode: Callable[[bytes], Envelope] = msgspec.msgpack.Decoder(Envelope).decode
"""Read a first frame, as `decode_envelope` does, but raise one of `NOT_A_MESSAGE` for garbage."""

NOT_A_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode_envelope(frame: bytes) -> Envelope:
    """Read a first frame; garbage is a ProtocolError, and nothing in it can run code."""
    try:
        return decode(frame)
    except NOT_A_MESSAGE as error:
        raise ProtocolError(f"not a message of nbdist: {error}") from None
