"""Injects faults into a channel: messages of chosen kinds fail, get lost, are late, come twice or in another order.

`FaultyChannel` wraps any other channel, so everything above it runs unchanged. Programs use it through `nbdist.testing`
to test how they handle failures.
"""

from __future__ import annotations

import contextlib
import random
import sched
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nbdist.channel.contract import Buffer, Channel, ChannelError, Link


@dataclass
class Faults:
    """The faults to inject. Each rule maps a kind of messages, such as ``"call"`` or ``"reply"``, to a number.

    Kinds are the values of `nbdist.wire.messages.Message.kind`. The kind ``"*"`` stands for all kinds that a rule does
    not name. Rules may be changed while the channel is in use. Kinds and numbers are not checked: an unknown kind never
    matches, a share of 1 or more means always, and what is no number raises TypeError when a message is sent.

    Example:
        >>> with World(2, faults=Faults(fail={"call": 1})) as world:
        ...     with world[0].activate():
        ...         try:
        ...             rpc.rpc_sync("worker1", max, args=(1, 2))
        ...         except nbdist.NbdistError as error:
        ...             print(type(error).__name__)
        ...         rpc.rpc_sync("worker1", max, args=(1, 2))
        ChannelError
        2
    """

    fail: Mapping[str, int] = field(default_factory=dict)
    """The number of messages of a kind, the first to each receiver, for which `Link.send` raises ChannelError."""
    drop: Mapping[str, float] = field(default_factory=dict)
    """The share of messages that are lost, from 0 to 1."""
    delay: Mapping[str, float] = field(default_factory=dict)
    """The seconds by which messages are late."""
    duplicate: Mapping[str, float] = field(default_factory=dict)
    """The share of messages that are sent twice."""
    reorder: Mapping[str, float] = field(default_factory=dict)
    """The share of messages that are up to 50 ms late, so that later messages overtake them."""
    seed: int = 0
    """The seed of the random numbers that choose the messages."""
    match: Callable[[str, Sequence[Buffer]], str] | None = None
    """A function that takes a message's kind and frames, and returns the kind to look up in the rules."""


def _rule(rules: Mapping[str, float], word: str) -> float:
    """Return the number to which a rule of `Faults` maps the kind ``word``, else ``"*"``; 0 if it has neither."""
    return rules.get(word, rules.get("*", 0))


class FaultyChannel:
    """A channel that wraps another one and injects `Faults` into what it sends. Receiving is not affected.

    Example:
        >>> from nbdist.testing import Network
        >>> network = Network()
        >>> receiver, sender = network.open(), FaultyChannel(network.open(), Faults(duplicate={"call": 1.0}))
        >>> sender.connect(receiver.addresses).send([b"hello"], "call")
        >>> receiver.receive(timeout=1.0), receiver.receive(timeout=1.0)
        ([b'hello'], [b'hello'])
    """

    def __init__(self, inner: Channel, faults: Faults) -> None:
        """Wrap the channel ``inner``, which is closed together with this one; inject ``faults`` into its messages."""
        self.inner = inner
        self.faults = faults
        self.random = random.Random(faults.seed)
        # Receiving is the wrapped channel's.
        self.receive, self.readers = inner.receive, inner.readers
        self.has_more, self.wake = inner.has_more, inner.wake
        self.expect, self.expect_no_more = inner.expect, inner.expect_no_more
        self.call, self.called = inner.call, inner.called
        self._later = sched.scheduler(time.monotonic)
        self._changed = threading.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def addresses(self) -> list[str]:
        """The addresses of the wrapped channel."""
        return self.inner.addresses

    def connect(self, addresses: Sequence[str], is_large: bool = False) -> FaultyLink:
        """Return the wrapped channel's link to ``addresses``, with faults; ``is_large`` is passed on.

        Raises the errors of the wrapped channel's `connect`, such as ChannelError for an address that it cannot reach.
        """
        return FaultyLink(self, self.inner.connect(addresses, is_large))

    def close(self) -> None:
        """Close the wrapped channel. Messages that are still delayed are dropped. A second call does nothing more."""
        self._closed = True
        self._changed.set()
        self.inner.close()

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Call ``action`` in ``delay`` seconds, in a thread of this channel; never, if the channel is closed before.

        ``action`` must not raise: its error would end the thread, and later actions and delayed messages with it. A
        negative delay counts as 0.
        """
        self._later.enter(delay, 0, action)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nbdist-faults", daemon=True)
                self._thread.start()
        self._changed.set()

    def _run(self) -> None:
        while not self._closed:
            self._changed.wait(self._later.run(blocking=False))
            self._changed.clear()


class FaultyLink:
    """A `Link` that injects the faults of its channel. Each link counts its failures itself, by kind of message."""

    def __init__(self, channel: FaultyChannel, inner: Link) -> None:
        self._channel = channel
        self._inner = inner
        self._failed: dict[str, int] = {}

    def send(self, frames: Sequence[Buffer], kind: str) -> None:
        """Send a message with the faults that the rules name for its kind.

        Raises ChannelError if the ``fail`` rule demands it, or the wrapped link raises it. No error is raised for a
        message that is dropped, or that is delayed and sent later by the channel's thread.
        """
        faults, chance = self._channel.faults, self._channel.random.random
        word = faults.match(kind, frames) if faults.match else kind
        failed = self._failed.get(word, 0)
        if failed < _rule(faults.fail, word):
            self._failed[word] = failed + 1
            raise ChannelError(f"injected fault: {word} message not sent, as Faults(fail=...) asks for")
        if chance() < _rule(faults.drop, word):
            return
        kept = [bytes(frame) for frame in frames]  # copies: a message that is sent later must not change meanwhile
        for _ in range(2 if chance() < _rule(faults.duplicate, word) else 1):
            delay = _rule(faults.delay, word)
            if chance() < _rule(faults.reorder, word):
                delay += chance() * 0.05
            if delay:
                self._channel.after(delay, lambda: self._send_late(kept, kind))
            else:
                self._inner.send(kept, kind)

    def _send_late(self, frames: Sequence[Buffer], kind: str) -> None:
        with contextlib.suppress(ChannelError):  # the wrapped link may be closed by now: the message is lost
            self._inner.send(frames, kind)

    def close(self, *, at_once: bool = False) -> None:
        """Close the wrapped link.

        Delayed messages are then lost, unless closing the wrapped link does nothing, as in `nbdist.channel.inprocess`.
        A second call does no harm.
        """
        self._inner.close(at_once=at_once)
