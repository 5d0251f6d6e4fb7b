"""The typed headers of all messages between agents.

A message travels as a list of frames. The first is the envelope (msgspec; decoded before anything else, and it cannot
run code). If the message carries values, the pickled body and the raw buffers follow. Fields are encoded as arrays
rather than maps, so that the envelope of an empty call takes some 50 bytes.

Each message is a class, whose attributes say all that the layers above must know of it: see `Message`.
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
    "Silence",
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

VERSION = 12
"""Raised with every change of the bytes between agents, which include the names of modules and functions of nbdist.

Agents of different versions refuse each other.
"""


class TensorMeta(msgspec.Struct, array_like=True, frozen=True):
    """Describes how to rebuild one tensor from a buffer of the message."""

    buffer: int
    """The tensor's storage: an index into `Payload.buffers`."""
    dtype: int
    """The dtype's number in the table of `nbdist.wire.tensors`."""
    shape: list[int]
    strides: list[int] | None
    """None for a contiguous tensor at the beginning of its buffer."""
    offset: int
    """The place of the first element in the buffer, counted in elements."""
    flags: int
    """The sum of 1 for requires_grad, 2 for a parameter."""
    device: str | None = None
    """The receiver's device; None for the CPU."""


class State(msgspec.Struct, array_like=True, frozen=True):
    """Describes a referenced value so that it can be displayed without fetching it."""

    module: str
    """The module of the value's class, or of the error's class if ``error`` is a text."""
    qualname: str
    """The qualified name of that class."""
    shape: list[int] | None = None
    dtype: str | None = None
    device: str | None = None
    requires_grad: bool | None = None
    grad_fn: str | None = None
    """The type of the tensor's autograd node."""
    nbytes: int | None = None
    """The bytes of a tensor, array or text, or of all parameters of a module; None if they are not known."""
    names: list[str] | None = None
    """The names that completion offers for the value."""
    error: str | None = None
    """The text of the error in the value's place; None for a value."""


class Fork(msgspec.Struct, array_like=True, frozen=True):
    """One hand-over of a reference, as it travels in a message."""

    rref: GlobalId
    """The id of the value."""
    fork: GlobalId
    """The id of the hand-over."""
    owner: int
    """The incarnation of the value's owner."""
    parent: int
    """The incarnation of the agent that hands the reference over."""
    state: State | None = None
    """The description of the value, if the sender knows it."""


class Place(msgspec.Struct, array_like=True, frozen=True):
    """The place of a storage in the sender's shared memory."""

    segment: int
    """The number of the segment of the sender's arena."""
    file: int
    """The number under which the sender has the segment's file open."""
    size: int
    """The bytes of the segment."""
    offset: int
    """The place of the storage in the segment, in bytes."""
    length: int
    """The bytes of the storage."""


Hole = tuple[int, int, int]
"""A hole in a value: its place, the kind of thing that belongs there (`nbdist.wire.quick`), which one of that kind."""


class Payload(msgspec.Struct, array_like=True, frozen=True):
    """Describes the frames after the envelope."""

    buffers: list[tuple[int, int, int]] = []
    """The frame, offset and length of each storage. Frame 0 is the first one after the body."""
    tensors: list[TensorMeta] = []
    """The tensors, in the order of their indices."""
    forks: list[Fork] = []
    """The references in the value."""
    plain: bool = True
    """True if decoding runs no user code.

    The value then has only tensors, atoms and built-in containers, and references that `quick` has taken out.
    """
    definitions: list[tuple[str, str]] = []
    """The definitions of the sender's ``__main__`` in the body, by name and digest.

    If the body has no function (None in its place), this names the function to call.
    """
    recorded: list[int] = []
    """The indices of the tensors that were recorded for a backward pass; those in the odd frame count as -1, -2, …"""
    places: list[Place] = []
    """The storages that are in the sender's arena rather than in frames; in `buffers` they are frames -1, -2, …"""
    form: int = 0
    """The form of the body, as `nbdist.wire.quick` has them; 0 if the body is the pickle of the whole value."""
    holes: list[Hole] = []
    """The places from which `nbdist.wire.quick` has taken tensors and references."""


class Recording(msgspec.Struct, array_like=True, frozen=True):
    """Names the autograd context of a message, and the edge that its tensors make."""

    context: int
    """The context's id."""
    maker: int
    """The incarnation of the agent that made the context."""
    message: int
    """The edge's id; negative if no tensor of the message requires grad."""
    grad: bool
    """True if autograd was on where the call was made."""
    lines: bool = False
    """True if autograd nodes should note the line of code that made them."""
    check: bool = False
    """True if computed values should be searched for NaN."""


class Record(msgspec.Struct, array_like=True, frozen=True):
    """Describes an agent: its identity, its process, its addresses."""

    name: str
    id: int
    """The worker's id (rank) in the world."""
    incarnation: int
    """The number of this run of the agent, unlike that of any other agent, dead or alive."""
    addresses: list[str]
    """Where it listens, the best address first."""
    host: str
    """The identity of its host; agents with the same one are local to each other."""
    pid: int
    started: int
    """The time at which its process started, which tells it from a later process with the same pid."""
    world_size: int | None
    """The number of agents in the world; None for a world that may grow."""
    version: int = VERSION
    device_maps: dict[str, dict[str, str]] = {}
    """The receiver's device for each device of this agent, by the receiver's name."""
    arena: int | None = None
    """The number of an open file by which others test whether they can read its arena; None if it has no arena."""
    device: str = ""
    """Where GPU tensors arrive that no device map names, such as ``"cuda:0"`` or ``"cpu"``; empty if they cannot."""
    devices: list[str] = []
    """The devices that the agent's options name as its own; empty for all that torch sees."""
    gpus: int = 0
    """The number of GPUs that torch sees there."""
    gpu_uuids: list[str] = []
    """The ids of these GPUs; "" for one whose memory cannot be shared, and nothing if no memory of GPUs is shared."""


class Mode(IntEnum):
    """Says how the callee uses the function of a call, and what becomes of the result."""

    CALL = 0
    """Run a function; the result comes back."""
    REMOTE = 1
    """Run a function; the result stays, as the value of a reference."""
    FETCH = 2
    """Send back a copy of a value."""
    METHOD = 3
    """Run a method of a value; the result comes back."""
    METHOD_REMOTE = 4
    """Run a method of a value; the result stays."""


class Message(msgspec.Struct, array_like=True, frozen=True):
    """The base class of all messages. Each type of message is a subclass with its own tag."""

    kind: ClassVar[str]
    """The word that names the message in fault rules and traces."""
    must_arrive: ClassVar[bool] = False
    """True for a message that is numbered, kept until it is acknowledged, and sent again if need be."""
    gives_back: ClassVar[bool] = False
    """True for a message that may take along blocks of the receiver's arena that the sender needs no longer."""


class Carrier(Message, frozen=True):
    """A message with a value in the frames after its envelope."""

    must_arrive: ClassVar[bool] = True
    gives_back: ClassVar[bool] = True

    @property
    def payload(self) -> Payload:
        """The description of those frames; a field of each subclass."""
        raise NotImplementedError


_CALL_KINDS: dict[int, str] = {mode: mode.name.lower() for mode in Mode}


class Nothing(Message, frozen=True, tag=0):
    """An empty message, for an envelope that only acknowledges."""

    kind: ClassVar[str] = "ack"


class Hello(Message, frozen=True, tag=1):
    """The first message on a new connection; repeated until it is answered."""

    kind: ClassVar[str] = "hello"

    record: Record
    """The sender's description."""
    reads: bool = False
    """True if the sender can read the receiver's arena."""


class Welcome(Message, frozen=True, tag=2):
    """Answers a Hello."""

    kind: ClassVar[str] = "welcome"

    record: Record
    """The sender's description."""
    reads: bool = False
    """True if the sender can read the receiver's arena."""


class Ready(Message, frozen=True, tag=3):
    """Says that the sender has shaken hands with every member."""

    kind: ClassVar[str] = "ready"


class Refused(Message, frozen=True, tag=4):
    """Says that a message to incarnation ``about`` was refused, and why."""

    kind: ClassVar[str] = "refused"

    about: int
    """The incarnation to which the refused message was addressed."""
    reason: str
    version: int = VERSION
    """The `VERSION` of the agent that refuses."""


class Goodbye(Message, frozen=True, tag=5):
    """Says that the sender leaves; nothing more will come from it. ``orderly``: the whole world has ended."""

    kind: ClassVar[str] = "goodbye"

    reason: str
    """Completes "worker1 ..." in the errors of those that waited for the sender."""
    orderly: bool = False


class Ping(Message, frozen=True, tag=6):
    """Asks for a Pong: whether the receiver is there, what has reached it, what it is doing."""

    kind: ClassVar[str] = "ping"

    number: int
    """Counts the pings to this receiver."""
    is_large: bool = False
    """True if it travels among the large messages, and asks for those."""


class Pong(Message, frozen=True, tag=7):
    """Answers the Ping with the same ``number`` and ``is_large``. ``doing`` says in a few words what runs there."""

    kind: ClassVar[str] = "pong"

    number: int
    doing: str = ""
    is_large: bool = False


class Call(Carrier, frozen=True, tag=8):
    """Asks to run a function, or to fetch a value. The body is ``(function, args, kwargs)``; a fetch has none."""

    id: int
    """The caller's number for the call."""
    mode: int
    """A `Mode`."""
    function: str
    """The function's name, for errors and displays."""
    payload: Payload
    builtin: bool = False
    """True for an operator of torch."""
    result: Fork | None = None
    """The caller's fork of the value that the call makes; None if the result comes back."""
    target: GlobalId | None = None
    """The id of the value that the call works on; None if it works on none."""
    origin: str = ""
    """The id of the message with which the user's cell began, for whose work the call is made."""
    recording: Recording | None = None
    """The autograd context in which the call was made."""

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The call's mode as a word: the name of the `Mode` in lower case."""
        return _CALL_KINDS[self.mode]


class Reply(Carrier, frozen=True, tag=9):
    """Answers a call, with a value or an error."""

    kind: ClassVar[str] = "reply"

    id: int
    """The caller's number for the call."""
    ok: bool
    """False if the value describes an error (`nbdist.rpc.calls.failures.Failure`), or if definitions are missing."""
    payload: Payload
    state: State | None = None
    """The description of the value, if it stays with the callee."""
    missing: list[tuple[str, str]] = []
    """The definitions that the call names, by name and digest, if the callee lacks one. Then it has run nothing."""
    recording: Recording | None = None
    """The autograd context of the call, and the edge that the result's tensors make."""


class ForkRequest(Message, frozen=True, tag=10):
    """User to owner: count this fork, which I hold."""

    kind: ClassVar[str] = "fork_request"
    must_arrive: ClassVar[bool] = True

    rref: GlobalId
    fork: GlobalId


class ForkConfirm(Message, frozen=True, tag=11):
    """Owner to user: your fork is counted. ``gone``: the value does not exist any more."""

    kind: ClassVar[str] = "fork_confirm"
    must_arrive: ClassVar[bool] = True

    rref: GlobalId
    fork: GlobalId
    state: State | None = None
    """The description of the value, if it exists."""
    gone: bool = False


class ChildAccept(Message, frozen=True, tag=12):
    """User to the user that handed over the fork: the owner counts it, so your own fork may end."""

    kind: ClassVar[str] = "child_accept"
    must_arrive: ClassVar[bool] = True

    fork: GlobalId


class UserDelete(Message, frozen=True, tag=13):
    """User to owner: this fork has ended."""

    kind: ClassVar[str] = "user_delete"
    must_arrive: ClassVar[bool] = True

    rref: GlobalId
    fork: GlobalId


class RRefState(Message, frozen=True, tag=14):
    """Owner to users: the value now exists, or the error in its place."""

    kind: ClassVar[str] = "rref_state"
    must_arrive: ClassVar[bool] = True

    rref: GlobalId
    state: State
    """The description of the value, or of the error."""


class AskShutdown(Message, frozen=True, tag=15):
    """Leader to member, again and again: asks how far the member is with ending round ``round``."""

    kind: ClassVar[str] = "ask_shutdown"

    round: int
    done: bool
    waits_for: tuple[str, str]
    """The names that keep the next round from beginning, and what they are to do; empty texts if that is not known."""
    look: int
    """The number of the look at all members to which this question belongs."""


class ShutdownState(Message, frozen=True, tag=16):
    """Member to leader: the round it has reached, the messages it has sent, and how many things are under way there.

    ``look`` comes from the question: an answer to an earlier look may be older than what this look saw of other
    members.
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
    """A small header of the higher layer, in an encoding of its own."""
    payload: Payload

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The topic, which names the message."""
        return self.topic


class Stop(Message, frozen=True, tag=18):
    """Caller to callee: the user has given up on this call."""

    kind: ClassVar[str] = "stop"
    must_arrive: ClassVar[bool] = True

    id: int
    """The caller's number for the call."""


class GiveBack(Message, frozen=True, tag=19):
    """Receiver to owner of an arena: takes back the blocks in its envelope, because no other message went that way."""

    kind: ClassVar[str] = "give_back"
    must_arrive: ClassVar[bool] = True
    gives_back: ClassVar[bool] = True

    shared: list[tuple[int, int]]
    """Blocks that a forked process may still read: they also go back, but must never be used again."""


class Silence(Message, frozen=True, tag=20):
    """Tells another member that a member has been silent for some time: the receiver asks that member itself.

    The silent member gets it, too, by way of others, if the sender has lost it.
    """

    kind: ClassVar[str] = "silence"

    of: int
    """The incarnation of the silent member."""
    silent: float
    """Seconds of its silence."""
    lost_by: int = 0
    """The incarnation of the agent that has lost the silent member; 0 if that agent waits for a sign of life."""


if TYPE_CHECKING:
    AnyMessage = Message
else:
    # The union of all types of messages, which the decoder needs.
    AnyMessage = Union[tuple(set(Message.__subclasses__()) - {Carrier} | set(Carrier.__subclasses__()))]  # noqa: UP007


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """The header around a message: who speaks to whom, and what has arrived so far.

    ``seq`` is the number of a message that must arrive, and 0 for others. ``ack`` and ``more`` acknowledge the other
    side's messages: all up to ``ack``, and those in ``more``. ``base`` is the lowest number that the sender may still
    send: its messages with lower numbers have been acknowledged or given up.
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
    """Forks that the sender has released. This message carries their deletes, so they need no messages of their own."""
    is_large: bool = False
    """True if the numbers are those of large messages, which are counted apart."""


encode_envelope: Callable[[Envelope], bytes] = msgspec.msgpack.Encoder().encode
"""Encode an envelope as the first frame of a message."""

decode: Callable[[bytes], Envelope] = msgspec.msgpack.Decoder(Envelope).decode
"""Decode a first frame, as `decode_envelope` does, but raise one of `NOT_A_MESSAGE` for garbage."""

NOT_A_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors that `decode` raises for garbage."""


def decode_envelope(frame: bytes) -> Envelope:
    """Decode a first frame; raise ProtocolError for garbage. Nothing in it can run code.

    A sender that is no agent of nbdist, or of another version, causes that.
    """
    try:
        return decode(frame)
    except NOT_A_MESSAGE as error:
        raise ProtocolError(f"not a message of nbdist, or of another version: {error}") from None
