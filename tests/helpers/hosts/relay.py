"""A relay in the line of a host: it carries every frame after a delay, and loses, holds or resets on demand.

::

    the host                                                                     the bridge of the hosts
    interface ── veth ── a bridge of its own ── TAP ── the relay's process ── TAP ── bridge

The relay is a process of its own, which copies Ethernet frames between two TAP devices. Each direction has a queue in
which a frame waits for its time, so a delay does not lower the rate of the line. The relay needs no port or address, so
it carries everything: RPC, kernels, stores and gloo. TCP sends lost frames again, as on a real line.

====== ============ ======================================================================================
state  how it ends  what happens to a frame
====== ============ ======================================================================================
open                it waits for its delay and goes on; ``loss`` of them, drawn at random, are dropped
frozen `thaw`       it waits in the queue, however long: no end learns that its connections lead nowhere
reset  by itself    the first one of each TCP connection turns into a reset: bytes on the way are lost
====== ============ ======================================================================================

`Host.cut` is another thing: while a host is cut off, its frames are lost and not held.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

from helpers.hosts import relay_process
from helpers.hosts.other_hosts import Host, ip
from helpers.hosts.relay_process import open_tap

__all__ = ["Relay", "can_relay", "relay"]

_QUEUE = 20_000
"""Frames that the kernel keeps for the relay; it drops more. 20,000 full frames are 30 MB."""


def can_relay() -> bool:
    """Return whether this process may open TAP devices; whether it may make hosts is another question."""
    try:
        os.close(open_tap(f"nbr{os.getpid():x}"))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def relay(host: Host, delay: float = 0.0, loss: float = 0.0) -> Iterator[Relay]:
    """Put a relay into the line of a host for the time of the block; its values are as for `Relay.set`."""
    shared = os.path.basename(os.readlink(f"/sys/class/net/{host.link}/master"))
    own, near, far = (letter + host.link for letter in "bnf")
    with contextlib.ExitStack() as undo:
        ip("link", "add", own, "type", "bridge")
        undo.callback(ip, "link", "del", own)
        process = subprocess.Popen(
            [sys.executable, relay_process.__file__, near, far],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        undo.callback(process.wait, 10)
        undo.callback(process.kill)  # its devices end with it
        found = Relay(process)
        found.set(delay=delay, loss=loss)
        ip("link", "set", own, "up")
        for device, bridge in ((near, own), (far, shared)):
            ip("link", "set", device, "txqueuelen", str(_QUEUE), "master", bridge, "up")
        undo.callback(ip, "link", "set", host.link, "master", shared)
        ip("link", "set", host.link, "master", own)
        yield found


class Relay:
    """A running relay; `relay` makes it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._asking = threading.Lock()
        """Held while one thread asks the process and reads the answer."""

    def set(self, **values: float | str) -> None:
        """Change what the relay does: ``delay`` (seconds each way), ``loss`` (share of frames)."""
        self._ask(values)

    def freeze(self, ways: str = "both") -> None:
        """Hold every frame from now on: those that come ``from`` the host, those ``to`` it, or ``both``.

        All connections stay open.
        """
        self.set(frozen=ways)

    def thaw(self) -> None:
        """Send on what was held, and relay again."""
        self.set(frozen="")

    def reset(self, seconds: float = 0.1) -> None:
        """Reset each TCP connection that has a frame within so many seconds; what is on the way is lost.

        The end that the frame goes to learns it at once, the other one when it sends next.
        """
        self.set(reset=seconds)

    def counts(self) -> dict[str, int]:
        """Return how many frames the relay has ``carried``, ``lost`` and turned into resets (``reset``)."""
        return self._ask({})

    def _ask(self, values: dict[str, float | str]) -> dict[str, int]:
        """Send the relay's process new values; return its counts."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._asking:
            print(json.dumps(values), file=self._process.stdin, flush=True)
            counts: dict[str, int] = json.loads(self._process.stdout.readline())
        return counts
