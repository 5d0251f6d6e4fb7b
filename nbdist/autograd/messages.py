"""What the workers of a context and of a pass say to each other, behind the topic of a `Cast`."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

__all__ = [
    "Cancel",
    "Entered",
    "Failed",
    "Gradients",
    "Head",
    "Mark",
    "Marked",
    "Message",
    "Missing",
    "PassId",
    "Release",
    "Report",
    "Token",
    "decode",
    "encode",
]


class PassId(NamedTuple):
    """Names one pass: the incarnation of the agent that began it, and a number of its."""

    root: int
    number: int


class Token(NamedTuple):
    """Names one mark or gradient on its way: who sent it, a number of its, and which of both it is."""

    sender: int
    number: int
    is_mark: bool


class Missing(NamedTuple):
    """A gate whose gradient has not come: the message, the function called, who has the other end."""

    message: int
    function: str
    peer: int


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


class Gradients(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Gradients of some of a message's tensors; they follow in the body."""

    head: Head
    token: Token
    message: int
    outputs: list[int]
    report: Report | None = None
    """Where it goes to the root anyway."""


class Marked(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """From the root: all has been marked that is going to be."""

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
    """From the maker of a context: it is over."""

    context: int


Message = Mark | Gradients | Report | Marked | Failed | Cancel | Entered | Release

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """A message as it travels."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message that travelled."""
    return _decoder.decode(data)
