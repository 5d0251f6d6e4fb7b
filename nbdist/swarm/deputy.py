"""`Deputy`: keeps a server on its worker, and makes the swarm's next placer there if the placer is lost.

::

    placer, term 1   ── orders (term 1) ──► deputy ──► server       and news of the directory, as to clients
        ✗ lost
    first deputy     makes the placer of term 2, which tells all deputies: `obey`
    placer, term 2   ── orders (term 2) ──► deputy ──► server
    placer, term 1   ── orders (term 1) ──► deputy refuses: `PlacerReplaced`      it was only frozen, and is awake again

A placer that was frozen, or that part of the world has lost, may so wake up beside its successor, and two deputies may
make a placer at the same time: the servers obey the one with the larger `Term`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.channel.locked_directory import SharedDirectory
from nbdist.errors import NbdistError, RpcTimeout, UsageError, WorkerLost
from nbdist.rpc.api import current_agent
from nbdist.rpc.named import NotOffered
from nbdist.swarm.directory.directory import SwarmNews, Term
from nbdist.swarm.directory.placing import CLOSED, PlacerReplaced, SwarmFacts
from nbdist.swarm.directory.succession import successors
from nbdist.swarm.server.neighbours import Address
from nbdist.swarm.server.server import Server

if TYPE_CHECKING:
    from nbdist.wire.messages import Record

_CALLED = ("take", "obey", "check", "load", "unload", "close", "succeed")
_ALIVE_SECONDS = 12.0  # within which a placer answers, unless it is frozen


def hold_folder(facts: SwarmFacts) -> SharedDirectory | None:
    """Keep the swarm's folder of weights, if this process sees one that goes with the swarm, until `leave`."""
    if facts.folder and facts.source.is_here:
        with contextlib.suppress(OSError):  # all who held it were lost meanwhile
            return SharedDirectory(Path(facts.folder))
    return None


class Deputy:
    """Holds a server until the placer closes it, or until the swarm has neither placer nor clients.

    The methods with a ``term`` are orders of the placer of that term; they raise PlacerReplaced if there is a newer
    one. ``succeed(facts, news, term)`` makes the placer of ``term`` in this process, and returns its crew. Any thread
    may call the methods.
    """

    def __init__(
        self, facts: SwarmFacts, name: str, news: SwarmNews, succeed: Callable[[SwarmFacts, SwarmNews, Term], Any]
    ) -> None:
        self._agent = agent = current_agent()
        self._facts, self._news, self._term = facts, news, news.term
        self._make_placer = succeed
        self._crew: Callable[[], Any] = lambda: None  # a reference to that of the placer that this deputy has made
        self.server = Server(facts.source, facts.options, name)
        self._address = Address(agent.me.name, name)
        self._folder = hold_folder(facts)
        self._lock = threading.Lock()  # guards the term and the news
        self._loading = threading.Lock()  # held while an order to load is obeyed
        self._succeeding = threading.Lock()  # held while the next placer is made
        # The agent keeps this object by these, and the object keeps the server.
        self._undo = [agent.at_close(self._end), agent.on_lost(self._on_lost)]
        agent.named.publish(self._address.deputy.name, self, *_CALLED)
        self._look()  # the placer may be lost already

    # -- orders -------------------------------------------------------------------------------

    def check(self, term: Term) -> None:
        """Do nothing but raise PlacerReplaced."""
        with self._lock:
            if term < self._term:
                raise PlacerReplaced(self._news)
            self._term = term

    def take(self, news: SwarmNews) -> None:
        """Hear the placer's news."""
        with self._lock:
            if news.term >= self._term and news.is_newer(self._news):
                self._news, self._term = news, news.term

    def obey(self, term: Term, news: SwarmNews, facts: SwarmFacts) -> tuple[SwarmNews, list[int]]:
        """Obey a new placer; return the last news of the placer before, and the blocks that are loaded."""
        self.check(term)
        before = self._news
        self.take(news)
        self._facts = facts
        self.server.read_from(facts.source)
        if (crew := self._crew()) is not None:
            crew.take(news)  # another deputy has made a newer placer
        return before, self.server.info().blocks

    def load(self, term: Term, begin: int, end: int) -> list[int]:
        """Load blocks as `Server.load` does. If the placer is replaced meanwhile, drop those that nobody knows of."""
        with self._loading:
            self.check(term)
            found = self.server.load(begin, end)
            try:
                self.check(term)
            except PlacerReplaced as error:
                own = (entry.blocks for entry in error.news.entries if entry.address == self._address)
                self.server.unload(next(own, ()))
                raise
            return found

    def unload(self, term: Term, keep: list[int]) -> list[int]:
        """Drop blocks as `Server.unload` does."""
        self.check(term)
        return self.server.unload(keep)

    def close(self, term: Term) -> None:
        """End the server, and free its memory."""
        self.check(term)
        self._end()

    def _end(self) -> None:
        undo, self._undo = self._undo, []  # it refers to this object, whose memory must be free at once
        for each in undo:
            each()
        self._agent.named.withdraw(self._address.deputy.name)
        self._agent.named.withdraw(self._address.name)
        if self._folder is not None:
            self._folder.leave()

    # -- the next placer ----------------------------------------------------------------------

    def _on_lost(self, record: Record, _: str) -> None:
        self._agent.submit(self._look)  # a listener must be quick

    def _look(self) -> None:
        """If the placer is lost, make the next one if it is this deputy's turn; end if nobody needs the server."""
        news = self._news
        if self._agent.member(self._term.incarnation) is not None:
            return
        hosts = {each.incarnation: each.host for each in self._agent.members()}
        names = {each.name for each in self._agent.members()}
        order = [each.address for each in successors(news.entries, hosts, self._facts.host)]
        if self._address not in order or not any(client.worker in names for client in news.clients):
            self._end()
        elif order[0] == self._address:
            with contextlib.suppress(NbdistError):  # such as PlacerReplaced, by a deputy that has been faster
                self.succeed(self._term)

    def succeed(self, term: Term) -> SwarmNews:
        """Make the next placer here if the one of ``term`` is lost, or does not answer; return the newest news.

        Raises UsageError if the swarm was closed.
        """
        with self._succeeding:
            if self._term <= term and self._is_placer_lost():
                own = Term(max(self._term, term).number + 1, self._agent.me.incarnation)
                self._crew = weakref.ref(self._make_placer(self._facts, self._news, own))
            return self._news

    def _is_placer_lost(self) -> bool:
        if self._agent.member(self._term.incarnation) is None:
            return True
        try:
            self._agent.at(*self._news.placer).ask("news", timeout=_ALIVE_SECONDS)
        # The last if its process is frozen: on this host, silence is no loss.
        except (NotOffered, WorkerLost, RpcTimeout) as error:
            error.with_traceback(None)  # the call refers to it, and its frames to the call and to this object
            if isinstance(error, NotOffered):
                raise UsageError(CLOSED) from None
            return True
        return False
