"""What a swarm knows of one of its servers: what it has, how it is, how fast it is, and until when it is left alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from nbdist.rpc.rref import RRef
from nbdist.swarm.routing import Offer, Span, runs_of

if TYPE_CHECKING:
    from nbdist.swarm.held import Reply
    from nbdist.swarm.neighbours import Address
    from nbdist.swarm.server import Server

__all__ = ["Member"]

State = Literal["joining", "online", "draining", "offline", "gone"]
_WEIGHT = 0.2
"""Of the newest measurement in what is believed."""
_LONGEST = 300.0


@dataclass(eq=False)
class Member:
    """A server of a swarm."""

    name: str
    incarnation: int
    server: RRef[Server]
    address: Address
    room: int | None = None
    """Bytes of blocks that it may have."""
    state: State = "joining"
    note: str = ""
    blocks: list[int] = field(default_factory=list)
    cache: int = 0
    sessions: int = 0
    steps: int = 0
    load: int = 0
    """Requests that it has of ours."""
    hop: float = 1e-3
    pace: float = 1e-3
    strikes: int = 0
    """How often after each other it did not answer."""
    banned_until: float = 0.0
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def there(self) -> bool:
        """Whether it can be asked."""
        return self.state in ("online", "draining")

    def rest(self, state: State, note: str = "") -> None:
        """It has nothing any more."""
        self.state, self.note = state, note
        self.blocks = []
        self.cache = self.sessions = 0

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Something is asked of it, of which it has more to do."""
        with self._counting:
            self.load += 1
        try:
            yield
        finally:
            with self._counting:
                self.load -= 1

    def answered(self, reply: Reply, elapsed: float | None, tokens: int, blocks: int) -> None:
        """It has computed something, in so many seconds from call to answer; None if it had to wait for others."""
        self.cache, self.sessions, self.steps = reply.cache, reply.sessions, reply.steps
        self.strikes, self.banned_until, self.note = 0, 0.0, ""
        if reply.seconds > 0:
            self.pace += _WEIGHT * (reply.seconds / max(1, tokens * blocks) - self.pace)
            if elapsed is not None:
                self.hop += _WEIGHT * (max(0.0, elapsed - reply.seconds) - self.hop)

    def ban(self, now: float, seconds: float, why: str) -> float:
        """It did not answer, or cannot: leave it alone, each time in a row for twice as long; for how many seconds."""
        for_ = min(seconds * 2.0**self.strikes, _LONGEST)
        self.strikes += 1
        self.note = why
        self.banned_until = now + for_
        return for_

    def is_banned(self, now: float) -> bool:
        """Whether it is left alone."""
        return now < self.banned_until

    def serves(self, now: float) -> bool:
        """Whether something new may be brought to it."""
        return self.state == "online" and not self.is_banned(now)

    def has(self, span: Span, now: float) -> bool:
        """Whether it still is to be asked for these blocks."""
        blocks = self.blocks
        return self.serves(now) and all(number in blocks for number in range(span.begin, span.end))

    def offer(self) -> Offer:
        """What it has for who looks for a way."""
        return Offer(self.blocks, self.hop, self.pace, self.load)

    def told(self, now: float, sizes: Sequence[int], budget: int | None) -> dict[str, Any]:
        """What a map shows of it."""
        banned = self.state == "online" and self.is_banned(now)
        return {
            "name": self.name,
            "state": "banned" if banned else self.state,
            "note": f"{self.note}; asked again in {self.banned_until - now:.0f} s" if banned else self.note,
            "blocks": [[run[0], run[-1] + 1] for run in runs_of(self.blocks)],
            "nbytes": sum(sizes[number] for number in self.blocks),
            "cache": self.cache,
            "budget": budget,
            "sessions": self.sessions,
            "steps": self.steps,
        }
