"""What an agent asks of a channel.

It is little: frames to an address, from any thread, without blocking; frames from anybody, to whoever
waits for them. No promise of order, of arrival or of arriving once: `nbdist.wire.peer` makes those. A
channel does promise that what it delivers came from a member (G6), and that one message's frames arrive
together or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from nbdist.errors import NbdistError

__all__ = ["Buffer", "Channel", "ChannelError", "Link", "TooManyFiles"]

Buffer = bytes | memoryview


class ChannelError(NbdistError):
    """The channel cannot take a message for that address."""


class TooManyFiles(ChannelError):
    """This process's file table is full: nothing is wrong with the other agent, and later there may be room."""


class Link(Protocol):
    """The way to one other agent."""

    def send(self, frames: Sequence[Buffer], kind: str) -> None:
        """Send ``frames``, from any thread, without waiting for the receiver.

        ``kind`` is the message's word (`nbdist.wire.messages.Message.kind`), for channels that inject faults.
        Raises ChannelError where the message certainly does not go out.
        """
        ...

    def close(self, *, at_once: bool = False) -> None:
        """Let go of the way; what was sent may still arrive, unless ``at_once``."""
        ...


@runtime_checkable
class Channel(Protocol):
    """An agent's door: one address to be reached at, and ways to others."""

    @property
    def addresses(self) -> list[str]:
        """Where others reach this channel, the best first."""
        ...

    def connect(self, addresses: Sequence[str]) -> Link:
        """The way to a channel with one of these addresses."""
        ...

    @property
    def readers(self) -> int:
        """How many threads should wait in `receive`: 2 where one is woken for a message and the other sleeps on."""
        ...

    def receive(self, timeout: float | None, guest: bool = False, soon: bool = False) -> list[bytes] | None:
        """Return the next message's frames; None after ``timeout`` seconds, on `wake`, and once closed.

        As many threads as `readers` may wait here, and beside them one more as ``guest``: messages wake the guest
        rather than another, and `call` the guest alone. ``soon`` says that no other thread of the agent has anything
        to do, so that one which does not sleep while it waits is in nobody's way.
        """
        ...

    def has_more(self) -> bool:
        """Whether something has come for which no thread that waits in `receive` will be woken."""
        ...

    def wake(self) -> None:
        """Make a `receive` that waits return None; from any thread."""
        ...

    def expect(self) -> None:
        """Let messages wake no other thread: the calling one is about to `receive` as guest, and may do so awake."""
        ...

    def expect_no_more(self) -> None:
        """End what `expect` began, if the calling thread has begun it and it has not ended by itself."""
        ...

    def call(self) -> None:
        """Make the guest's `receive` return None, until `called`; from any thread."""
        ...

    def called(self) -> None:
        """Who was called has come."""
        ...

    def close(self) -> None:
        """Stop receiving, and leave nothing behind."""
        ...
