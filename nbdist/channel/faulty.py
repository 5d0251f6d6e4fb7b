"""A channel that goes wrong on purpose: fails, drops, delays, doubles and reorders, by kind of message.

It wraps any other channel, so faults meet the same code as on a healthy one. Users test the failure
paths of their own programs with it, through `nbdist.testing`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nbdist.channel.contract import Buffer, Channel, ChannelError, Link

__all__ = ["Faults", "FaultyChannel"]


@dataclass
class Faults:
    """What goes wrong; kinds are those of `nbdist.wire.messages.Message.kind`, and ``"*"`` is any.

    ``fail``: the first so many sends of a kind to one receiver raise. ``drop``, ``duplicate``,
    ``reorder``: the share of messages of a kind that this happens to (a reordered one waits up to 50 ms).
    ``delay``: seconds that messages of a kind are held back. ``match`` widens or narrows a kind: it maps
    (kind, frames) to the word that the rules are looked up by.
    """

    fail: Mapping[str, int] = field(default_factory=dict)
    drop: Mapping[str, float] = field(default_factory=dict)
    delay: Mapping[str, float] = field(default_factory=dict)
    duplicate: Mapping[str, float] = field(default_factory=dict)
    reorder: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    match: Callable[[str, Sequence[Buffer]], str] | None = None


def _rule(rules: Mapping[str, float], word: str) -> float:
    return rules.get(word, rules.get("*", 0))


class FaultyChannel:
    """Another channel, with faults."""

    def __init__(self, inner: Channel, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults
        self.random = random.Random(faults.seed)
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def addresses(self) -> list[str]:
        return self.inner.addresses

    def connect(self, addresses: Sequence[str]) -> FaultyLink:
        return FaultyLink(self, self.inner.connect(addresses))

    @property
    def readers(self) -> int:
        return self.inner.readers

    def has_more(self) -> bool:
        return self.inner.has_more()

    def receive(self, timeout: float | None, guest: bool = False, soon: bool = False) -> list[bytes] | None:
        return self.inner.receive(timeout, guest, soon)

    def wake(self) -> None:
        self.inner.wake()

    def expect(self) -> None:
        self.inner.expect()

    def expect_no_more(self) -> None:
        self.inner.expect_no_more()

    def call(self) -> None:
        self.inner.call()

    def called(self) -> None:
        self.inner.called()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.inner.close()

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Do ``action`` in ``delay`` seconds, on the channel's own thread."""
        with self._changed:
            heapq.heappush(self._later, (time.monotonic() + delay, next(self._numbers), action))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nbdist-faults", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._later or self._later[0][0] > time.monotonic()):
                    left = self._later[0][0] - time.monotonic() if self._later else None
                    self._changed.wait(left)
                if self._closed:
                    return
                _, _, action = heapq.heappop(self._later)
            action()


class FaultyLink:
    """The way to another agent, with faults on it."""

    def __init__(self, channel: FaultyChannel, inner: Link) -> None:
        self._channel = channel
        self._inner = inner
        self._failed: dict[str, int] = {}

    def send(self, frames: Sequence[Buffer], kind: str) -> None:
        faults, chance = self._channel.faults, self._channel.random.random
        word = faults.match(kind, frames) if faults.match else kind
        failed = self._failed.get(word, 0)
        if failed < _rule(faults.fail, word):
            self._failed[word] = failed + 1
            raise ChannelError(f"injected fault: {word} message not sent")
        if chance() < _rule(faults.drop, word):
            return
        kept = [bytes(frame) for frame in frames]
        copies = 2 if chance() < _rule(faults.duplicate, word) else 1
        for _ in range(copies):
            delay = _rule(faults.delay, word)
            if chance() < _rule(faults.reorder, word):
                delay += chance() * 0.05
            if delay:
                self._channel.after(delay, lambda: self._send_late(kept, kind))
            else:
                self._inner.send(kept, kind)

    def _send_late(self, frames: Sequence[Buffer], kind: str) -> None:
        with contextlib.suppress(ChannelError):  # a message that is lost late is lost
            self._inner.send(frames, kind)

    def close(self, *, at_once: bool = False) -> None:
        self._inner.close(at_once=at_once)
