"""Defines the contract between an agent and its channel.

A channel sends a message, which is a list of frames, to an address. Any thread may send, and sending never waits for
the receiver. A channel also returns the messages of all other agents, one at a time, to the threads in `receive`.

A channel promises two things. All frames of a message arrive together, or none does. Each message that arrives was sent
by a member. It may lose, double and reorder messages: `nbdist.wire.peer` sends lost ones again, and drops second
copies.

Two kinds of threads wait in `receive`. The *readers* are threads of the agent's pool. The *guest* is a thread that
waits for the answer of its own call, and reads that answer itself (`nbdist.rpc.calls.waiting_reader`); there is one at
a time::

    caller                      channel
    expect() ─────────────────> messages wake no reader
    send the call
    receive(guest=True) ──────> the next message wakes the guest
      or call() by a reader ──> the guest returns None, again and again until called()
    expect_no_more() ─────────> messages wake readers again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from nbdist.errors import NbdistError

Buffer = bytes | memoryview


class ChannelError(NbdistError):
    """The channel cannot take a message for that address, or cannot be opened. The message was not sent."""


class TooManyFiles(ChannelError):
    """This process cannot open another file. The other agent is well, so the same `connect` may succeed later."""


class Link(Protocol):
    """The sending end of a channel towards one other agent, made by `Channel.connect`."""

    def send(self, frames: Sequence[Buffer], kind: str) -> None:
        """Send ``frames``, without waiting for the receiver. Any thread may call this.

        ``kind`` names the type of the message (`nbdist.wire.messages.Message.kind`); only channels that inject faults
        use it. Raises ChannelError if the message certainly was not sent. A message may be lost without an error.
        """

    def close(self, *, at_once: bool = False) -> None:
        """Close the link. Messages that were sent before may still arrive; with ``at_once``, they are dropped.

        `send` raises ChannelError afterwards, except on links that hold no resources. A second call does nothing.
        """


@runtime_checkable
class Channel(Protocol):
    """Receives an agent's messages at one or more addresses, and makes links to other agents.

    A channel whose messages always wake a reader inherits `readers` and `has_more`, which return 1 and False, `expect`,
    `expect_no_more` and `called`, which do nothing, and `call`, which ends one `receive`. Any thread may call `wake`
    and `call`; after `close` they do no harm.
    """

    @property
    def addresses(self) -> list[str]:
        """The addresses at which other agents reach this channel, the fastest first."""

    def connect(self, addresses: Sequence[str], is_large: bool = False) -> Link:
        """Return a link to the agent with these ``addresses``, by the first of them that this process can reach.

        Two links to one agent do not wait for each other. ``is_large`` is True for the link of large messages.

        Raises ChannelError if none can be reached or the channel is closed, TooManyFiles if no file can be opened.
        """

    @property
    def readers(self) -> int:
        """The number of pool threads that should wait in `receive`.

        It is 2 if a message wakes only one of the waiting threads: then the other one can take the next message.
        """
        return 1

    def receive(self, timeout: float | None, guest: bool = False, soon: bool = False) -> list[bytes] | None:
        """Return the next message's frames; None after ``timeout`` seconds, after `wake`, and once closed.

        A large frame may be a writable view instead of bytes. Nothing else uses its memory, so a tensor can be made
        there without copying it. Up to `readers` threads of the agent's pool may wait here, and the guest, with
        ``guest=True``, which may get any message. A reader passes ``soon=True`` if no other thread of the agent has
        work. Then the channel may poll for a message for a millisecond before it sleeps (`nbdist.channel.spinning`).
        """

    def has_more(self) -> bool:
        """Return whether a message, or part of one, has arrived for which no thread in `receive` will be woken.

        The caller must then call `receive`, or `wake` a thread that does.
        """
        return False

    def wake(self) -> None:
        """Make one waiting `receive`, or else the next one, return None, because a timer or the like has changed."""

    def expect(self) -> None:
        """Keep messages from waking readers, because the calling thread will read its reply itself, as guest.

        Call it before sending the call; then call ``receive(guest=True)`` and `expect_no_more`. Does nothing if the
        thread would sleep in `receive` anyway. A second call before `expect_no_more` does no harm.
        """
        return

    def expect_no_more(self) -> None:
        """Let messages wake readers again, if the calling thread's `expect` still prevents it; else do nothing."""
        return

    def call(self) -> None:
        """Make the guest's `receive` return None, again and again until `called`: its reply has been handled."""
        self.wake()

    def called(self) -> None:
        """End the effect of `call`, because the guest has returned from `receive`. Without a `call`, do nothing."""
        return

    def close(self) -> None:
        """Stop receiving, close all links, and remove the channel's files. A second call does nothing."""
