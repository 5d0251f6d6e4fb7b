"""Agents of one process: a queue for each, in a network of their own."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Sequence

from nbdist.channel.contract import Buffer, ChannelError

__all__ = ["InProcessChannel", "Network"]


class Network:
    """The channels that can reach each other."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[str, InProcessChannel] = {}
        self._lock = threading.Lock()

    def open(self) -> InProcessChannel:
        """A new channel in this network."""
        channel = InProcessChannel(self, f"inprocess://{id(self):x}/{next(self._numbers)}")
        with self._lock:
            self._open[channel.address] = channel
        return channel

    def find(self, address: str) -> InProcessChannel | None:
        """The open channel at ``address``."""
        return self._open.get(address)

    def remove(self, address: str) -> None:
        """A channel has been closed."""
        with self._lock:
            self._open.pop(address, None)


class InProcessChannel:
    """One agent's queue."""

    def __init__(self, network: Network, address: str) -> None:
        self.address = address
        self._network = network
        self._queue: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._closed = False

    @property
    def addresses(self) -> list[str]:
        return [self.address]

    def connect(self, addresses: Sequence[str]) -> InProcessLink:
        for address in addresses:
            if address.startswith("inprocess://"):
                return InProcessLink(self._network, address)
        raise ChannelError(f"none of {list(addresses)} is in this process")

    def deliver(self, frames: list[bytes]) -> None:
        """Put a message where `receive` finds it."""
        if not self._closed:
            self._queue.put(frames)

    @property
    def readers(self) -> int:
        return 1

    def has_more(self) -> bool:
        return False

    def receive(self, timeout: float | None, guest: bool = False, soon: bool = False) -> list[bytes] | None:
        if self._closed:
            return None
        try:
            return self._queue.get(timeout=None if timeout is None else max(timeout, 0))
        except queue.Empty:
            return None

    def expect(self) -> None:
        pass

    def expect_no_more(self) -> None:
        pass

    def call(self) -> None:
        self.wake()

    def called(self) -> None:
        pass

    def wake(self) -> None:
        self._queue.put(None)

    def close(self) -> None:
        self._closed = True
        self._network.remove(self.address)
        self.wake()


class InProcessLink:
    """The way to another queue of the network."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address

    def send(self, frames: Sequence[Buffer], kind: str) -> None:
        target = self._network.find(self._address)
        if target is not None:  # else it is lost, as on a wire
            target.deliver([bytes(frame) for frame in frames])

    def close(self, *, at_once: bool = False) -> None:
        pass
