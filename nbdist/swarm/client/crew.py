"""The client's side of all servers: knows them, finds routes, calls them, and notices when one is lost.

The *crew* is all servers of a swarm as one client knows them, a *member* its record of one
(`nbdist.swarm.client.server_record`), a *way* a route with its members. Which servers there are, and what they have,
the crew reads from the swarm's directory; it asks the swarm's placer to give blocks to servers
(`nbdist.swarm.directory.placing`). When a call fails, the crew notes that the server is lost (`lose`) or does not
answer (`ban`), and raises `Gone`; the caller then asks for a new route. For blocks that no server has any more,
`Crew.way` has the placer mend that.

A banned server stays "online", but gets no work from this client for some seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nbdist.autograd.api import recorder
from nbdist.errors import Interrupted, NbdistError, RpcTimeout, UsageError, WorkerLost
from nbdist.rpc import api
from nbdist.rpc.futures import Future
from nbdist.rpc.named import NotOffered
from nbdist.rpc.waits import blocking_wait
from nbdist.swarm import adapter
from nbdist.swarm.carriage import carriage
from nbdist.swarm.client.journal import Journal
from nbdist.swarm.client.server_record import ServerRecord
from nbdist.swarm.directory import routing
from nbdist.swarm.directory.directory import SwarmNews, Usage
from nbdist.swarm.directory.placing import CLOSED, PlacerReplaced, Placing, SwarmFacts
from nbdist.swarm.directory.routing import NoRoute, Span, named
from nbdist.swarm.server.neighbours import Address
from nbdist.swarm.server.server import NotHere
from nbdist.swarm.server.session_caches import NoSession, StepReply
from nbdist.swarm.stacking import DEFAULT_LAYOUT, StackInput, StackLayout
from nbdist.swarm.weakly import weakly

if TYPE_CHECKING:
    from nbdist.wire.messages import Record

_FIRST_BAN_SECONDS = 5.0  # `ServerRecord.ban` doubles them with each failure
_HALTED_SECONDS = 0.25  # between two looks whether the result of a long wait is still wanted
_numbers = itertools.count()
_LATER = ("step",)  # the methods of a server that return a future of their result

Halted = Callable[[], bool] | None
"""Returns whether nobody wants a text any more. Waits for cache memory end then."""


class Gone(NbdistError):
    """A server died, did not answer, or no longer has the session or block. The caller should ask for another route."""


class Crew:
    """All servers of a swarm, including those that are gone, as one client knows them.

    Any thread may use it. Call methods that call servers within `working`.
    """

    def __init__(self, placing: Placing, facts: SwarmFacts, journal: Journal, outside: Any = None) -> None:
        """Begin without servers; ``outside`` stands for the agent of a client on another host, None for ours."""
        self.sizes = facts.sizes  # bytes of each block
        # Says which arguments of a block have rows for each sequence; `DEFAULT_LAYOUT` until a model has found out.
        self.layout: StackLayout = DEFAULT_LAYOUT
        self.options = facts.options
        self.policy = facts.policy
        self.ban_seconds = _FIRST_BAN_SECONDS  # of the first ban of a server
        self.placing = placing  # another one once the swarm has another placer
        self._journal = journal
        self._members: dict[str, ServerRecord] = {}  # by name of the worker, in the order in which they joined
        self.usage: Mapping[int, Usage] = {}  # what clients had when they last told the directory
        self.news: SwarmNews | None = None  # the last news, as `_members` has it
        self._choose = random.Random(0)
        # Guards the members and their entries; notified when the directory has changed.
        self._changed = threading.Condition(threading.RLock())
        self.closed = False
        self.address: Address | None = None  # at which placers tell it news
        self.is_member = outside is None
        self._agent = outside or api.current_agent()
        self.name = self._agent.me.name
        self.incarnation = self._agent.me.incarnation  # when a server loses this agent, it drops this client's sessions
        weakref.finalize(self, self._agent.on_lost(weakly(self._on_lost))).atexit = False

    # -- who there is -------------------------------------------------------------------------

    def publish(self) -> Address:
        """Let placers tell this crew news, by `take`; return its address."""
        self.address = Address(self._agent.me.name, f"crew {self.incarnation}.{next(_numbers)}")
        self._agent.named.publish(self.address.name, self, "take")
        return self.address

    def take(self, news: SwarmNews) -> None:
        """Take what the directory has now, unless this crew knows newer news."""
        with self._changed:
            if not news.is_newer(self.news):
                return
            self.news, known, self._members, self.usage = news, self._members, {}, news.usage
            for entry in news.entries:
                member = self._members[entry.name] = known.get(entry.name) or ServerRecord(entry)
                if member.address != entry.address:  # a newer server of the same worker
                    member = self._members[entry.name] = ServerRecord(entry)
                member.changed(entry)
            self.placing = self.placing.follow(news)
            self._changed.notify_all()
        self._journal.news()

    def _read(self) -> None:
        self.take(self.placing.news())  # which may overtake the news that the directory sends

    @property
    def members(self) -> list[ServerRecord]:
        """All members, including those that are gone. If a worker has had several, the last one."""
        with self._changed:
            return list(self._members.values())

    @property
    def there(self) -> list[ServerRecord]:
        """The members that can be called: online, banned or draining."""
        return [member for member in self.members if member.there]

    def member(self, worker: int | str) -> ServerRecord:
        """Return the member on a worker, given by name or id; raise UsageError if no server serves there (any more)."""
        name = self.name_of(worker)
        with self._changed:
            found = self._members.get(name)
        if found is None or found.state in ("gone", "offline"):
            raise UsageError(f"{name} serves no blocks: it never joined this swarm, has left it, or is gone")
        return found

    def name_of(self, worker: int | str) -> str:
        """Return the name of a worker that is given by name or id; for an unknown id, the id as a text."""
        if isinstance(worker, str):
            return worker
        known = self._agent.members()
        return next((record.name for record in known if record.id == worker), str(worker))

    def lose(self, incarnation: int, why: object) -> None:
        """Mark the server on the worker with this incarnation, if there is one, as "gone", and log its blocks.

        The logged reason is ``why``, unless the agent knows one. The server's sessions move when their next step finds
        it gone. The agent calls this when it loses a worker.
        """
        member = next((each for each in self.members if each.incarnation == incarnation), None)
        if member is not None:
            self.forsake(member, why)
        if incarnation in self.usage:
            self.note_usage(incarnation, {})

    def _on_lost(self, record: Record, why: str) -> None:
        self.lose(record.incarnation, why)

    def forsake(self, member: ServerRecord, why: object) -> None:
        """Mark one server as "gone", as `lose` does, after a call to it has failed."""
        with self._changed:
            # This record only: the server may have left, while a newer one of the same worker is healthy.
            if member.state in ("gone", "offline"):
                return
            # Prefer the agent's reason: it does not depend on which thread notices the death first.
            why = str(self._agent.fate(member.incarnation) or why)
            blocks = member.blocks
            member.why_lost = why.splitlines()[0] if why else "lost"
        self.placing.lost(member.entry, member.why_lost)
        self._journal.tell(f"{member.name}, which had {named(blocks)}, is gone: {member.why_lost}")

    def ban(self, member: ServerRecord, why: str = "") -> None:
        """Stop calling a server for a while; ``why`` completes its name in the log."""
        with self._changed:
            if not member.there or member.is_banned(time.monotonic()):
                return  # a joining server has no callers yet; a banned one has failed another call at the same time
            seconds = member.ban(time.monotonic(), self.ban_seconds, why or "did not answer")
        told = why or f"did not answer for {self.policy.step_timeout:g} s"
        self._journal.tell(f"{member.name} {told}: it is left alone for {seconds:g} s")

    def note_usage(self, client: int, usage: Usage) -> None:
        """Tell the directory what the client with this incarnation has now, without waiting."""
        with self.working():
            self.placing.note_usage(client, usage)

    @property
    def ended(self) -> bool:
        """True once the swarm was closed or the agent has ended."""
        return self.closed or self._agent.closed

    def check_open(self) -> None:
        """Raise UsageError if the swarm is closed."""
        if self.closed:
            raise UsageError(CLOSED)

    # -- ways ---------------------------------------------------------------------------------

    def way(self, begin: int, end: int, *, spread: bool = False) -> list[tuple[Span, ServerRecord]]:
        """Return a route through these blocks: the fastest one, or a random one that spreads the load (``spread``).

        If no server has a block, a server loads it first. If no server can load it, waits while a worker is joining,
        but at least ``route_timeout`` seconds; then raises `NoRoute`. Raises UsageError if the swarm is closed.
        """
        began = time.monotonic()
        find = partial(routing.spread, choose=self._choose) if spread else routing.route
        while True:
            self.check_open()
            members = self.serving()
            if lacks_block(members, begin, end):
                # Also those that only this client has lost.
                away = [each.name for each in self.members if each.entry.there and each.name not in members]
                try:
                    self.placing.mend(begin, end, away)
                except (Gone, PlacerReplaced):
                    pass  # it is banned or lost now: the next time, others are asked
                except NoRoute:
                    if not self._may_come(began):
                        raise
                self._read()
                continue
            offers = {name: member.offer() for name, member in members.items()}
            try:
                spans = find(offers, begin, end)
            except NoRoute:
                continue  # a server has been lost since then
            return [(span, members[span.server]) for span in spans]

    def serving(self) -> dict[str, ServerRecord]:
        """Return the members that get new work, by name: they are online and not banned."""
        now = time.monotonic()
        return {member.name: member for member in self.members if member.serves(now)}

    def _may_come(self, since: float) -> bool:
        """Wait up to 0.1 s for a worker to join, and return True. Return False if there is nothing to wait for."""
        with self._changed:
            joining = any(member.state == "joining" for member in self._members.values())
            if not joining and time.monotonic() - since >= self.policy.route_timeout:
                return False
            with blocking_wait():
                # With a limit: a ban ends by the clock, and nobody notifies then.
                self._changed.wait(0.1)
        return True

    def why_not_serving(self) -> list[str]:
        """Say of each member that gets no new work why."""
        told = [member.told(time.monotonic(), self.sizes, None) for member in self.members]
        return [
            f"{each['name']} is {each['state']}{': ' if each['note'] else ''}{each['note']}"
            for each in told
            if each["state"] != "online"
        ]

    # -- calls --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Return a context manager to enter around calls of servers.

        Inside, the crew's agent makes the calls, and a user's distributed autograd context does not record them.
        """
        # A thread of the user's may act for another agent, or for none.
        with self._agent.activate(), recorder().contexts.outside() if self.is_member else contextlib.nullcontext():
            yield

    def send(self, member: ServerRecord, method: str, *args: Any, extra: float = 0.0, **kwargs: Any) -> Future[Any]:
        """Call a method of a server, without waiting; pass the returned future to `answer`.

        The call times out after `Policy.step_timeout` plus ``extra`` seconds. For a server that is lost, the future has
        failed.
        """
        there = self._agent.at(*member.address)
        call = there.later if method in _LATER else there.call
        return call(method, *args, timeout=self.policy.step_timeout + extra, **kwargs)

    def answer(self, member: ServerRecord, asked: Future[Any], within: float | None = None) -> Any:
        """Wait for a call's result and return it; wait ``within`` seconds, or until the call itself times out.

        If the call failed, notes what that says about the server, and raises `Gone` if the server is lost, or has not
        answered and is banned, and also if it does not have the block or the session, or its input has not arrived.
        Errors of the computation itself are raised unchanged.
        """
        with member.counting_call():
            try:
                found = asked.wait(within)
                if isinstance(found, StepReply):
                    # If server and client have GPUs, the server's answer may have tensors on the client's GPU.
                    found = found._replace(result=adapter.moved(found.result, "cpu"))
                return found
            # Errors lose their tracebacks: the call refers to the error, whose frames refer to the call and to a
            # session's cache. All of these would stay until the garbage collector runs.
            except (WorkerLost, NotOffered) as error:  # the latter from a worker that has been restarted
                self.forsake(member, error)
                raise Gone(member.name) from error.with_traceback(None)
            except RpcTimeout as error:  # before TimeoutError, of which it is a kind
                self.ban(member)
                raise Gone(f"{member.name} did not answer") from error.with_traceback(None)
            except PlacerReplaced as error:  # the answer to an order of a placer in this process
                self.take(error.news)
                raise
            except (NotHere, NoSession, TimeoutError) as error:
                if isinstance(error, NotHere):  # so that the next route does not lead here again
                    with contextlib.suppress(NbdistError):
                        there = self._agent.at(*member.address).ask("info", timeout=self.policy.step_timeout)
                        lacking = [each for each in member.blocks if each not in there.blocks]
                        self.placing.lacks(member.entry, lacking)
                        self._read()
                raise Gone(f"{member.name}: {error}") from error.with_traceback(None)

    def outwait(
        self, member: ServerRecord, asked: Future[Any], within: float | None = None, halted: Halted = None
    ) -> Any:
        """Wait for a call that may take long, like `answer`, as long as its worker answers other calls meanwhile.

        Calls the worker every ``within`` seconds, by default `Policy.step_timeout`; no answer raises `Gone`. Raises
        `Interrupted` soon after ``halted()`` is true: nobody waits for the result any more.
        """
        within = self.policy.step_timeout if within is None else within
        with member.counting_call():
            while not asked.done():
                with contextlib.suppress(Exception):  # an error of the call is raised by `answer` below
                    asked.wait(within if halted is None else _HALTED_SECONDS)
                if halted is not None and halted():
                    raise Interrupted("nobody waits for this text any more: its client has hung up, or its server ends")
                if asked.done():
                    continue
                if member.state == "joining":  # call the worker: the server may not exist yet
                    self.answer(member, api.rpc_async(member.name, _do_nothing, timeout=within))
                else:
                    self.answer(member, self._agent.at(*member.address).call("info", timeout=within))
        return self.answer(member, asked)

    def ask(self, member: ServerRecord, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a server and wait for its result: `send`, then `answer`."""
        return self.answer(member, self.send(member, method, *args, **kwargs))

    def compute(self, member: ServerRecord, begin: int, item: StackInput) -> Any:
        """Take an item through a server's blocks from ``begin`` on, backward if it has a gradient; return the result.

        Notes how fast the server was.
        """
        began = time.perf_counter()
        method = "forward" if item.gradient is None else "backward"
        tokens = item.hidden.shape[0] * item.hidden.shape[1]
        points = self.policy.spend(method, tokens)
        reply: StepReply = self.ask(member, method, begin, item, points=points, extra=carriage(*item))
        member.answered(reply, time.perf_counter() - began, tokens, len(item.calls))
        return reply.result

    def abandon(self, session: str, members: Sequence[ServerRecord] | None = None, begin: int | None = None) -> None:
        """Tell all servers, or ``members``, to drop a session, or only its span from ``begin`` on; do not wait."""
        with self.working():
            for member in self.there if members is None else members:
                if member.there:
                    self.send(member, "close", session, begin)  # a server without the session ignores this


def _do_nothing() -> None: ...  # an answer to this call shows that a worker is alive


def lacks_block(members: Mapping[str, ServerRecord], begin: int, end: int) -> bool:
    """Return whether no member has some block of the range."""
    known = {number for member in members.values() for number in member.blocks}
    return any(number not in known for number in range(begin, end))
