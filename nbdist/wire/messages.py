"""The typed headers of all messages between agents.

A message travels as a list of frames. The first frame is the envelope (msgspec). It is decoded before anything else,
and it cannot run code. If the message carries values, the pickled body and the raw buffers follow. Fields are encoded
as arrays rather than maps, so that the envelope of an empty call takes about 50 bytes.

Each type of message is a class. Its attributes tell the layers above all that they must know about it: see `Message`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, Union

import msgspec

from nbdist.ids import GlobalId

# Increase this with every change of the bytes between agents, which include names of nbdist's modules and functions:
# agents of different versions refuse each other. `tests/wire/test_version.py` knows the fields of all messages.
VERSION = 18


class TensorMeta(msgspec.Struct, array_like=True, frozen=True):
    """Describes how to rebuild one tensor from a buffer of the message."""

    buffer: int  # the tensor's storage: an index into `Payload.buffers`
    dtype: int  # the dtype's number in the table of `nbdist.wire.tensors`
    shape: list[int]
    strides: list[int] | None  # None for a contiguous tensor at the beginning of its buffer
    offset: int  # the position of the first element in the buffer, counted in elements
    flags: int  # the sum of 1 for requires_grad, 2 for a parameter
    device: str | None = None  # the receiver's device; None for the CPU


class State(msgspec.Struct, array_like=True, frozen=True):
    """Describes a referenced value so that it can be displayed without fetching it."""

    module: str  # the module of the value's class, or of the error's class if ``error`` is not None
    qualname: str  # the qualified name of that class
    shape: list[int] | None = None
    dtype: str | None = None
    device: str | None = None
    requires_grad: bool | None = None
    grad_fn: str | None = None  # the type of the tensor's autograd node
    # The bytes of a tensor, array or text, or of all parameters of a module; None if they are not known.
    nbytes: int | None = None
    names: list[str] | None = None  # the names that completion offers for the value
    error: str | None = None  # the text of the error in the value's place; None if there is a value


class Fork(msgspec.Struct, array_like=True, frozen=True):
    """One hand-over of a reference, in the form in which it travels in a message."""

    rref: GlobalId  # the id of the value
    fork: GlobalId  # the id of the hand-over
    owner: int  # the incarnation of the value's owner
    parent: int  # the incarnation of the agent that hands the reference over
    state: State | None = None  # the description of the value, if the sender knows it


class Place(msgspec.Struct, array_like=True, frozen=True):
    """The place of a storage in the sender's shared memory."""

    segment: int  # the number of the segment of the sender's arena
    file: int  # the number under which the sender has the segment's file open
    size: int  # the bytes of the segment
    offset: int  # the place of the storage in the segment, in bytes
    length: int  # the bytes of the storage


# A hole in a value: its place, the kind of object that belongs there (`nbdist.wire.quick`), and its index there.
Hole = tuple[int, int, int]


class Payload(msgspec.Struct, array_like=True, frozen=True):
    """Describes the frames after the envelope."""

    # The frame, offset and length of each storage. Frame 0 is the first one after the body.
    buffers: list[tuple[int, int, int]] = []  # msgspec makes a new list for each payload
    tensors: list[TensorMeta] = []  # the tensors, in the order of their indices
    forks: list[Fork] = []  # the references in the value
    # True if decoding runs no user code: the value has only tensors, atoms and built-in containers, and references that
    # `quick` has replaced by holes.
    plain: bool = True
    # The definitions of the sender's ``__main__`` in the body, by name and digest. If the body has no function (None in
    # its place), this names the function to call.
    definitions: list[tuple[str, str]] = []
    # The indices of the tensors that were recorded for a backward pass; those in the odd frame count -1, -2, …
    recorded: list[int] = []
    # The storages that are in the sender's arena rather than in frames. In `buffers` their frames are -1, -2, …
    places: list[Place] = []
    form: int = 0  # the form of the body (`nbdist.wire.quick`); 0 if the body is the pickle of the whole value
    holes: list[Hole] = []  # the places that tensors and references had in the value (`nbdist.wire.quick`)


class Recording(msgspec.Struct, array_like=True, frozen=True):
    """Names the autograd context of a message, and the edge that its tensors make."""

    context: int  # the context's id
    maker: int  # the incarnation of the agent that made the context
    message: int  # the edge's id; negative if no tensor of the message requires grad
    grad: bool  # True if autograd was enabled where the call was made
    lines: bool = False  # True if autograd nodes should record the line of code that made them
    check: bool = False  # True if computed values should be checked for NaN


class Record(msgspec.Struct, array_like=True, frozen=True):
    """Describes an agent: its identity, its process, its addresses."""

    name: str
    id: int  # the worker's id (rank) in the world
    incarnation: int  # the number of this run of the agent; no other agent, dead or alive, has the same
    addresses: list[str]  # the addresses at which the agent listens, the best first
    host: str  # the identity of the agent's host; agents with the same one are local to each other
    pid: int
    started: int  # the time when its process started, which tells the process from a later one with the same pid
    world_size: int | None  # the number of agents in the world; None for a dynamic world
    version: int = VERSION
    # The receiver's device for each device of this agent, by the receiver's name.
    device_maps: dict[str, dict[str, str]] = {}
    # The number of an open file with which others test whether they can read its arena; None without an arena.
    arena: int | None = None
    # The device, such as ``"cuda:0"``, on which GPU tensors without a device map arrive; empty if they cannot.
    device: str = ""
    # The devices that the agent's options name as its own; empty for all devices that torch sees.
    devices: list[str] = []
    gpus: int = 0  # the number of GPUs that torch sees there
    # The ids of these GPUs; "" for a GPU whose memory cannot be shared. Empty if no memory of GPUs is shared.
    gpu_uuids: list[str] = []


class Mode(IntEnum):
    """Says how the callee uses the function of a call, and what becomes of the result."""

    CALL = 0  # run a function; the result comes back
    REMOTE = 1  # run a function; the result stays, as the value of a reference
    FETCH = 2  # send back a copy of a value
    METHOD = 3  # run a method of a value; the result comes back
    METHOD_REMOTE = 4  # run a method of a value; the result stays


class Message(msgspec.Struct, array_like=True, frozen=True):
    """The base class of all messages. Each type of message is a subclass with its own tag."""

    # The word that names the message in fault rules and traces: the name of its class, unless that says another one.
    kind: ClassVar[str]
    must_arrive: ClassVar[bool] = False
    gives_back: ClassVar[bool] = False  # True for a message that may give back blocks of the receiver's arena

    def __init_subclass__(cls) -> None:
        if "kind" not in vars(cls):
            cls.kind = re.sub("(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()  # such as fork_request, rref_state


class Numbered(Message, frozen=True):
    """A message that is numbered, kept until it is acknowledged, and sent again if needed."""

    must_arrive: ClassVar[bool] = True


class Carrier(Numbered, frozen=True):
    """A message with a value in the frames after its envelope."""

    gives_back: ClassVar[bool] = True

    @property
    def payload(self) -> Payload:
        """The description of these frames, a field of each subclass."""
        raise NotImplementedError


_CALL_KINDS: dict[int, str] = {mode: mode.name.lower() for mode in Mode}


class Nothing(Message, frozen=True, tag=0):
    """An empty message, for an envelope that only acknowledges."""

    kind: ClassVar[str] = "ack"


class Hello(Message, frozen=True, tag=1):
    """The first message on a new connection. It is repeated until it is answered."""

    record: Record  # the sender's
    reads: bool = False  # True if the sender can read the receiver's arena


class Welcome(Message, frozen=True, tag=2):
    """Answers a Hello."""

    record: Record  # the sender's
    reads: bool = False  # True if the sender can read the receiver's arena


class Ready(Message, frozen=True, tag=3):
    """Says that the sender has met every member."""


class Refused(Message, frozen=True, tag=4):
    """Says that a message to incarnation ``about`` was refused, and why."""

    about: int  # the incarnation to which the refused message was addressed
    reason: str
    version: int = VERSION  # the `VERSION` of the agent that refuses


class Goodbye(Message, frozen=True, tag=5):
    """Says that the sender leaves and sends nothing more. ``orderly`` is True if the whole world has ended."""

    reason: str  # completes "worker1 ..." in the errors of those that waited for the sender
    orderly: bool = False


class Ping(Message, frozen=True, tag=6):
    """Asks for a Pong, which shows that the receiver is alive, what has reached it, and what it is doing."""

    number: int  # counts the pings to this receiver
    is_large: bool = False  # True if the ping travels among the large messages, and asks about these


class Pong(Message, frozen=True, tag=7):
    """Answers the Ping with the same ``number`` and ``is_large``. ``doing`` says in a few words what runs there."""

    number: int
    doing: str = ""
    is_large: bool = False


class Call(Carrier, frozen=True, tag=8):
    """Asks to run a function, or to fetch a value. The body is ``(function, args, kwargs)``; a fetch has none."""

    id: int  # the caller's number for the call
    mode: int  # a `Mode`
    function: str  # the function's name, for errors and displays
    payload: Payload
    result: Fork | None = None  # the caller's fork of the value that the call makes; None if the result comes back
    target: GlobalId | None = None  # the id of the value that the call works on; None if it works on none
    origin: str = ""  # the id of the cell for which the call is made; empty if no cell made it
    recording: Recording | None = None  # the autograd context in which the call was made

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The name of the call's `Mode` in lower case."""
        return _CALL_KINDS[self.mode]


class Reply(Carrier, frozen=True, tag=9):
    """Answers a call, with a value or an error."""

    id: int  # the caller's number for the call
    ok: bool  # False if the value describes an error (`nbdist.rpc.failures.Failure`), or if definitions are missing
    payload: Payload
    state: State | None = None  # the description of the value, if it stays with the callee
    # The definitions that the call names, by name and digest, if the callee lacks one. Then the call has not run.
    missing: list[tuple[str, str]] = []
    recording: Recording | None = None  # the autograd context of the call, and the edge that the result's tensors make


class ForkRequest(Numbered, frozen=True, tag=10):
    """User to owner: count this fork, which I hold."""

    rref: GlobalId
    fork: GlobalId


class ForkConfirm(Numbered, frozen=True, tag=11):
    """Owner to user: your fork is counted. ``gone`` is True if the value does not exist any more."""

    rref: GlobalId
    fork: GlobalId
    state: State | None = None  # the description of the value, if it exists
    gone: bool = False


class ChildAccept(Numbered, frozen=True, tag=12):
    """User to the user that passed the fork on: the owner counts the fork, so your own fork may end."""

    fork: GlobalId


class UserDelete(Numbered, frozen=True, tag=13):
    """User to owner: this fork has ended."""

    rref: GlobalId
    fork: GlobalId


class RRefState(Numbered, frozen=True, tag=14):
    """Owner to users: the value now exists, or the error in its place."""

    rref: GlobalId
    state: State  # the description of the value, or of the error


class AskShutdown(Message, frozen=True, tag=15):
    """Leader to member, repeatedly: asks what the member has under way before round ``round`` can end."""

    round: int
    # The members that keep the next round from beginning, and what they have to do; empty texts if not known.
    waits_for: tuple[str, str]
    look: int  # the number of the leader's look to which this question belongs (`nbdist.rpc.world.shutdown`)


class ShutdownState(Message, frozen=True, tag=16):
    """Member to leader: the round it has reached, the number of messages it has sent, and how much it has under way.

    ``look`` is copied from the question. The leader drops an answer to an earlier look: it may be older than the
    answers of other members.
    """

    round: int
    sent: int
    active: int
    look: int = 0


class Cast(Carrier, frozen=True, tag=17):
    """A one-way message of a higher layer, which has registered a handler for its topic."""

    topic: str
    data: bytes  # a small header of the higher layer, in an encoding of its own
    payload: Payload

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The topic."""
        return self.topic


class Stop(Numbered, frozen=True, tag=18):
    """Caller to callee: the user has given up on this call."""

    id: int  # the caller's number for the call


class GiveBack(Numbered, frozen=True, tag=19):
    """Receiver to owner of an arena: gives back blocks, because no other message to the owner could take them."""

    gives_back: ClassVar[bool] = True

    # Blocks that a forked process may still read. They must never be used again. Other blocks are in the envelope.
    shared: list[tuple[int, int]]


class Silence(Message, frozen=True, tag=20):
    """Tells another member that a member has been silent for some time. The receiver then asks that member itself.

    If the sender has lost the silent member, the receiver passes the message on to it.
    """

    of: int  # the incarnation of the silent member
    silent: float  # seconds for which the member has been silent
    lost_by: int = 0  # the incarnation of the agent that has lost the silent member; 0 if no agent has lost it yet


if TYPE_CHECKING:
    AnyMessage = Message
else:
    # The union of all types of messages, which the decoder needs.
    _subclasses = {each for base in (Message, Numbered, Carrier) for each in base.__subclasses__()}
    AnyMessage = Union[tuple(_subclasses - {Numbered, Carrier})]  # noqa: UP007


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """The header around a message: its sender and receiver, and acknowledgements.

    ``seq`` is the number of a message that must arrive, and 0 for others. ``ack`` and ``more`` acknowledge the other
    agent's messages: all up to ``ack``, and those in ``more``. ``base`` is the lowest number that the sender may still
    send: its messages with lower numbers have been acknowledged or given up.
    """

    sender: int
    receiver: int
    seq: int
    base: int
    ack: int
    more: list[int]
    message: AnyMessage
    # Blocks of the receiver's arena, by segment and offset, that the sender does not need any more.
    back: list[tuple[int, int]] = []
    # Forks that the sender has released. Their deletes travel in this message and need no messages of their own.
    deletes: list[UserDelete] = []
    is_large: bool = False  # True if the numbers are those of large messages, which have numbers of their own


encode_envelope: Callable[[Envelope], bytes] = msgspec.msgpack.Encoder().encode

# Decodes a first frame. Raises one of `NOT_A_MESSAGE` for garbage.
decode_envelope: Callable[[bytes], Envelope] = msgspec.msgpack.Decoder(Envelope).decode
NOT_A_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
