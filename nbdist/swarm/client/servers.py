"""The client's side of all servers: loads blocks on them, finds routes, calls them, and notices when one is lost.

The states of a server (`ServerRecord.state`), and the methods of `Servers` that change them::

    start, join            load is done           relieve              dismiss
    ──────────► "joining" ──────────────► "online" ───────► "draining" ─────────► "offline"
                    │                      │    ▲               │                     ▲
                    │                _ban  ▼    │ time, answer  │                     │ close
                    │                    (banned)               │                     │ (from any state but "gone")
                    └───────── lose ──────────┴────── lose ─────┴─► "gone"

A banned server stays "online", but gets no work for some seconds. `join` makes a new server on a worker whose
server is "gone" or "offline".

The *crew* is the `Servers` of a swarm, a *member* the client's record of one (`nbdist.swarm.client.server_record`), a
*way* a route with its members. When a call fails, the crew notes that the server is lost (`lose`) or does not answer
(`_ban`), and raises `Gone`; the caller then asks for a new route. `Servers.way` lets a server load blocks that no
server has any more (`_mend`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nbdist.amounts import size
from nbdist.autograd.api import recorder
from nbdist.errors import NbdistError, RpcTimeout, RRefError, UsageError, WorkerLost
from nbdist.rpc import api
from nbdist.rpc.futures import Future
from nbdist.rpc.references.rref import RRef
from nbdist.rpc.waits import blocking_wait
from nbdist.swarm import adapter
from nbdist.swarm.carriage import carriage, seconds_for
from nbdist.swarm.client import routing
from nbdist.swarm.client.journal import Journal
from nbdist.swarm.client.routing import NoRoute, Span, named
from nbdist.swarm.client.server_record import ServerRecord
from nbdist.swarm.policy import Policy
from nbdist.swarm.server.neighbours import Address
from nbdist.swarm.server.server import NotHere, Options, Server
from nbdist.swarm.server.session_caches import NoSession, StepReply
from nbdist.swarm.server.sources import offer
from nbdist.swarm.stacking import DEFAULT_LAYOUT, StackInput, StackLayout
from nbdist.trace import Steps

if TYPE_CHECKING:
    from nbdist.wire.messages import Record

_numbers = itertools.count()
_LOADING_SECONDS = 300.0  # for loading blocks, besides the time of a step: at first, the worker imports transformers
# The shortest time limit for a new worker to answer: importing transformers delays its other threads.
_NEW_WORKER_SECONDS = 15.0
_FIRST_BAN_SECONDS = 5.0  # `ServerRecord.ban` doubles them with each failure


class Gone(NbdistError):
    """A server died or did not answer, and the crew has noted that. The caller should ask for another route."""


class Forgotten(Gone):
    """A server answers, but no longer has the session or block."""


class Servers:
    """All servers of a swarm, including those that are gone.

    Any thread may use it. Call methods that call servers within `working`.
    """

    def __init__(
        self,
        checkpoint: adapter.Checkpoint,
        weights: tempfile.TemporaryDirectory[str],
        sizes: Sequence[int],
        options: Options,
        journal: Journal,
        policy: Policy,
    ) -> None:
        self.sizes = sizes  # bytes of each block
        # Says which arguments of a block have rows for each sequence; `DEFAULT_LAYOUT` until a model has found out.
        self.layout: StackLayout = DEFAULT_LAYOUT
        self.options = options
        self.policy = policy
        self.ban_seconds = _FIRST_BAN_SECONDS  # of the first ban of a server
        self._checkpoint = checkpoint
        self._source = offer(checkpoint)
        # The folder that `close`, or the end of this object, removes. Until then servers may load blocks from it.
        self._weights = weights
        self._journal = journal
        self._members: dict[str, ServerRecord] = {}  # by name of the worker, in the order in which they joined
        self._choose = random.Random(0)
        # Guards the list of members and their states; notified when a worker has loaded its blocks.
        self._changed = threading.Condition(threading.RLock())
        # Held by a thread that gives blocks to servers. Take a session's lock before it, and `_changed` after it.
        self._arranging = threading.RLock()
        self.closed = False
        self._agent = api.current_agent()
        self.incarnation = self._agent.me.incarnation  # when a server loses this agent, it drops this client's sessions
        weakref.finalize(self, self._agent.on_lost(partial(_tell_loss, weakref.ref(self)))).atexit = False

    # -- who there is -------------------------------------------------------------------------

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
        name = self._name_of(worker)
        with self._changed:
            found = self._members.get(name)
        if found is None or found.state in ("gone", "offline"):
            raise UsageError(f"{name} serves no blocks: it never joined this swarm, has left it, or is gone")
        return found

    def runs_before(self, worker: int | str) -> list[tuple[int, int]]:
        """Return the runs (begin, end) of blocks that a worker served before it died or left; none if it serves now."""
        with self._changed:
            known = self._members.get(self._name_of(worker))
        had = known.had if known is not None and not known.there else []
        return [(run.start, run.stop) for run in routing.runs_of(had)]

    def _name_of(self, worker: int | str) -> str:
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
        with self._changed:
            member = next((each for each in self._members.values() if each.incarnation == incarnation), None)
        if member is not None:
            self._lose(member, why)

    def _lose(self, member: ServerRecord, why: object) -> None:
        """Mark one server as "gone", as `lose` does, after a call to it has failed."""
        with self._changed:
            # This record only: the server may have left, while a newer one of the same worker is healthy.
            if member.state in ("gone", "offline"):
                return
            # Prefer the agent's reason: it does not depend on which thread notices the death first.
            why = self._agent.fate(member.incarnation) or why
            blocks = member.blocks
            member.rest("gone", str(why).splitlines()[0] if str(why) else "")
        self._journal.tell(f"{member.name}, which had {named(blocks)}, is gone: {member.note}")

    def kill(self, member: ServerRecord) -> None:
        """Kill the process of a member's worker with SIGKILL, without waiting; a worker on another host kills itself.

        Raises UsageError if the member is gone already, or is this process.
        """
        if (record := self._agent.member(member.incarnation)) is None:
            raise UsageError(f"{member.name} is gone already")
        here = record.host == self._agent.me.host
        if here and record.pid == os.getpid():
            raise UsageError(f"{member.name} is this process: call leave({member.name!r}) to take it out of the swarm")
        self._journal.tell(f"{member.name} is killed")
        if here:
            os.kill(record.pid, signal.SIGKILL)
        else:
            api.rpc_async(member.name, _die)

    def _ban(self, member: ServerRecord, why: str = "") -> None:
        """Stop calling a server for a while; ``why`` completes its name in the log."""
        with self._changed:
            if not member.there or member.is_banned(time.monotonic()):
                return  # a joining server has no callers yet; a banned one has failed another call at the same time
            seconds = member.ban(time.monotonic(), self.ban_seconds, why or "did not answer")
        told = why or f"did not answer for {self.policy.step_timeout:g} s"
        self._journal.tell(f"{member.name} {told}: it is left alone for {seconds:g} s")

    # -- who has what -------------------------------------------------------------------------

    def start(self, workers: Sequence[int | str], spans: Sequence[tuple[int, int]], tell: Steps) -> None:
        """Make a server on each worker and load its span there, all at the same time; ``tell`` shows the progress.

        If a worker fails, raises the error of `_wait_until_loaded`. The servers that have been waited for by then stay.
        """
        made = [(self._make_server(worker), span) for worker, span in zip(workers, spans, strict=False)]
        with self._joining([member for member, _ in made]):
            asked = [(member, self._send_load(member, *span)) for member, span in made]
            for number, (member, answer) in enumerate(asked):
                tell(f"serve: {number} of {len(asked)} workers have loaded their blocks; {member.name} loads ...")
                self._wait_until_loaded(member, answer)

    def join(self, worker: int | str, begin: int, end: int, tell: Steps) -> None:
        """Load these blocks on a worker, in addition to those that it serves; ``tell`` shows the progress.

        If the worker has no online server, it gets a new one. Raises the errors of `_wait_until_loaded`.
        """
        with self._changed:
            known = self._members.get(self._name_of(worker))
        is_new = known is None or known.state != "online"
        member = self._make_server(worker) if known is None or is_new else known
        with self._joining([member] if is_new else []):
            tell(f"join: {member.name} loads blocks {begin} to {end - 1}, {size(sum(self.sizes[begin:end]))} ...")
            self._wait_until_loaded(member, self._send_load(member, begin, end))
        tell(f"join: {member.name} serves {named(member.blocks)}.")

    def _make_server(self, worker: int | str) -> ServerRecord:
        """Make a new server on a worker, without waiting for it, and return its record, which `_joining` adds."""
        record = self._agent.find(worker)
        address = Address(record.name, f"server {self.incarnation}.{next(_numbers)}")
        server: RRef[Server] = api.remote(record.name, Server, (self._source, self.options, address.name))
        return ServerRecord(record.name, record.incarnation, server, address, self.policy.room)

    @contextlib.contextmanager
    def _joining(self, members: Sequence[ServerRecord]) -> Iterator[None]:
        """Return a context manager for new servers: it adds their records, in the state "joining", to the members.

        They replace older members of the same names. If the ``with`` block fails, the servers that are still joining
        become "gone".
        """
        try:
            with self._changed:
                for member in members:
                    before = self._members.pop(member.name, None)  # so that the new member is the last of the list
                    if before is not None:
                        before.rest("gone")  # the worker died and was restarted, and this process did not notice
                        member.had = before.had
                    self._members[member.name] = member
            self._journal.news()
            yield
        except BaseException as error:  # also Ctrl-C: `way` waits for a joining server without a limit
            for member in members:
                if member.state == "joining":
                    self._lose(member, error)
                    self._release(member)
            raise

    def _send_load(self, member: ServerRecord, begin: int, end: int) -> Future[list[int]]:
        """Ask a server to load the blocks from ``begin`` to before ``end``; `outwait` waits for the future."""
        record = self._agent.member(member.incarnation)
        far = record is not None and record.host != self._agent.me.host  # it may have to read them from this process
        extra = _LOADING_SECONDS + (seconds_for(sum(self.sizes)) if far else 0.0)  # others may load at the same time
        return self.send(member, "load", begin, end, extra=extra)

    def _wait_until_loaded(self, member: ServerRecord, asked: Future[list[int]]) -> None:
        """Wait until a server has loaded its blocks, and let it serve them; for a new server, within `_joining`.

        Raises WorkerLost if the worker died, UsageError if the swarm was closed meanwhile, `Gone` if the server has
        left meanwhile or does not answer, or the error of loading.
        """
        try:
            blocks: list[int] = self.outwait(member, asked, max(self.policy.step_timeout, _NEW_WORKER_SECONDS))
        except Exception as error:  # the server's: loading may raise anything
            self.check_open()  # if the swarm was closed meanwhile, that is the cause
            if isinstance(error, Gone) and isinstance(error.__cause__, WorkerLost):
                raise error.__cause__ from None  # Gone is for callers that can use another server instead
            raise
        with self._changed:
            if member.state == "joining":
                member.state = "online"
            if member.state == "online":
                member.blocks = blocks
            self._changed.notify_all()
        if member.state != "online":
            self.check_open()  # if the swarm was closed meanwhile, that is the cause
            raise Gone(
                f"{member.name} has loaded its blocks, but is {member.state} meanwhile: it left, or died. Once it "
                "runs, let it `join` again"
            )
        self._journal.tell(f"{member.name} serves {named(blocks)}")

    def relieve(self, member: ServerRecord) -> None:
        """Let other servers load a server's blocks, and send no new work to it: its state becomes "draining".

        If no server can take its blocks, it is online again, and this raises `NoRoute`. Raises UsageError if the server
        is not online or draining.
        """
        with self._arranging:
            with self._changed:
                if not member.there:
                    raise UsageError(
                        f"{member.name} is {member.state}, so it cannot leave now: only an online or draining one can"
                    )
                member.state = "draining"  # it is that already if an interrupted call is repeated
            self._journal.tell(f"{member.name} is about to leave")
            try:
                while True:
                    with contextlib.suppress(Gone):
                        self._mend(0, len(self.sizes))
                        break
            except BaseException:  # also Ctrl-C: nobody else has all of its blocks, so it goes on serving
                with self._changed:
                    if member.state == "draining":  # unless it died meanwhile
                        member.state = "online"
                raise

    def dismiss(self, member: ServerRecord) -> None:
        """Remove a server that has been relieved: it becomes "offline", and frees its blocks and caches."""
        with self._changed:
            member.rest("offline")
        self._release(member)
        self._journal.tell(f"{member.name} has left")

    @staticmethod
    def _release(member: ServerRecord) -> None:
        with contextlib.suppress(NbdistError):  # the worker may be gone
            member.server.release()  # its worker frees the server

    def shift(self, begin: int, end: int, member: ServerRecord) -> list[ServerRecord]:
        """Load these blocks on a server and take them away from all others; return those others, for `unload`.

        If the server fails (`Gone`) or cannot load the blocks, raises that error, and no server loses a block.
        """
        relieved = []
        with self._arranging:
            loaded = self.outwait(member, self._send_load(member, begin, end))
            with self._changed:
                member.blocks = loaded
                for other in self.there:
                    kept = [number for number in other.blocks if other is member or not begin <= number < end]
                    if kept != other.blocks:
                        other.blocks = kept  # the weights stay until `unload`: steps end, and sessions move
                        relieved.append(other)
            self._journal.tell(f"{member.name} takes {named(range(begin, end))}")
        return relieved

    def unload(self, members: Sequence[ServerRecord]) -> None:
        """Free the weights of the blocks that these servers no longer serve. A server that is lost is skipped."""
        with self._arranging:
            for member in members:
                with contextlib.suppress(Gone):
                    self.ask(member, "unload", member.blocks)

    def close(self) -> None:
        """Release all servers, so that their workers free blocks and caches, and remove the file of weights.

        A second call does nothing.
        """
        self.closed = True  # first: what fails from now on in other threads says that the swarm is closed
        self._agent.named.withdraw(self._source.name)
        for member in self.members:
            if member.state not in ("offline", "gone"):
                self._release(member)  # before the state changes, so that a second call repeats it after an interrupt
                with self._changed:
                    member.rest("offline")
        self._weights.cleanup()

    @property
    def ended(self) -> bool:
        """True once the swarm was closed or the agent has ended."""
        return self.closed or self._agent.closed

    def check_open(self) -> None:
        """Raise UsageError if the swarm is closed."""
        if self.closed:
            raise UsageError("this swarm is closed: call nbdist.swarm.serve again")

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
            try:
                self._mend(begin, end)
            except Gone:
                continue
            except NoRoute:
                if not self._may_come(began):
                    raise
                continue
            members = self._serving()
            offers = {name: member.offer() for name, member in members.items()}
            try:
                spans = find(offers, begin, end)
            except NoRoute:
                continue  # a server has been lost since `_mend`
            return [(span, members[span.server]) for span in spans]

    def _serving(self) -> dict[str, ServerRecord]:
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

    def _mend(self, begin: int, end: int) -> None:
        """Let servers load the blocks of the range that no server has; raise `NoRoute`, or `Gone` if one fails.

        After `Gone`, the server is banned or lost, so a second call uses others.
        """
        if not _lacks_block(self._serving(), begin, end):
            return
        with self._arranging:
            members = self._serving()  # again: another thread may have loaded the blocks meanwhile
            blocks = {name: member.blocks for name, member in members.items()}
            room = {name: member.room for name, member in members.items()}
            try:
                spans = routing.assign(blocks, begin, end, self.sizes, room)
            except NoRoute as error:
                raise NoRoute("; ".join([str(error), *self._why_not_serving()])) from None
            for span in spans:  # a quick call first: noticing that a server hangs must not take as long as loading may
                self.ask(members[span.server], "info")
            asked = [self._send_load(members[span.server], span.begin, span.end) for span in spans]
            for span, answer in zip(spans, asked, strict=True):
                member, wanted = members[span.server], named(range(span.begin, span.end))
                try:
                    loaded = self.outwait(member, answer)
                except Gone:
                    raise
                except Exception as error:  # such as MemoryError
                    self._ban(member, f"could not take {wanted}: {type(error).__name__}: {error}")
                    raise Gone(f"{member.name}: {error}") from error
                with self._changed:
                    if member.state == "online":
                        member.blocks = loaded
                self._journal.tell(f"{member.name} takes {wanted}")

    def _why_not_serving(self) -> list[str]:
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
        with self._agent.activate(), recorder().contexts.outside():
            yield

    def send(self, member: ServerRecord, method: str, *args: Any, extra: float = 0.0, **kwargs: Any) -> Future[Any]:
        """Call a method of a server, without waiting; pass the returned future to `answer`.

        The call times out after `Policy.step_timeout` plus ``extra`` seconds. For a server that is lost, the future has
        failed.
        """
        timeout = self.policy.step_timeout + extra
        try:
            found: Future[Any] = getattr(member.server.rpc_async(timeout), method)(*args, **kwargs)
        except (WorkerLost, RRefError) as error:
            found = Future()
            # Without its traceback, whose frames refer to the future and to the session's cache.
            found.set_exception(error.with_traceback(None))
        return found

    def answer(self, member: ServerRecord, asked: Future[Any], within: float | None = None) -> Any:
        """Wait for a call's result and return it; wait ``within`` seconds, or until the call itself times out.

        If the call failed, notes what that says about the server, and raises `Gone` if the server is lost, or has not
        answered and is banned; `Forgotten` if it does not have the block or the session, or its input has not arrived.
        Errors of the computation itself are raised unchanged.
        """
        with member.asked():
            try:
                found = asked.wait(within)
                if isinstance(found, StepReply):
                    # If server and client have GPUs, the server's answer may have tensors on the client's GPU.
                    found = found._replace(result=adapter.moved(found.result, "cpu"))
                return found
            # Errors lose their tracebacks: the call refers to the error, whose frames refer to the call and to a
            # session's cache. All of these would stay until the garbage collector runs.
            except (WorkerLost, RRefError) as error:
                self._lose(member, error)
                raise Gone(member.name) from error.with_traceback(None)
            except RpcTimeout as error:  # before TimeoutError, of which it is a kind
                self._ban(member)
                raise Gone(f"{member.name} did not answer") from error.with_traceback(None)
            except NotHere as error:
                with contextlib.suppress(NbdistError):
                    # So that the next route does not lead here again.
                    found = member.server.rpc_sync(self.policy.step_timeout).info()
                    with self._changed:
                        member.blocks = [number for number in member.blocks if number in found.blocks]
                raise Forgotten(f"{member.name}: {error}") from error.with_traceback(None)
            except (NoSession, TimeoutError) as error:
                raise Forgotten(f"{member.name}: {error}") from error.with_traceback(None)

    def outwait(self, member: ServerRecord, asked: Future[Any], within: float | None = None) -> Any:
        """Wait for a call that may take long, like `answer`, as long as its worker answers other calls meanwhile.

        Calls the worker every ``within`` seconds, by default `Policy.step_timeout`; no answer raises `Gone`.
        """
        within = self.policy.step_timeout if within is None else within
        with member.asked():
            while not asked.done():
                with contextlib.suppress(Exception):  # an error of the call is raised by `answer` below
                    asked.wait(within)
                if not asked.done():  # call the worker, not the server: the server may not exist yet
                    self.answer(member, api.rpc_async(member.name, _do_nothing, timeout=within))
        return self.answer(member, asked)

    def ask(self, member: ServerRecord, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a server and wait for its result: `send`, then `answer`."""
        return self.answer(member, self.send(member, method, *args, **kwargs))

    def compute(self, member: ServerRecord, begin: int, item: StackInput) -> Any:
        """Take an item through a server's blocks from ``begin`` on, backward if it has a gradient; return the result.

        Notes how fast the server was.
        """
        began = time.perf_counter()
        method, given = ("forward", ()) if item.gradient is None else ("backward", (item.gradient,))
        tokens = item.hidden.shape[0] * item.hidden.shape[1]
        args = item.hidden, item.calls, *given, item.prompts, item.layout
        points = self.policy.spend(method, tokens)
        reply: StepReply = self.ask(member, method, begin, *args, points=points, extra=carriage(*args))
        member.answered(reply, time.perf_counter() - began, tokens, len(item.calls))
        return reply.result

    def abandon(self, session: str, members: Sequence[ServerRecord] | None = None, begin: int | None = None) -> None:
        """Tell all servers, or ``members``, to drop a session, or only its span from ``begin`` on; do not wait."""
        with self.working():
            for member in self.there if members is None else members:
                if member.there:
                    self.send(member, "close", session, begin)  # a server without the session ignores this


def _tell_loss(known: weakref.ref[Servers], record: Record, why: str) -> None:
    crew = known()  # weak, because the agent lives longer than a swarm that nobody uses
    if crew is not None:
        crew.lose(record.incarnation, why)


def _do_nothing() -> None:
    """Do nothing. An answer to this call shows that a worker is alive."""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)  # runs on the worker that `Servers.kill` kills


def _lacks_block(members: dict[str, ServerRecord], begin: int, end: int) -> bool:
    known = {number for member in members.values() for number in member.blocks}
    return any(number not in known for number in range(begin, end))
