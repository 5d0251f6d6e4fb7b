"""Connects agents of one process, with a queue for each. Tests, doctests and `nbdist.testing.World` use it."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Sequence

from nbdist.channel.contract import Buffer, Channel, ChannelError


class Network:
    """A group of in-process channels that reach only each other. Any thread may use it.

    Example:
        >>> network = Network()
        >>> receiver, sender = network.open(), network.open()
        >>> sender.connect(receiver.addresses).send([b"hello"], "call")
        >>> receiver.receive(timeout=1.0)
        [b'hello']
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[str, InProcessChannel] = {}

    def open(self) -> InProcessChannel:
        """Return a new channel in this network. `InProcessChannel.close` removes it from the network."""
        channel = InProcessChannel(self, f"inprocess://{id(self):x}/{next(self._numbers)}")
        self._open[channel.address] = channel
        return channel

    def find(self, address: str) -> InProcessChannel | None:
        """Return the open channel at ``address``; None if it was closed or removed, or is not of this network."""
        return self._open.get(address)

    def remove(self, address: str) -> None:
        """Remove the channel at ``address``, which has been closed. Messages to it are lost from now on.

        `InProcessChannel.close` calls this. An unknown address, or a second call, does nothing.
        """
        self._open.pop(address, None)


class InProcessChannel(Channel):
    """A channel inside one process: one queue, into which links put messages. Make one with `Network.open`.

    It has one reader and no guest, so `expect`, `expect_no_more` and `called` do nothing. `Network` has an example.
    """

    def __init__(self, network: Network, address: str) -> None:
        self.address = address
        """The channel's only address, ``inprocess://…``."""
        self._network = network
        self.arrived: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        """The messages that `receive` has not returned, as frames; None for each call of `wake`."""
        self._closed = False

    @property
    def addresses(self) -> list[str]:
        """The channel's only address, in a list; after `close`, too."""
        return [self.address]

    def connect(self, addresses: Sequence[str], is_large: bool = False) -> InProcessLink:
        """Return a link to the first of ``addresses`` that begins with ``inprocess://``. ChannelError if none does.

        This channel need not be open. Messages to one that is closed, or of another network, are lost without an error.
        ``is_large`` changes nothing here.
        """
        for address in addresses:
            if address.startswith("inprocess://"):
                return InProcessLink(self._network, address)
        raise ChannelError(
            f"an in-process channel cannot connect to {list(addresses)}: its peers are in this process, and their "
            "addresses begin with inprocess://"
        )

    def deliver(self, frames: list[bytes]) -> None:
        """Put a message, as ``frames``, into the queue. Does nothing after `close`."""
        if not self._closed:
            self.arrived.put(frames)

    def receive(self, timeout: float | None, guest: bool = False, soon: bool = False) -> list[bytes] | None:
        """Return the next message's frames; None after ``timeout`` seconds, after `wake`, and once closed.

        Without a ``timeout``, waits as long as it takes; one below 0 counts as 0. `close` drops the messages in the
        queue. ``guest`` and ``soon`` change nothing here.
        """
        if self._closed:
            return None
        try:
            return self.arrived.get(timeout=None if timeout is None else max(timeout, 0))
        except queue.Empty:
            return None

    def wake(self) -> None:
        """Make one waiting `receive`, or else the next one, return None.

        A thread calls this if it changes something that the reader waits for. Two calls end two `receive`. Harmless
        after `close`.
        """
        self.arrived.put(None)

    def close(self) -> None:
        """Leave the network; `receive` returns None from now on. A second call has no further effect."""
        self._closed = True
        self._network.remove(self.address)
        self.wake()


class InProcessLink:
    """A `Link` to another channel of the network."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address

    def send(self, frames: Sequence[Buffer], kind: str) -> None:
        """Put a copy of the message into the other channel's queue; if that channel is closed, the message is lost."""
        if (target := self._network.find(self._address)) is not None:
            # Copies, as on a wire: the sender may change the memory of a view, and the receiver must not see that.
            target.deliver([bytes(frame) for frame in frames])

    def close(self, *, at_once: bool = False) -> None:
        """Do nothing: the link holds no resources."""
