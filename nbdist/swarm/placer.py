"""`Placer`: makes a swarm's servers and gives blocks to them, one request after the other, for all clients.

The states of a server (`ServerEntry.state`), and the methods of `Placer` that change them::

    start, join            load is done           relieve              dismiss
    ──────────► "joining" ──────────────► "online" ───────► "draining" ─────────► "offline"
                    │                      │                    │                     ▲
                    └───────── lost ───────┴────── lost ────────┴─► "gone"            │ close
                                                                                (from any state but "gone")

`join` makes a new server on a worker whose server is "gone" or "offline". When a server is lost, `repair` lets others
load its blocks at once; `mend` does so when a client needs blocks that no server has. A *volunteer* is a worker of
``python -m nbdist worker --serve``: the placer lets it join by itself (`take_in`).

If the placer's process is lost, or does not answer, a `Deputy` makes the next placer from its copy of the directory
(`succeed`), as long as the swarm has clients.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nbdist import trace
from nbdist.amounts import size
from nbdist.channel.locked_directory import SharedDirectory
from nbdist.errors import NbdistError, NotInitialized, UsageError, WorkerLost
from nbdist.rpc import api
from nbdist.rpc.agent import Agent
from nbdist.rpc.futures import Future
from nbdist.rpc.named import NotOffered
from nbdist.rpc.references.rref import RRef
from nbdist.rpc.waits import blocking_wait
from nbdist.swarm import adapter
from nbdist.swarm.carriage import seconds_for
from nbdist.swarm.client.crew import Crew, Gone, lacks_block
from nbdist.swarm.client.journal import Journal
from nbdist.swarm.client.server_record import ServerRecord
from nbdist.swarm.deputy import Deputy, hold_folder
from nbdist.swarm.directory import routing
from nbdist.swarm.directory.directory import Directory, SwarmNews, Term, Usage
from nbdist.swarm.directory.entry import ServerEntry, orphans
from nbdist.swarm.directory.placing import CLOSED, FarPlacer, PlacerReplaced, SwarmFacts
from nbdist.swarm.directory.routing import NoRoute, named
from nbdist.swarm.directory.succession import settled
from nbdist.swarm.policy import Policy
from nbdist.swarm.server.neighbours import Address
from nbdist.swarm.server.server import Options
from nbdist.swarm.server.sources import offer
from nbdist.swarm.weakly import weakly

if TYPE_CHECKING:
    from nbdist.wire.messages import Record

_numbers = itertools.count()
_LOADING_SECONDS = 300.0  # for loading blocks, besides the time of a step: at first, the worker imports transformers
# The shortest time limit for a new worker to answer: importing transformers delays its other threads.
_NEW_WORKER_SECONDS = 15.0
_POLL = 0.05  # seconds between two looks at a worker that another client lets join
_OBEY_SECONDS = 10.0  # for a server to answer a new placer
_NOBODY = (WorkerLost, NotOffered)  # the errors of a client that is gone
# The methods that other clients call; the rest is for the process of the placer.
_CALLED = (
    *("facts", "watch", "leave", "news", "lacks", "note_usage", "mend"),
    *("join", "relieve", "dismiss", "shift", "unload", "kill"),
)
_FOR_CLIENTS = ("news", "mend")  # those on other hosts
VOLUNTEER = "NBDIST_SERVE"
"""The environment variable of the workers of ``python -m nbdist worker --serve``."""


def describe(checkpoint: adapter.Checkpoint, options: Options, policy: Policy, folder: SharedDirectory) -> SwarmFacts:
    """Return the facts of a new swarm, and let its servers read the checkpoint here."""
    skeleton = adapter.build(checkpoint.config)
    path = adapter.find_layers(skeleton)
    sizes = [checkpoint.nbytes(f"{path}.{n}.") for n in range(len(skeleton.get_submodule(path)))]
    own = str(folder.path) if folder.path == checkpoint.folder else ""  # else the weights are the user's own file
    return SwarmFacts(offer(checkpoint), sizes, options, policy, api.current_agent().me.host, own)


def succeed(facts: SwarmFacts, news: SwarmNews, term: Term) -> Crew:
    """Make the placer that follows the one of ``news``, in this process; return its crew, which the agent keeps."""
    checkpoint, folder = None, hold_folder(facts)
    if facts.source.is_here:
        checkpoint = facts.source.open()
        facts = facts._replace(source=offer(checkpoint), host=api.current_agent().me.host)
    placer = Placer(facts, checkpoint, Journal(), folder, term, news.placer.name)
    crew = placer.make_crew()
    # Not the deputy, whose server may leave.
    placer.let_go = api.current_agent().at_close(partial(setattr, crew, "closed", True))
    placer.take_over(news)
    return crew


class Placer:
    """The placer of a swarm, in the process that has called `nbdist.swarm.serve`, or its successor.

    Any thread may use it. ``checkpoint`` is the one that servers may read from this process; None if it sees no file.
    """

    def __init__(
        self,
        facts: SwarmFacts,
        checkpoint: adapter.Checkpoint | None,
        journal: Journal,
        folder: SharedDirectory | None = None,
        term: Term | None = None,
        name: str = "",
    ) -> None:
        self._agent = agent = api.current_agent()
        self._facts = facts
        self._checkpoint = checkpoint  # kept, so that it can be read
        self._journal = journal
        self.let_go: Callable[[], object] = lambda: None  # ends what keeps a successor
        self._folder = folder  # that of the weights, which servers load from it
        # Goes with every order, so that servers can refuse those of a placer that has been replaced.
        self.term = Term(1, agent.me.incarnation) if term is None else term
        self.address = Address(agent.me.name, name or f"swarm {agent.me.incarnation:x}.{next(_numbers)}")
        self._directory = Directory(self.address, self.term)
        # Servers that load their first blocks. The reference can be called before the server exists, and has a name.
        self._made: dict[str, RRef[Deputy]] = {}
        self._repaired: Sequence[ServerEntry] = ()  # the entries at the last `repair`, so that nothing is tried twice
        # Held by a thread that gives blocks to servers. Take a session's lock before it.
        self._arranging = threading.RLock()
        self._welcoming = threading.Lock()  # held while a volunteer joins: the next one must know which blocks it has
        agent.named.publish(self.address.name, self, *_CALLED, clients=_FOR_CLIENTS)
        for end in (
            weakref.finalize(self, agent.on_lost(weakly(self._on_lost))),
            weakref.finalize(self, _close_servers, agent, self._directory, self.term, self._made),
        ):
            end.atexit = False  # a process that exits without `close` leaves the swarm to its other clients

    def make_crew(self) -> Crew:
        """Return the crew of the client in this process. The swarm ends with it: it alone keeps this placer."""
        crew = Crew(self, self._facts, self._journal)
        self._crew = weakref.ref(crew)
        # Not with this object, which would be a cycle: the swarm ends when nobody uses it.
        for listener in (crew.take, self._repair_soon):
            self._directory.watch(weakly(listener))
        return crew

    @property
    def crew(self) -> Crew:
        """The servers, as this process knows them."""
        if (crew := self._crew()) is None:
            raise UsageError(CLOSED)
        return crew

    # -- what clients hear and tell ------------------------------------------------------------

    def facts(self) -> SwarmFacts:
        """Return the facts of the swarm for another client, which spends no points."""
        return self._facts._replace(policy=replace(self._facts.policy, spend=Policy.spend))

    def watch(self, watcher: Address) -> None:
        """Tell a client of the directory's changes from now on, until it is gone."""
        self._directory.enter(watcher)
        self._keep_told(watcher)

    def leave(self, client: Address) -> None:
        """Tell a client nothing more; close the swarm with its last client."""
        if self._directory.leave(client):
            self.close()

    def _keep_told(self, watcher: Address) -> None:
        gone: list[Address] = []  # the watcher, once a call has found nobody there
        me, known, agent = weakref.ref(self), self._crew, self._agent  # as in `make_crew`

        def note(done: Future[Any]) -> None:
            if isinstance(done.exception(), _NOBODY):
                gone.append(watcher)
                if (placer := me()) is not None:
                    placer.leave(watcher)

        def tell(news: SwarmNews) -> bool:
            if gone or agent.closed or (crew := known()) is None:
                return False
            try:
                with crew.working():
                    # No variable holds the future: its error keeps this frame, and all above it.
                    agent.at(*watcher).call("take", news).add_done_callback(note)
            except NotInitialized:  # RPC has ended in this process
                return False
            return True

        self._directory.watch(tell)

    def follow(self, news: SwarmNews) -> Placer | FarPlacer:
        """Hear news; if they are of a newer placer, step down, and return that one."""
        if news.term <= self.term:
            return self
        if self._agent.named.find(self.address.name) is self:
            self._agent.named.withdraw(self.address.name)
        self._journal.tell(f"{news.placer.worker} has become the placer, as this process did not answer")
        self.stop()
        found = FarPlacer(news.placer, lambda: None, self._facts.host).follow(news)
        found.client = self.crew.address
        weakref.finalize(self.crew, found.leave).atexit = False
        return found

    def take_over(self, before: SwarmNews) -> None:
        """Take the servers over from the placer of the news ``before``, which is lost."""
        crew = self.crew
        with self._arranging, crew.working():
            usage = {client: each for client, each in before.usage.items() if self._agent.member(client) is not None}
            self._directory.reset(before.entries, before.clients, usage)
            own = self.news()
            for entry in own.entries:
                if self._agent.member(entry.incarnation) is None:  # nobody has told this crew
                    crew.lose(entry.incarnation, "died")
            asked = [
                (member, self._order(member, "obey", own, self.facts(), timeout=_OBEY_SECONDS)) for member in crew.there
            ]
            loaded = {}
            while asked:  # no variable holds a future that may have failed: its error keeps this frame
                member = asked[-1][0]
                with contextlib.suppress(Gone):
                    known, loaded[member.address] = crew.answer(*asked.pop())
                    before = known if known.is_newer(before) and known.term < self.term else before
            self._directory.reset(settled(before.entries, loaded), before.clients)
            for member in crew.members:
                if member.why_lost:  # noticed while the servers were asked
                    self.lost(member.entry, member.why_lost)
                elif member.there:
                    self._keep_told(member.address.deputy)
                    if not {*member.blocks}.issuperset(loaded.get(member.address, ())):
                        with contextlib.suppress(Gone):
                            self._answer(member, "unload", list(member.blocks))
            for entry in before.entries:
                if entry.state == "joining":  # the placer before may be alive, and load blocks there
                    self._release(entry)
            for client in self.news().clients:
                self._keep_told(client)  # until it turns out that nobody is there
        self.welcome()

    def news(self) -> SwarmNews:
        """Return what the directory has now."""
        return self._directory.news()

    def _on_lost(self, record: Record, _: str) -> None:
        for client in self.news().clients:
            if client.worker == record.name:
                self._agent.submit(partial(self.leave, client))

    def lost(self, entry: ServerEntry, why: str) -> None:
        """Mark a server as gone."""
        self._directory.change(entry, lambda now: now if now.state in ("gone", "offline") else now.rested("gone", why))

    def lacks(self, entry: ServerEntry, blocks: Sequence[int]) -> None:
        """Note that a server does not have blocks which it should have, so that no route leads there."""
        self._directory.change(
            entry, lambda now: now._replace(blocks=tuple(each for each in now.blocks if each not in blocks))
        )

    def note_usage(self, client: int, usage: Usage) -> None:
        """Note what a client has of the swarm, for the maps of all clients."""
        self._directory.note_usage(client, usage)

    # -- who has what -------------------------------------------------------------------------

    def start(self, workers: Sequence[int | str], spans: Sequence[tuple[int, int]], tell: trace.Steps) -> None:
        """Make a server on each worker and load its span there, all at the same time; ``tell`` shows the progress.

        If a worker fails, raises the error of `_wait_until_loaded`. The servers that have been waited for by then stay.
        """
        made = [(self._make_server(worker), span) for worker, span in zip(workers, spans, strict=False)]
        with self._joining([entry for entry, _ in made]) as members:
            asked = [(member, self._send_load(member, *span)) for member, (_, span) in zip(members, made, strict=True)]
            for number, (member, answer) in enumerate(asked):
                tell(f"serve: {number} of {len(asked)} workers have loaded their blocks; {member.name} loads ...")
                self._wait_until_loaded(member, answer, *spans[number])

    def join(self, worker: str, begin: int | None, end: int | None) -> None:
        """Load these blocks on a worker, in addition to those that it serves.

        By default, the blocks that it served before, or all. If the worker has no online server, it gets a new one.
        Raises the errors of `_wait_until_loaded`.
        """
        tell = trace.steps()
        with self.crew.working(), contextlib.ExitStack() as joining:
            while True:
                with self._arranging:  # another client may let the same worker join
                    known = self._directory.find(worker)
                    if known is None or known.state not in ("joining", "online"):
                        (member,) = joining.enter_context(self._joining([self._make_server(worker)]))
                        break
                    if known.state == "online":
                        member = self.crew.member(worker)
                        break
                with blocking_wait():
                    time.sleep(_POLL)
            spans = [(begin or 0, len(self._facts.sizes) if end is None else end)]
            if begin is None and end is None and known is not None and not known.there and known.had:
                spans = [(run.start, run.stop) for run in routing.runs_of(known.had)]
            for span in spans:
                nbytes = size(sum(self._facts.sizes[slice(*span)]))
                tell(f"join: {member.name} loads blocks {span[0]} to {span[1] - 1}, {nbytes} ...")
                self._wait_until_loaded(member, self._send_load(member, *span), *span)
        tell(f"join: {member.name} serves {named(member.blocks)}.")

    def welcome(self) -> None:
        """Let workers serve that were started with ``--serve``: those that are here now, and those that come."""
        weakref.finalize(self, self._agent.on_joined(weakly(self._on_joined))).atexit = False
        for record in self._agent.members():
            self._on_joined(record)

    def _on_joined(self, record: Record) -> None:
        self._agent.submit(partial(weakly(self.take_in), record))

    def take_in(self, record: Record) -> None:
        """If a worker is a volunteer, and has not served yet, give it the blocks that need a server most.

        If it cannot load them, the log says why.
        """
        with contextlib.suppress(Exception):  # of loading, any: `_joining` has told it
            if not self._agent.call(record.name, os.getenv, VOLUNTEER).wait():
                return
            with self._welcoming, self.crew.working():
                self.crew.check_open()
                known = self._directory.find(record.name)
                if known is None or known.incarnation != record.incarnation:
                    offers = {name: member.offer() for name, member in self.crew.serving().items()}
                    self.join(record.name, *routing.needed(offers, self._facts.sizes, self._facts.policy.room))

    def _make_server(self, worker: int | str) -> ServerEntry:
        """Make a new server on a worker, without waiting for it, and return its entry, which `_joining` adds."""
        record = self._agent.find(worker)
        for member in self.crew.serving().values():  # a new server would not know that this placer has been replaced
            with contextlib.suppress(Gone):
                self._answer(member, "check")
                break
        address = Address(record.name, f"server {self._agent.me.incarnation}.{next(_numbers)}")
        arguments = self.facts(), address.name, self.news(), succeed
        self._made[address.name] = api.remote(record.name, Deputy, arguments)
        return ServerEntry(record.name, record.incarnation, address)

    @contextlib.contextmanager
    def _joining(self, entries: Sequence[ServerEntry]) -> Iterator[list[ServerRecord]]:
        """Return a context manager for new servers: it adds their entries, in the state "joining", to the directory.

        They replace older servers of the same workers. If the ``with`` block fails, the servers that are still joining
        become "gone".
        """
        members: list[ServerRecord] = []
        try:
            for entry in entries:
                before = self._directory.find(entry.name)
                self._directory.add(entry)
                members.append(self.crew.member(entry.name))
                if before is not None:
                    self._release(before)
            yield members
        except BaseException as error:  # also Ctrl-C: `way` waits for a joining server without a limit
            for member in members:
                if member.state == "joining":
                    self.crew.forsake(member, error)
                    self._release(member.entry)
            raise

    def _send_load(self, member: ServerRecord, begin: int, end: int) -> Future[list[int]]:
        """Ask a server to load the blocks from ``begin`` to before ``end``; `Crew.outwait` waits for the future."""
        record = self._agent.member(member.incarnation)
        far = record is not None and record.host != self._agent.me.host  # it may have to read them from this process
        extra = _LOADING_SECONDS + (seconds_for(sum(self._facts.sizes)) if far else 0.0)  # others may load, too
        return self._order(member, "load", begin, end, timeout=self._facts.policy.step_timeout + extra)

    def _order(self, member: ServerRecord, method: str, *arguments: Any, timeout: float) -> Future[Any]:
        """Call a method of a server's deputy that only the newest placer may call."""
        if (made := self._made.get(member.address.name)) is not None:
            asked: Future[Any] = getattr(made.rpc_async(timeout), method)(self.term, *arguments)
            return asked
        return self._agent.at(*member.address.deputy).call(method, self.term, *arguments, timeout=timeout)

    def _answer(self, member: ServerRecord, method: str, *arguments: Any) -> Any:
        """Give an order and wait for the answer, as `Crew.ask` does."""
        return self.crew.answer(
            member, self._order(member, method, *arguments, timeout=self._facts.policy.step_timeout)
        )

    def _wait_until_loaded(self, member: ServerRecord, asked: Future[Any], begin: int, end: int) -> None:
        """Wait until a server has loaded these blocks, and let it serve them; for a new server, within `_joining`.

        Raises WorkerLost if the worker died, UsageError if the swarm was closed meanwhile, `Gone` if the server has
        left meanwhile or does not answer, or the error of loading.
        """
        crew = self.crew
        try:
            crew.outwait(member, asked, max(self._facts.policy.step_timeout, _NEW_WORKER_SECONDS))
        except Exception as error:  # the server's: loading may raise anything
            crew.check_open()  # if the swarm was closed meanwhile, that is the cause
            if isinstance(error, Gone) and isinstance(error.__cause__, WorkerLost):
                raise error.__cause__ from None  # Gone is for callers that can use another server instead
            raise
        if self._made.pop(member.address.name, None) is not None:  # it has its name now
            self._keep_told(member.address.deputy)
        self._give(member, begin, end, "joining", "online")
        if member.state != "online":
            crew.check_open()  # if the swarm was closed meanwhile, that is the cause
            raise Gone(
                f"{member.name} has loaded its blocks, but is {member.state} meanwhile: it left, or died. Once it "
                "runs, let it `join` again"
            )
        self._journal.tell(f"{member.name} serves {named(member.blocks)}")

    def mend(self, begin: int, end: int, without: Sequence[str] = ()) -> None:
        """Let servers load the blocks of the range that no server has, but for those on the workers ``without``.

        Raises `NoRoute` if none can, or `Gone` if one fails, which is banned or lost then: a second call uses others.
        """
        crew = self.crew
        with self._arranging, crew.working():
            # Another client may have had the blocks loaded meanwhile.
            members = {name: member for name, member in crew.serving().items() if name not in without}
            if not lacks_block(members, begin, end):
                return
            blocks = {name: member.blocks for name, member in members.items()}
            room = dict.fromkeys(members, self._facts.policy.room)
            try:
                spans = routing.assign(blocks, begin, end, self._facts.sizes, room)
            except NoRoute as error:
                raise NoRoute("; ".join([str(error), *crew.why_not_serving()])) from None
            for span in spans:  # a quick call first: noticing that a server hangs must not take as long as loading may
                crew.ask(members[span.server], "info")
            asked = [self._send_load(members[span.server], span.begin, span.end) for span in spans]
            for span, answer in zip(spans, asked, strict=True):
                member, wanted = members[span.server], named(range(span.begin, span.end))
                try:
                    crew.outwait(member, answer)
                except (Gone, PlacerReplaced):
                    raise
                except Exception as error:  # such as MemoryError
                    crew.ban(member, f"could not take {wanted}: {type(error).__name__}: {error}")
                    raise Gone(f"{member.name}: {error}") from error
                self._give(member, span.begin, span.end, "online")
                self._journal.tell(f"{member.name} takes {wanted}")

    def _mend_all(self, begin: int, end: int, without: Sequence[str] = ()) -> None:
        """Call `mend` until no server fails."""
        while True:
            with contextlib.suppress(Gone):
                return self.mend(begin, end, without)

    def _repair_soon(self, news: SwarmNews) -> None:
        """Let a thread of the agent `repair` the swarm if that is needed. Must be quick: the directory calls it."""
        if news.entries != self._repaired and orphans(news.entries, self._living()):
            self._repaired = news.entries
            self._agent.submit(weakly(self.repair))

    def repair(self) -> None:
        """Let servers load the `orphans`, so that the next token need not wait. The log names those that none can load.

        They stay free until the servers change, or a client asks (`mend`). Raises nothing if the swarm was closed, or
        has another placer.
        """
        # One after the other: two deaths at once make one repair, or two.
        with contextlib.suppress(NbdistError), self._arranging, self.crew.working():
            for run in routing.runs_of(orphans(self._directory.all(), self._living())):
                full = self._full()
                try:
                    self._mend_all(run.start, run.stop, full)
                except NoRoute as error:
                    waiting = f"; sessions wait for cache memory on {', '.join(full)}" if full else ""
                    self._journal.tell(f"no server takes {named(run)}: {error}{waiting}")

    def _living(self) -> dict[str, int]:
        return {record.name: record.incarnation for record in self._agent.members()}

    def _full(self) -> list[str]:
        """Return the workers on which sessions wait for cache memory: with more blocks, they would wait longer."""
        full = []
        for member in self.crew.serving().values() if self._facts.options.cache_bytes is not None else ():
            with contextlib.suppress(Gone):
                if self.crew.ask(member, "info").wanting:
                    full.append(member.name)
        return full

    def _give(self, member: ServerRecord, begin: int, end: int, *states: str) -> None:
        """Let a server that is in one of these states serve these blocks, too: it may have others, not freed yet."""

        def give(now: ServerEntry) -> ServerEntry:
            blocks = tuple(sorted({*now.blocks, *range(begin, end)}))
            return now._replace(state="online", blocks=blocks) if now.state in states else now

        self._directory.change(member.entry, give)

    def relieve(self, worker: str) -> Address:
        """Let other servers load a server's blocks, and send no new work to it: its state becomes "draining".

        Returns the server, for `dismiss`. If no server can take its blocks, it is online again, and this raises
        `NoRoute`. Raises UsageError if the server is not online or draining.
        """
        with self._arranging, self.crew.working():
            member = self.crew.member(worker)
            if not member.there:
                raise UsageError(
                    f"{member.name} is {member.state}, so it cannot leave now: only an online or draining one can"
                )
            # It is draining already if an interrupted call is repeated.
            self._directory.change(member.entry, lambda now: now._replace(state="draining") if now.there else now)
            self._journal.tell(f"{member.name} is about to leave")
            try:
                self._mend_all(0, len(self._facts.sizes))
            except BaseException:  # also Ctrl-C: nobody else has all of its blocks, so it goes on serving
                # Unless it died meanwhile.
                self._directory.change(
                    member.entry, lambda now: now._replace(state="online") if now.state == "draining" else now
                )
                raise
            return member.address

    def dismiss(self, server: Address) -> None:
        """Remove a server that has been relieved: it becomes "offline", and frees its blocks and caches.

        Raises UsageError if it serves again, since another client has called `leave` in vain, or `join`.
        """
        with self._arranging, self.crew.working():
            member = self.crew.member(server.worker)
            if member.address != server or member.state != "draining":
                raise UsageError(
                    f"{server.worker} serves again, as another client has asked meanwhile: call leave again"
                )
            with contextlib.suppress(Gone):
                self._answer(member, "close")
            self._directory.change(member.entry, lambda now: now.rested("offline"))
            self._journal.tell(f"{member.name} has left")

    def _release(self, entry: ServerEntry) -> None:
        _close_server(self._agent, entry, self.term, self._made)

    def shift(self, begin: int, end: int, worker: str) -> list[str]:
        """Load these blocks on a server, and take them away from all others; return the workers of those.

        If the server fails (`Gone`) or cannot load the blocks, raises that error, and no server loses a block.
        """
        relieved = []
        with self._arranging, self.crew.working():
            member = self.crew.member(worker)
            if member.state != "online":
                raise UsageError(
                    f"{worker} is {member.state}, so it takes no blocks: another client lets it leave or join"
                )
            self.crew.outwait(member, self._send_load(member, begin, end))
            moved = {*range(begin, end)}

            def shifted(now: ServerEntry) -> ServerEntry:
                if now.address == member.address and now.there:
                    return now._replace(blocks=tuple(sorted(moved.union(now.blocks))))
                if moved.intersection(now.blocks):  # the weights stay until `unload`: sessions move
                    relieved.append(now.name)
                return now._replace(blocks=tuple(number for number in now.blocks if number not in moved))

            # In one step: if this process is lost in between, no block is served twice.
            self._directory.change_all(shifted)
            self._journal.tell(f"{member.name} takes {named(range(begin, end))}")
        return relieved

    def unload(self, workers: Sequence[str]) -> None:
        """Free the weights of the blocks that these servers no longer serve. A server that is lost is skipped."""
        with self._arranging, self.crew.working():
            for member in self.crew.there:
                if member.name in workers:
                    with contextlib.suppress(Gone):
                        self._answer(member, "unload", list(member.blocks))

    def kill(self, worker: str) -> None:
        """Kill a worker with SIGKILL, without waiting; a worker on another host kills itself.

        Raises UsageError if it serves no blocks, is gone already, or is the process of the placer.
        """
        with self.crew.working():
            name, incarnation = worker, self.crew.member(worker).incarnation
            if (record := self._agent.member(incarnation)) is None:
                raise UsageError(f"{name} is gone already")
            here = record.host == self._agent.me.host
            if here and record.pid == os.getpid():
                raise UsageError(f"{name} is this process: call leave({name!r}) to take it out of the swarm")
            self._journal.tell(f"{name} is killed")
            if here:
                os.kill(record.pid, signal.SIGKILL)
            else:
                api.rpc_async(name, _die)

    def close(self) -> None:
        """Close all servers, so that their workers free blocks and caches. A second call does nothing.

        The folder of weights goes with the last process that holds it (`SharedDirectory`).
        """
        self._agent.named.withdraw(self._facts.source.name)
        self._agent.named.withdraw(self.address.name)
        # Before the states change, so that a second call repeats it after an interrupt.
        _close_servers(self._agent, self._directory, self.term, self._made)
        self._directory.change_all(lambda now: now if now.state == "gone" else now.rested("offline"))
        self.stop()

    def stop(self) -> None:
        """End this placer, and leave the servers to another one."""
        let_go, self.let_go = self.let_go, lambda: None  # it refers to the crew, and so to this object
        let_go()
        if self._folder is not None:
            self._folder.leave()


def _close_servers(agent: Agent, directory: Directory, term: Term, made: dict[str, RRef[Deputy]]) -> None:
    for entry in directory.all():
        if entry.state != "offline":  # one that is gone for the swarm may run
            _close_server(agent, entry, term, made)


def _close_server(agent: Agent, entry: ServerEntry, term: Term, made: dict[str, RRef[Deputy]]) -> None:
    with contextlib.suppress(NbdistError), agent.activate():  # the worker may be gone
        if (server := made.pop(entry.address.name, None)) is not None:
            server.rpc_async().close(term)  # once the server exists
        else:
            agent.at(*entry.address.deputy).cast("close", term)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)  # runs on the worker that `Placer.kill` kills
