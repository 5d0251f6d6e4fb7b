"""The servers of a swarm: who has which blocks, ways through them, and how they are called.

A server that is lost, or does not answer, is noticed by whoever calls it; so is a block that nobody has any more, which
somebody with room is given then. All that asks comes here with blocks, and goes with servers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nbdist.autograd.api import recorder
from nbdist.errors import NbdistError, RpcTimeout, RRefError, UsageError, WorkerLost
from nbdist.rpc import api
from nbdist.rpc.futures import Future, blocking_wait
from nbdist.rpc.rref import RRef
from nbdist.swarm import routing
from nbdist.swarm.held import NoSession, Reply
from nbdist.swarm.journal import Journal
from nbdist.swarm.large import fetch, leave
from nbdist.swarm.member import Member
from nbdist.swarm.neighbours import Address
from nbdist.swarm.routing import NoRoute, Span, named
from nbdist.swarm.server import NotHere, Options, Server
from nbdist.trace import Steps

if TYPE_CHECKING:
    from nbdist.wire.messages import Record

__all__ = ["Crew", "Forgotten", "Gone"]

_numbers = itertools.count()
_LOADING = 300.0
"""Seconds that it may take to load blocks, besides: the first time, transformers is imported."""
_THERE = 15.0
"""Seconds within which, at least, a worker that is new has to answer: while it imports, others have to wait."""
_BAN = 5.0
"""Seconds for which a server is left alone that did not answer."""


class Gone(NbdistError):
    """A server is gone, or does not answer, and the swarm knows."""


class Forgotten(Gone):
    """A server has no such session, or block, any more."""


class Crew:
    """All servers, those that are gone included."""

    def __init__(
        self,
        folder: str,
        sizes: Sequence[int],
        options: Options,
        journal: Journal,
        *,
        room: int | None,
        step_timeout: float,
        route_timeout: float,
        spend: Callable[[str, int], float],
    ) -> None:
        self.options = options
        self.step_timeout = step_timeout
        self.points = spend
        self.ban_seconds = _BAN
        self._folder = folder
        self._sizes = sizes
        self._journal = journal
        self._room = room
        self._route_timeout = route_timeout
        self._members: dict[str, Member] = {}
        self._choose = random.Random(0)
        self._changed = threading.Condition(threading.RLock())
        """Held for what is known of servers; notified when somebody has come."""
        self._arranging = threading.RLock()
        """Held by who gives blocks to servers; never while a session's lock is waited for."""
        self.closed = False
        self._agent = api.current_agent()
        self.incarnation = self._agent.me.incarnation
        weakref.finalize(self, self._agent.on_lost(_Listener(self))).atexit = False

    # -- who there is -------------------------------------------------------------------------

    @property
    def members(self) -> list[Member]:
        """All that have ever served, each worker's last."""
        with self._changed:
            return list(self._members.values())

    @property
    def there(self) -> list[Member]:
        """Those that can be asked."""
        return [member for member in self.members if member.there]

    def member(self, worker: int | str) -> Member:
        """What serves on a worker."""
        name = self._name_of(worker)
        with self._changed:
            found = self._members.get(name)
        if found is None or found.state in ("gone", "offline"):
            raise UsageError(f"{name} serves nothing")
        return found

    def _name_of(self, worker: int | str) -> str:
        if isinstance(worker, str):
            return worker
        known = self._agent.members()
        return next((record.name for record in known if record.id == worker), str(worker))

    def lose(self, incarnation: int, why: object) -> None:
        """A worker is gone."""
        with self._changed:
            member = next((each for each in self._members.values() if each.incarnation == incarnation), None)
            if member is None or member.state in ("gone", "offline"):
                return
            if self._agent.member(incarnation) is None:  # the same, whoever notices first
                why = self._agent.why_gone(member.name) or why
            blocks = member.blocks
            member.rest("gone", str(why).splitlines()[0] if str(why) else "")
        self._journal.tell(f"{member.name}, which had {named(blocks)}, is gone: {member.note}")

    def kill(self, member: Member) -> None:
        """Kill its worker's process, as an accident would."""
        record = self._agent.member(member.incarnation)
        if record is None:
            raise UsageError(f"{member.name} is gone")
        here = record.host == self._agent.me.host
        if here and record.pid == os.getpid():
            raise UsageError(f"{member.name} is this process: leave({member.name!r}) relieves it")
        self._journal.tell(f"{member.name} is killed")
        if here:
            os.kill(record.pid, signal.SIGKILL)
        else:
            api.rpc_async(member.name, _die)

    def _ban(self, member: Member, why: str = "") -> None:
        with self._changed:
            if member.state == "joining" or member.is_banned(time.monotonic()):
                return  # nobody asks it yet; or that was by another call, for the same
            seconds = member.ban(time.monotonic(), self.ban_seconds, why or "did not answer")
        told = why or f"did not answer for {self.step_timeout:g} s"
        self._journal.tell(f"{member.name} {told}: it is left alone for {seconds:g} s")

    # -- who has what -------------------------------------------------------------------------

    def start(self, workers: Sequence[int | str], spans: Sequence[tuple[int, int]], tell: Steps) -> None:
        """Have these workers load these blocks, all at the same time; ``tell`` shows how far they are."""
        made = [(self._made(worker), span) for worker, span in zip(workers, spans, strict=False)]
        asked = [(member, self.send(member, "load", *span, extra=_LOADING)) for member, span in made]
        for number, (member, answer) in enumerate(asked):
            tell(f"serve: {number} of {len(asked)} workers have loaded their blocks; {member.name} loads ...")
            self._came(member, answer)

    def join(self, worker: int | str, begin: int, end: int, tell: Steps) -> None:
        """Have a worker serve these blocks, besides those that it serves already; ``tell`` shows how far it is."""
        with self._changed:
            known = self._members.get(self._name_of(worker))
        member = known if known is not None and known.state == "online" else self._made(worker)
        tell(f"join: {member.name} loads blocks {begin} to {end - 1}, {sum(self._sizes[begin:end]) / 1e6:.0f} MB ...")
        self._came(member, self.send(member, "load", begin, end, extra=_LOADING))
        tell(f"join: {member.name} serves {named(member.blocks)}.")

    def _made(self, worker: int | str) -> Member:
        record = self._agent.find(worker)
        address = Address(record.name, f"{self.incarnation}.{next(_numbers)}")
        server: RRef[Server] = api.remote(record.name, Server, (self._folder, self.options, address.key))
        member = Member(record.name, record.incarnation, server, address, self._room)
        with self._changed:
            before = self._members.pop(member.name, None)  # it is shown as the last that has come
            if before is not None:
                before.rest("gone")  # its worker is back, before anybody has noticed
            self._members[member.name] = member
        self._journal.news()
        return member

    def _came(self, member: Member, asked: Future[list[int]]) -> None:
        try:
            blocks: list[int] = self.outwait(member, asked, max(self.step_timeout, _THERE))
        except BaseException as error:
            if member.state == "joining":
                self.lose(member.incarnation, error)
                self._release(member)
            if isinstance(error, Exception):
                self.check_open()  # else that is why
            if isinstance(error, Gone) and isinstance(error.__cause__, WorkerLost):
                raise error.__cause__ from None  # Gone is for those who ask another server instead
            raise
        with self._changed:
            if member.state == "joining":
                member.state = "online"
            if member.state == "online":
                member.blocks = blocks
            self._changed.notify_all()
        if member.state != "online":
            raise Gone(f"{member.name} is {member.state}")
        self._journal.tell(f"{member.name} serves {named(blocks)}")

    def relieve(self, member: Member) -> None:
        """Have others take a server's blocks; who goes through it is to go elsewhere then."""
        with self._arranging:
            with self._changed:
                if not member.there:
                    raise UsageError(f"{member.name} is {member.state}")
                member.state = "draining"  # perhaps again, after an interrupt
            self._journal.tell(f"{member.name} is to leave")
            try:
                while not self._mended(0, len(self._sizes)):
                    pass
            except BaseException:
                with self._changed:
                    if member.state == "draining":  # not gone meanwhile
                        member.state = "online"
                raise

    def dismiss(self, member: Member) -> None:
        """A server is not needed any more."""
        with self._changed:
            member.rest("offline")
        self._release(member)
        self._journal.tell(f"{member.name} has left")

    @staticmethod
    def _release(member: Member) -> None:
        with contextlib.suppress(NbdistError):  # its worker may be gone
            member.server.release()

    def shift(self, begin: int, end: int, member: Member) -> list[Member]:
        """Have a server take these blocks; those who had them, and have to `unload` them."""
        relieved = []
        with self._arranging:
            loaded = self.outwait(member, self.send(member, "load", begin, end, extra=_LOADING))
            with self._changed:
                member.blocks = loaded
                for other in self.there:
                    kept = [number for number in other.blocks if other is member or not begin <= number < end]
                    if kept != other.blocks:
                        other.blocks = kept
                        relieved.append(other)
            self._journal.tell(f"{member.name} takes {named(range(begin, end))}")
        return relieved

    def unload(self, members: Sequence[Member]) -> None:
        """Have servers drop the blocks that are not theirs any more."""
        with self._arranging:
            for member in members:
                with contextlib.suppress(Gone):
                    self.ask(member, "unload", member.blocks)

    def close(self) -> None:
        """Nobody is asked any more."""
        self.closed = True
        for member in self.members:
            if member.state not in ("offline", "gone"):
                self._release(member)  # first: an interrupt may come, and another call
                with self._changed:
                    member.rest("offline")

    @property
    def ended(self) -> bool:
        """Whether nobody serves any more, nor will: it was closed, or its cluster has ended."""
        return self.closed or self._agent.closed

    def check_open(self) -> None:
        """Whether it is closed: an error."""
        if self.closed:
            raise UsageError("this swarm is closed")

    # -- ways ---------------------------------------------------------------------------------

    def way(self, begin: int, end: int, *, spread: bool = False) -> list[tuple[Span, Member]]:
        """A way through these blocks: the fastest, or a random one of those that share the work."""
        began = time.monotonic()
        while True:
            self.check_open()
            try:
                if not self._mended(begin, end):
                    continue
            except NoRoute:
                if not self._may_come(began):
                    raise
                continue
            members = self._serving()
            offers = {name: member.offer() for name, member in members.items()}
            try:
                if spread:
                    spans = routing.spread(offers, begin, end, self._choose)
                else:
                    spans = routing.route(offers, begin, end)
            except NoRoute:
                continue  # somebody has just gone
            return [(span, members[span.server]) for span in spans]

    def _serving(self) -> dict[str, Member]:
        now = time.monotonic()
        return {member.name: member for member in self.members if member.serves(now)}

    def _may_come(self, since: float) -> bool:
        """Wait for whoever comes, where nobody is left who could take something; False when that is over."""
        with self._changed:
            joining = any(member.state == "joining" for member in self._members.values())
            if not joining and time.monotonic() - since >= self._route_timeout:
                return False
            with blocking_wait():
                self._changed.wait(0.1)
        return True

    def _mended(self, begin: int, end: int) -> bool:
        """Have somebody take the blocks that nobody has; False if somebody else has to be found."""
        try:
            self._mend(begin, end)
        except Gone:
            return False
        return True

    def _mend(self, begin: int, end: int) -> None:
        if not _missing(self._serving(), begin, end):
            return
        with self._arranging:
            members = self._serving()
            blocks = {name: member.blocks for name, member in members.items()}
            room = {name: member.room for name, member in members.items()}
            try:
                spans = routing.assign(blocks, begin, end, self._sizes, room)
            except NoRoute as error:
                raise NoRoute("; ".join([str(error), *self._excused()])) from None
            for span in spans:  # who hangs is not waited for as long as who loads
                self.ask(members[span.server], "info")
            asked = [self.send(members[span.server], "load", span.begin, span.end, extra=_LOADING) for span in spans]
            for span, answer in zip(spans, asked, strict=True):
                member, wanted = members[span.server], named(range(span.begin, span.end))
                try:
                    loaded = self.outwait(member, answer)
                except Gone:
                    raise
                except Exception as error:  # it has no memory, say
                    self._ban(member, f"could not take {wanted}: {type(error).__name__}: {error}")
                    raise Gone(f"{member.name}: {error}") from error
                with self._changed:
                    if member.state == "online":
                        member.blocks = loaded
                self._journal.tell(f"{member.name} takes {wanted}")

    def _excused(self) -> list[str]:
        """Why others do not serve."""
        told = [member.told(time.monotonic(), self._sizes, None) for member in self.members]
        return [
            f"{each['name']} is {each['state']}{': ' if each['note'] else ''}{each['note']}"
            for each in told
            if each["state"] != "online"
        ]

    # -- calls --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Calls are ours, by the agent that made this, and none of the user's context."""
        with self._agent.activate(), recorder().contexts.outside():
            yield

    def send(self, member: Member, method: str, *args: Any, extra: float = 0.0, **kwargs: Any) -> Future[Any]:
        """Call a server; `answer` has the result. It may take so much longer than an answer does."""
        timeout = self.step_timeout + extra
        try:
            found: Future[Any] = getattr(member.server.rpc_async(timeout), method)(*args, **kwargs)
        except (WorkerLost, RRefError) as error:
            found = Future()
            found.set_exception(error.with_traceback(None))  # whose frames have the future, and the session's cache
        return found

    def answer(self, member: Member, asked: Future[Any], within: float | None = None) -> Any:
        """What it says; `Gone` if it is lost, or does not answer in the call's time, or from now on."""
        with member.asked():
            try:
                found = asked.wait(within)
                if isinstance(found, Reply):
                    found = found._replace(result=fetch(found.result, self.step_timeout))
                return found
            # Without its traceback: the call has the error, and its frames have the call, and with it a session's
            # cache, which would be there until the garbage collector comes.
            except (WorkerLost, RRefError) as error:
                self.lose(member.incarnation, error)
                raise Gone(member.name) from error.with_traceback(None)
            except RpcTimeout as error:
                self._ban(member)
                raise Gone(f"{member.name} did not answer") from error.with_traceback(None)
            except NotHere as error:
                with contextlib.suppress(NbdistError):
                    found = member.server.rpc_sync(self.step_timeout).info()
                    with self._changed:
                        member.blocks = [number for number in member.blocks if number in found.blocks]
                raise Forgotten(f"{member.name}: {error}") from error.with_traceback(None)
            except (NoSession, TimeoutError) as error:
                raise Forgotten(f"{member.name}: {error}") from error.with_traceback(None)

    def outwait(self, member: Member, asked: Future[Any], within: float | None = None) -> Any:
        """The same, of what may take long: meanwhile it is seen that the worker answers at all."""
        within = self.step_timeout if within is None else within
        with member.asked():
            while not asked.done():
                with contextlib.suppress(Exception):  # it is raised below, if it is the call's
                    asked.wait(within)
                if not asked.done():  # the server itself may be in the making
                    self.answer(member, api.rpc_async(member.name, _do_nothing, timeout=within))
        return self.answer(member, asked)

    def ask(self, member: Member, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a server, and wait."""
        return self.answer(member, self.send(member, method, *args, **kwargs))

    def compute(self, member: Member, method: str, tokens: int, blocks: int, *args: Any) -> Any:
        """Have a server compute something; its result."""
        began = time.perf_counter()
        reply: Reply = self.ask(
            member, method, *map(leave, args), points=self.points(method, tokens), patience=self.step_timeout
        )
        member.answered(reply, time.perf_counter() - began, tokens, blocks)
        return reply.result

    def abandon(self, session: str, members: Sequence[Member] | None = None, begin: int | None = None) -> None:
        """Have servers forget a session, without waiting for that: all, or these, or their spans that begin there."""
        with self.working():
            for member in self.there if members is None else members:
                if member.there:
                    self.send(member, "close", session, begin)


class _Listener:
    """Tells a crew of workers that are lost, and does not keep it."""

    def __init__(self, crew: Crew) -> None:
        self._crew = weakref.ref(crew)

    def __call__(self, record: Record, why: str) -> None:
        crew = self._crew()
        if crew is not None:
            crew.lose(record.incarnation, why)


def _do_nothing() -> None:
    """Be there."""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _missing(members: dict[str, Member], begin: int, end: int) -> bool:
    known = {number for member in members.values() for number in member.blocks}
    return any(number not in known for number in range(begin, end))
