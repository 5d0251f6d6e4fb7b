"""`Placing`: what a client asks of a swarm's one placer, which is in its own process or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from nbdist.errors import UsageError, WorkerLost
from nbdist.rpc.api import current_agent
from nbdist.rpc.named import NotOffered
from nbdist.swarm.directory.directory import News
from nbdist.swarm.directory.entry import ServerEntry
from nbdist.swarm.policy import Policy
from nbdist.swarm.server.neighbours import Address
from nbdist.swarm.server.server import Options
from nbdist.swarm.server.sources import Source

CLOSED = "this swarm is closed: call nbdist.swarm.serve again"


class SwarmFacts(NamedTuple):
    """The facts of a swarm that do not change."""

    source: Source
    sizes: Sequence[int]  # bytes of each block
    options: Options
    policy: Policy


class Placing(Protocol):
    """The part of a placer, near or far, that calls and routes need."""

    def news(self) -> News:
        """Return what the directory has now."""

    def lost(self, entry: ServerEntry, why: str) -> None:
        """Hear that a client has lost a server."""

    def lacks(self, entry: ServerEntry, blocks: Sequence[int]) -> None:
        """Hear that a server does not have blocks which it should have."""

    def mend(self, begin: int, end: int, without: Sequence[str] = ()) -> None:
        """Let servers load the blocks of the range that no server has, but for those on the workers ``without``.

        Raises `NoRoute` if none can, and `Gone` if one fails, which is banned or lost then: ask again.
        """


class FarPlacer:
    """The placer of a swarm in another process. `nbdist.swarm.placer.Placer` describes the methods."""

    def __init__(self, address: Address, at_close: Callable[[], object]) -> None:
        self.address = address
        self._at_close = at_close

    def facts(self) -> SwarmFacts:
        """Return the facts of the swarm."""
        facts: SwarmFacts = self._ask("facts", timeout=60.0)
        return facts

    def watch(self, watcher: Address) -> None:
        """Have ``watcher.take(news)`` called when the directory changes."""
        self._ask("watch", watcher, timeout=60.0)

    def news(self) -> News:
        """Ask what the directory has now."""
        news: News = self._ask("news", timeout=60.0)
        return news

    def lost(self, entry: ServerEntry, why: str) -> None:
        """Do nothing: the placer's agent hears of deaths, too."""

    def lacks(self, entry: ServerEntry, blocks: Sequence[int]) -> None:
        """Tell the placer."""
        self._ask("lacks", entry, tuple(blocks))

    def mend(self, begin: int, end: int, without: Sequence[str] = ()) -> None:
        """Ask the placer to, and wait."""
        self._ask("mend", begin, end, tuple(without))

    def join(self, worker: str, begin: int | None, end: int | None) -> None:
        """Ask the placer to, and wait."""
        self._ask("join", worker, begin, end)

    def relieve(self, worker: str) -> Address:
        """Ask the placer to, and wait; return its answer."""
        server: Address = self._ask("relieve", worker)
        return server

    def dismiss(self, server: Address) -> None:
        """Ask the placer to, and wait."""
        self._ask("dismiss", server)

    def shift(self, begin: int, end: int, worker: str) -> list[str]:
        """Ask the placer to, and wait; return its answer."""
        relieved: list[str] = self._ask("shift", begin, end, worker)
        return relieved

    def unload(self, workers: Sequence[str]) -> None:
        """Ask the placer to, and wait."""
        self._ask("unload", tuple(workers))

    def kill(self, worker: str) -> None:
        """Ask the placer to."""
        self._ask("kill", worker)

    def _ask(self, method: str, *arguments: Any, timeout: float = 0.0) -> Any:
        # Without a limit by default: servers load blocks, and the placer's process is known to be alive.
        try:
            return current_agent().at(*self.address).ask(method, *arguments, timeout=timeout)
        except NotOffered:
            raise UsageError(CLOSED) from None
        except WorkerLost as error:
            if any(each.name == self.address.worker for each in current_agent().members()):
                raise  # of a worker that was to load blocks
            raise WorkerLost(
                "the process that served this swarm is gone, and the swarm with it: serve it again"
            ) from error

    def close(self) -> None:
        """End this process's part only."""
        at_close, self._at_close = self._at_close, lambda: None
        at_close()
