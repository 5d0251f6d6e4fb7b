"""The client's record of one server: its blocks, its state, its speed, and until when it is not called."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbdist.swarm.directory.entry import ServerEntry, State
from nbdist.swarm.directory.routing import Offer, Span, runs_of

if TYPE_CHECKING:
    from nbdist.swarm.server.neighbours import Address
    from nbdist.swarm.server.session_caches import StepReply

_NEWEST_WEIGHT = 0.2  # of the newest measurement in the moving averages `ServerRecord.hop` and `ServerRecord.pace`
_LONGEST_BAN_SECONDS = 300.0


@dataclass(eq=False)
class ServerRecord:
    """One server of a swarm, as this client knows it: its entry in the directory, and how calls to it went.

    The crew changes the entry under its lock. Threads whose calls have ended update the numbers.
    """

    entry: ServerEntry
    why_lost: str = ""  # this client has lost it; the directory may not know yet
    why_banned: str = ""
    cache: int = 0  # bytes reserved for caches, as of the server's last reply, like the next two numbers
    sessions: int = 0
    steps: int = 0
    load: int = 0  # calls whose answers this client is waiting for
    hop: float = 1e-3  # seconds that a call takes besides the computation: a moving average
    pace: float = 1e-3  # seconds of computation for one token in one block: a moving average
    strikes: int = 0  # times in a row that the server did not answer
    banned_until: float = 0.0  # as of `time.monotonic`, like every ``now`` here
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def name(self) -> str:
        """The name of its worker."""
        return self.entry.name

    @property
    def incarnation(self) -> int:
        """The incarnation of its worker."""
        return self.entry.incarnation

    @property
    def address(self) -> Address:
        """Where it is called."""
        return self.entry.address

    @property
    def blocks(self) -> Sequence[int]:
        """The blocks that it serves."""
        return () if self.why_lost else self.entry.blocks

    @property
    def state(self) -> State:
        """The state in the directory, or "gone" if this client has lost it."""
        return "gone" if self.why_lost and self.entry.state != "offline" else self.entry.state

    @property
    def there(self) -> bool:
        """True while the server can be called: it is online (banned or not) or draining."""
        return self.entry.there and not self.why_lost

    def changed(self, entry: ServerEntry) -> None:
        """Take a newer entry; a server that is gone or offline has no caches."""
        self.entry = entry
        if entry.state in ("gone", "offline"):
            self.cache = self.sessions = 0

    @contextlib.contextmanager
    def counting_call(self) -> Iterator[None]:
        """Return a context manager that counts one more call in `load`, so that busy servers get less new work."""
        with self._counting:
            self.load += 1
        try:
            yield
        finally:
            with self._counting:
                self.load -= 1

    def answered(self, reply: StepReply, elapsed: float | None, tokens: int, blocks: int) -> None:
        """Store the numbers of a reply, and lift a ban.

        ``elapsed`` is the seconds from call to answer; None if the server had to wait for other servers. ``tokens`` and
        ``blocks`` are the size of the request.
        """
        self.cache, self.sessions, self.steps = reply.cache, reply.sessions, reply.steps
        self.strikes, self.banned_until, self.why_banned = 0, 0.0, ""
        if reply.seconds > 0 and tokens:  # else it was stored already, or empty, and says nothing about the speed
            self.pace += _NEWEST_WEIGHT * (reply.seconds / (tokens * blocks) - self.pace)
            if elapsed is not None:
                self.hop += _NEWEST_WEIGHT * (max(0.0, elapsed - reply.seconds) - self.hop)

    def ban(self, now: float, seconds: float, why: str) -> float:
        """Ban the server because it did not answer or cannot serve; return for how many seconds from ``now``.

        The first ban lasts ``seconds``, each further ban in a row twice as long, 300 at most. ``why`` is for displays.
        """
        for_ = min(seconds * 2.0**self.strikes, _LONGEST_BAN_SECONDS)
        self.strikes += 1
        self.why_banned = why
        self.banned_until = now + for_
        return for_

    def is_banned(self, now: float) -> bool:
        """Return whether the server must not be called now."""
        return now < self.banned_until

    def serves(self, now: float) -> bool:
        """Return whether the server may get new work: it is online and not banned."""
        return self.state == "online" and not self.is_banned(now)

    def has(self, span: Span, now: float) -> bool:
        """Return whether the server may get new work, and serves all blocks of a span."""
        blocks = self.blocks  # once: other threads replace the list
        return self.serves(now) and all(number in blocks for number in range(span.begin, span.end))

    def offer(self) -> Offer:
        """Return the server's blocks, speed and load, for `nbdist.swarm.directory.routing`."""
        return Offer(self.blocks, self.hop, self.pace, self.load)

    def told(self, now: float, sizes: Sequence[int], budget: int | None) -> dict[str, Any]:
        """Describe the server for a map, as a dict of JSON values.

        ``sizes`` has the bytes of all blocks of the model, ``budget`` is the bytes of caches that a server may hold,
        None for no limit.
        """
        banned = self.state == "online" and self.is_banned(now)
        note = self.entry.note or self.why_lost or self.why_banned
        return {
            "name": self.name,
            "state": "banned" if banned else self.state,
            "note": f"{note}; asked again in {self.banned_until - now:.0f} s" if banned else note,
            "blocks": [[run.start, run.stop] for run in runs_of(self.blocks)],
            "nbytes": sum(sizes[number] for number in self.blocks),
            "cache": self.cache,
            "budget": budget,
            "sessions": self.sessions,
            "steps": self.steps,
        }
