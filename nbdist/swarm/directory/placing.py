"""`Placing`: what a client asks of a swarm's one placer, which is in its own process or elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from nbdist.errors import NbdistError, UsageError, WorkerLost
from nbdist.rpc.api import current_agent
from nbdist.rpc.futures import Future
from nbdist.rpc.named import NotOffered
from nbdist.swarm.directory.directory import USAGE, SwarmNews, Usage
from nbdist.swarm.directory.entry import ServerEntry
from nbdist.swarm.directory.succession import successors
from nbdist.swarm.policy import Policy
from nbdist.swarm.server.neighbours import Address
from nbdist.swarm.server.server import Options
from nbdist.swarm.server.sources import Source

CLOSED = "this swarm is closed: call nbdist.swarm.serve again"
# Seconds without an answer of the placer after which a client asks a server whether there is another placer.
_PATIENCE = 5.0
_SUCCEED_SECONDS = 60.0  # for that server's answer: it may have to become the placer itself
_NEWS_SECONDS = 15.0  # until a door has told a client of the next placer
_LOOK_SECONDS = 0.05  # between two looks for that


class PlacerReplaced(NbdistError):
    """A server has refused an order of the swarm's placer, because another process is the placer now."""

    def __init__(self, news: SwarmNews) -> None:
        super().__init__(
            f"this process did not answer for a while, so a process of {news.placer.worker} decides now which worker "
            "has which blocks of this swarm: call again, and it is asked"
        )
        self.news = news
        """The last news of the other placer."""

    def __reduce__(self) -> Any:
        return PlacerReplaced, (self.news,)


class SwarmFacts(NamedTuple):
    """The facts of a swarm that do not change."""

    source: Source
    sizes: Sequence[int]  # bytes of each block
    options: Options
    policy: Policy
    host: str  # the host with the file of weights
    folder: str  # the `SharedDirectory` with that file, which goes with the swarm; "" if the file is the user's own


class Placing(Protocol):
    """The part of a placer, near or far, that calls and routes need."""

    def follow(self, news: SwarmNews) -> Placing:
        """Hear newer news; return the placer to ask from now on."""

    def news(self) -> SwarmNews:
        """Return what the directory has now."""

    def lost(self, entry: ServerEntry, why: str) -> None:
        """Hear that a client has lost a server."""

    def lacks(self, entry: ServerEntry, blocks: Sequence[int]) -> None:
        """Hear that a server does not have blocks which it should have."""

    def note_usage(self, client: int, usage: Usage) -> None:
        """Hear what a client has of the swarm now, without waiting; also that a lost client has nothing."""

    def mend(self, begin: int, end: int, without: Sequence[str] = ()) -> None:
        """Let servers load the blocks of the range that no server has, but for those on the workers ``without``.

        Raises `NoRoute` if none can, and `Gone` if one fails, which is banned or lost then: ask again.
        """


def _asking(method: str) -> Callable[..., Any]:
    """Return a method that calls the placer's method of this name, and waits for its result."""

    def ask(placer: FarPlacer, *arguments: Any) -> Any:
        return placer._ask(method, *arguments)

    return ask


class FarPlacer:
    """The placer of a swarm in another process. `nbdist.swarm.placer.Placer` describes the methods."""

    def __init__(self, address: Address, at_close: Callable[[], object], host: str = "", outside: Any = None) -> None:
        """Begin with the placer at ``address``; ``outside`` stands for the agent of a client on another host."""
        self.address = address
        self.client: Address | None = None  # of this process
        self._host = host  # with the file of weights
        self._at_close = at_close
        self._outside = outside
        self._news: SwarmNews | None = None

    def follow(self, news: SwarmNews) -> FarPlacer:
        """Ask the placer of these news from now on, if they are the newest."""
        if news.is_newer(self._news):
            self.address, self._news = news.placer, news
        return self

    def facts(self) -> SwarmFacts:
        """Return the facts of the swarm."""
        facts: SwarmFacts = self._ask("facts", timeout=60.0)
        self._host = facts.host
        return facts

    def watch(self, watcher: Address) -> None:
        """Have ``watcher.take(news)`` called when the directory changes."""
        self.client = watcher
        self._ask("watch", watcher, timeout=60.0)

    def leave(self) -> None:
        """Say that this process does not use the swarm any more, without waiting."""
        client, self.client = self.client, None
        if client is not None:
            with contextlib.suppress(NbdistError):  # RPC may have ended
                agent = current_agent()
                agent.named.withdraw(client.name)  # a placer that does not hear of it finds nobody
                agent.at(*self.address).cast("leave", client)

    def news(self) -> SwarmNews:
        """Ask what the directory has now."""
        news: SwarmNews = self._ask("news", timeout=60.0)
        return news

    def lost(self, entry: ServerEntry, why: str) -> None:
        """Do nothing: the placer's agent hears of deaths, too."""

    def note_usage(self, client: int, usage: Usage) -> None:
        """Tell the placer what this process has, or a client of its door: the placer's agent hears of all others."""
        if self._outside is not None:
            told = {"sessions": 0, "cache": 0, "rate": 0.0, "texts": (0, 0), **usage}
            self._outside.at(*self.address).cast("note_usage", *(told[each] for each in USAGE))
        elif client < 0 or client == current_agent().me.incarnation:
            current_agent().at(*self.address).cast("note_usage", client, usage)

    lacks, mend, join, kill = _asking("lacks"), _asking("mend"), _asking("join"), _asking("kill")
    relieve, dismiss, shift, unload = _asking("relieve"), _asking("dismiss"), _asking("shift"), _asking("unload")

    def _ask(self, method: str, *arguments: Any, timeout: float = 0.0) -> Any:
        # Without a limit by default: servers load blocks. All that is asked may be asked again of the next placer.
        while True:
            agent, news = self._outside or current_agent(), self._news
            asked = agent.at(*(news.placer if news else self.address)).call(method, *arguments, timeout=timeout)
            try:
                while not asked.done():
                    with contextlib.suppress(Exception):  # an error of the call is raised below
                        asked.wait(_PATIENCE)
                    if not asked.done() and self._find_next(news, asked):
                        break
                else:
                    return asked.wait()
            except PlacerReplaced as error:
                self.follow(error.news)
            except (NotOffered, WorkerLost) as error:
                lost = isinstance(error, WorkerLost)
                if lost and not self._outside and news and agent.member(news.term.incarnation) is not None:
                    raise  # of a worker that was to load blocks
                del asked  # it has the error, which refers to this frame
                if not self._find_next(news):
                    if not lost:
                        raise UsageError(CLOSED) from None
                    if self._outside:
                        raise
                    raise WorkerLost(
                        "the process that served this swarm is gone, and no server is known that goes on without it: "
                        "connect to the address of a program that uses the swarm, or serve the model again"
                    ) from error

    def _find_next(self, before: SwarmNews | None, asked: Future[Any] | None = None) -> bool:
        """Have a server find or make another placer than that of the news ``before``; return whether there is one.

        Gives up once ``asked``, a call of the placer before, has an answer.
        """
        if before is None or self._news is None or self._news.term > before.term:  # somebody has told meanwhile
            return before is not None
        if self._outside:  # the door tells news
            until = time.monotonic() + (_NEWS_SECONDS if asked is None else 0.0)
            while self._news.term <= before.term and not self._outside.closed and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
            return self._news.term > before.term
        agent = current_agent()
        # A server in the placer's own process is as frozen as the placer.
        others = [each for each in before.entries if each.incarnation != before.term.incarnation]
        for entry in successors(others, {each.incarnation: each.host for each in agent.members()}, self._host):
            with contextlib.suppress(NbdistError):  # such as `CLOSED`; others may know more
                answer = agent.at(*entry.address.deputy).call("succeed", before.term, timeout=_SUCCEED_SECONDS)
                while not answer.done():
                    with contextlib.suppress(Exception):  # an error is raised below
                        answer.wait(_PATIENCE)
                    if asked is not None and asked.done():
                        return False
                found: SwarmNews = answer.wait()
                self.follow(found)
                if found.term > before.term and self.client is not None:  # the next placer may not have heard of it
                    agent.at(*found.placer).cast("watch", self.client)
                break
        return self._news.term > before.term

    def close(self) -> None:
        """End this process's part only."""
        self.leave()
        at_close, self._at_close = self._at_close, lambda: None
        at_close()
