"""A model served by several workers, some of which may die; and models for whoever uses it, which do not notice."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import random
import signal
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.autograd.api import recorder
from nbdist.errors import NbdistError, RpcTimeout, RRefError, UsageError, WorkerLost
from nbdist.rpc import api
from nbdist.rpc.futures import Future, blocking_wait
from nbdist.rpc.rref import RRef
from nbdist.swarm import adapter, routing
from nbdist.swarm.member import Member
from nbdist.swarm.names import folder_of
from nbdist.swarm.routing import NoRoute, Span
from nbdist.swarm.server import Info, NoSession, NotHere, Options, Place, Reply, Server
from nbdist.swarm.session import Forgotten, Gone, Recover, Session
from nbdist.swarm.stacking import ANY

if TYPE_CHECKING:
    from nbdist.swarm.sequential import RemoteSequential
    from nbdist.wire.messages import Record

__all__ = ["Swarm", "serve"]

_numbers = itertools.count()
_KEPT = 200
_SHOWN = 50
_LOADING = 300.0
"""Seconds that it may take to load blocks, besides: the first time, transformers is imported."""
_BAN = 5.0
"""Seconds for which a server is left alone that did not answer."""
_RATE = 20
"""Steps over which the rate of a session is told."""
_PAUSE = 2.0
"""Seconds without a step after which a session is idle: between two steps its client computes."""


def serve(
    model: Any,
    workers: Sequence[int | str],
    spans: Sequence[tuple[int, int]] | None = None,
    *,
    recover: Recover = "exact",
    step_timeout: float = 60.0,
    cache_timeout: float = 60.0,
    route_timeout: float = 0.0,
    chunk: int | None = None,
    micro_batch: int | None = None,
    room: int | None = None,
    spend: Callable[[str, int], float] = lambda kind, tokens: 0.0,
    **options: Any,
) -> Swarm:
    """Have workers serve a model's blocks.

    ``model`` is a transformers model, a folder with one, or ``"smollm2"``. ``spans`` says which blocks each of the
    workers has; else they are cut so that the largest part is as small as can be.

    A session whose server is lost is brought to another one step by step, so that all that follows is equal to the last
    bit (``recover="exact"``), or at once, which is faster and equal within rounding (``"fast"``). A server that has not
    answered within ``step_timeout`` seconds is left alone for a while; room for a session's caches is waited for up to
    ``cache_timeout``, and somebody to take blocks that nobody can take, as when all workers are being started anew, up
    to ``route_timeout``. Steps of more than ``chunk`` tokens are taken in
    parts; what is computed without a cache goes in parts of ``micro_batch`` texts, which are under way at the same
    time. A worker takes up to ``room`` bytes of blocks. ``spend`` says how many points to spend on a request of a kind
    ("step", "forward", "backward") of so many tokens. All else is the servers': `nbdist.swarm.server.Options`.
    """
    folder = tempfile.TemporaryDirectory(prefix="nbdist-swarm-")
    if isinstance(model, str | Path):
        known = Path(model) if Path(model).is_dir() else folder_of(str(model))
        checkpoint = adapter.Checkpoint.opened(known, Path(folder.name))
    else:
        adapter.write_checkpoint(model, Path(folder.name))
        checkpoint = adapter.Checkpoint(folder.name)
    found = Swarm(checkpoint, folder, Options(**options), room=room)
    found.recover, found.step_timeout, found.chunk, found.micro_batch = recover, step_timeout, chunk, micro_batch
    found.points, found.cache_timeout, found.route_timeout = spend, cache_timeout, route_timeout
    if spans is None:
        spans = routing.cut(found.sizes, len(workers))
    if len(spans) > len(workers):
        raise UsageError(f"{len(spans)} spans are for {len(spans)} workers, not {len(workers)}")
    found.start(workers, spans)
    return found


class Swarm:
    """The servers of one model, as their client knows them."""

    def __init__(
        self, checkpoint: adapter.Checkpoint, folder: Any, options: Options | None = None, *, room: int | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self.options = options or Options()
        self.recover: Recover = "exact"
        self.step_timeout = self.cache_timeout = 60.0
        self.route_timeout = 0.0
        self.chunk: int | None = None
        self.micro_batch: int | None = None
        self.points: Callable[[str, int], float] = lambda kind, tokens: 0.0
        self.ban_seconds = _BAN
        self.layout = ANY
        self._folder = folder  # it goes with the swarm
        self._room = room
        skeleton = adapter.build(checkpoint.config)
        self.path = adapter.find_layers(skeleton)
        count = len(skeleton.get_submodule(self.path))
        self.sizes = [checkpoint.nbytes(f"{self.path}.{number}.") for number in range(count)]
        """Bytes of each block."""
        self._log: deque[tuple[float, str]] = deque(maxlen=_KEPT)
        self._members: dict[str, Member] = {}
        self._over: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._settler: threading.Thread | None = None
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._last: weakref.ref[Session] | None = None
        self._steps: deque[tuple[float, int]] = deque(maxlen=_RATE)
        self._listeners: list[Callable[[], None]] = []
        self._choose = random.Random(0)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Notified when somebody has come."""
        self._arranging = threading.RLock()
        """Held by who gives blocks to servers; never while a session's lock is waited for."""
        self._closed = False
        self._agent = api.current_agent()
        self.incarnation = self._agent.me.incarnation
        weakref.finalize(self, self._agent.on_lost(_Listener(self))).atexit = False
        weakref.finalize(self, self._over.put, None).atexit = False

    def start(self, workers: Sequence[Any], spans: Sequence[tuple[int, int]]) -> None:
        """Have these workers load these blocks."""
        with self.working():
            made = [(self._made(worker), span) for worker, span in zip(workers, spans, strict=False)]
            asked = [(member, self.send(member, "load", *span, extra=_LOADING)) for member, span in made]
            for member, answer in asked:
                self._came(member, answer)

    def _made(self, worker: int | str) -> Member:
        record = self._agent.membership.find(worker)
        place = Place(record.name, f"{self.incarnation}.{next(_numbers)}")
        server: RRef[Server] = api.remote(record.name, Server, (str(self.checkpoint.folder), self.options, place.key))
        member = Member(record.name, record.incarnation, server, place, self._room)
        with self._lock:
            before = self._members.pop(member.name, None)  # it is shown as the last that has come
            if before is not None:
                before.state, before.blocks = "gone", []  # its worker is back, before anybody has noticed
            self._members[member.name] = member
        self.news()
        return member

    def _came(self, member: Member, asked: Future[list[int]]) -> None:
        try:
            blocks: list[int] = self.answer(member, asked)
        except BaseException as error:
            if member.state == "joining":
                self.lose(member.incarnation, error)
            raise
        with self._lock:
            if member.state != "gone":
                member.blocks, member.state = blocks, "online"
            self._changed.notify_all()
        self.tell(f"{member.name} serves {_ranges(blocks)}")

    # -- looking ------------------------------------------------------------------------------

    @property
    def blocks(self) -> dict[str, list[int]]:
        """Which blocks each worker has."""
        return {member.name: list(member.blocks) for member in self._there()}

    @property
    def states(self) -> dict[str, str]:
        """How each worker is that has ever served."""
        now = time.monotonic()
        with self._lock:
            return {member.name: member.told(now, self.sizes, None)["state"] for member in self._members.values()}

    @property
    def log(self) -> list[str]:
        """What has happened."""
        return [text for _, text in list(self._log)]

    def info(self) -> dict[str, Info]:
        """How each server is that answers: they are asked."""
        with self.working():
            found = {}
            for member in self._there():
                with contextlib.suppress(Gone):
                    found[member.name] = self.ask(member, "info")
            return found

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        lines = [f"<Swarm of {len(self)} blocks, {sum(self.sizes) / 1e6:.1f} MB>"]
        for name, state in self.states.items():
            blocks = self._members[name].blocks
            lines.append(
                f"  {name}: {_ranges(blocks) if blocks else 'nothing'}{'' if state == 'online' else f', {state}'}"
            )
        return "\n".join(lines)

    def snapshot(self) -> dict[str, Any]:
        """What a map shows. Nobody is asked."""
        now = time.monotonic()
        session = self._last() if self._last is not None else None
        with self._lock:
            servers = [member.told(now, self.sizes, self.options.cache_bytes) for member in self._members.values()]
            steps = list(self._steps)
        elapsed = steps[-1][0] - steps[0][0] if len(steps) > 1 else 0.0
        rate = sum(tokens for _, tokens in steps[1:]) / elapsed if elapsed else 0.0
        writes = bool(steps) and now - steps[-1][0] < _PAUSE
        return {
            "count": len(self.sizes),
            "bytes": sum(self.sizes),
            "servers": servers,
            "route": [list(span) for span in session.route] if session is not None else [],
            "session": None
            if session is None
            else {
                "id": session.id,
                "tokens": session.tokens,
                "rate": round(rate, 1),
                "state": "writing" if writes and session.state == "idle" else session.state,
            },
            "log": [[at, text] for at, text in list(self._log)[-_SHOWN:]],
        }

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback()`` called, by whatever thread, when something has changed. Returns what ends that."""
        self._listeners.append(callback)

        def forget() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(callback)

        return forget

    def news(self) -> None:
        """Something has changed."""
        for listener in list(self._listeners):
            listener()

    def tell(self, text: str) -> None:
        """Something has happened."""
        self._log.append((time.time(), text))
        self.news()

    def stepped(self, session: Session, tokens: int) -> None:
        """A session has taken a step."""
        if self._last is None or self._last() is not session:
            self._last = weakref.ref(session)
            self._steps.clear()
        self._steps.append((time.monotonic(), tokens))
        self.news()

    # -- workers that come and go -------------------------------------------------------------

    def join(self, worker: int | str, begin: int = 0, end: int | None = None) -> None:
        """Have one more worker serve blocks: all, or these. One that serves already takes these besides."""
        with self.working():
            known = self._members.get(self._name_of(worker))
            member = known if known is not None and known.state == "online" else self._made(worker)
            to = len(self) if end is None else end
            self._came(member, self.send(member, "load", begin, to, extra=_LOADING))

    def leave(self, worker: int | str) -> None:
        """Relieve a worker: others take its blocks, the sessions that go through it move there, and it is done."""
        member = self.member(worker)
        with self.working():
            with self._arranging:
                member.state = "draining"
                self.tell(f"{member.name} is to leave")
                try:
                    while not self._mended(0, len(self)):
                        pass
                except BaseException:
                    member.state = "online"
                    raise
            self._settle_sessions()
            self.abandon(None, [member])
            with self._lock:
                member.state, member.blocks = "offline", []
                member.cache = member.sessions = 0
            with contextlib.suppress(NbdistError):
                member.server.release()
            self.tell(f"{member.name} has left")

    def move(self, begin: int, end: int, worker: int | str) -> None:
        """Have a worker take these blocks from whoever has them; the sessions go along."""
        member = self.member(worker)
        with self.working():
            relieved = []
            with self._arranging:
                loaded = self.ask(member, "load", begin, end, extra=_LOADING)
                with self._lock:
                    member.blocks = loaded
                    for other in self._there():
                        kept = [number for number in other.blocks if other is member or not begin <= number < end]
                        if kept != other.blocks:
                            other.blocks = kept
                            relieved.append(other)
                self.tell(f"{member.name} takes {_ranges(range(begin, end))}")
            self._settle_sessions()
            with self._arranging:
                for other in relieved:
                    with contextlib.suppress(Gone):
                        self.ask(other, "unload", other.blocks)

    def _settle_sessions(self) -> None:
        # Not while blocks are being arranged: a session that takes a step may wait for that.
        for session in self._open_sessions():
            session.settle()

    def _open_sessions(self) -> list[Session]:
        with self._lock:
            return list(self._sessions)

    def kill(self, worker: int | str) -> None:
        """Kill a worker's process, as an accident would."""
        member = self.member(worker)
        record = self._agent.membership.get(member.incarnation)
        if record is None:
            raise UsageError(f"{member.name} is gone")
        if record.incarnation == self.incarnation:
            raise UsageError(f"{member.name} is this process: leave({member.name!r}) relieves it")
        self.tell(f"{member.name} is killed")
        if record.host == self._agent.me.host and record.pid != os.getpid():
            os.kill(record.pid, signal.SIGKILL)
        else:
            with self.working():
                api.rpc_async(member.name, _die)

    def member(self, worker: int | str) -> Member:
        """What serves on a worker."""
        name = self._name_of(worker)
        with self._lock:
            found = self._members.get(name)
            if found is None or found.state in ("gone", "offline"):
                raise UsageError(f"{name} serves nothing")
            return found

    def _name_of(self, worker: int | str) -> str:
        if isinstance(worker, str):
            return worker
        members = self._agent.membership.members()
        return next((member.name for member in members if member.id == worker), str(worker))

    def lose(self, incarnation: int, why: object) -> None:
        """A worker is gone."""
        with self._lock:
            member = next((m for m in self._members.values() if m.incarnation == incarnation), None)
            if member is None or member.state in ("gone", "offline"):
                return
            if self._agent.membership.get(incarnation) is None:  # the same, whoever notices first
                why = self._agent.membership.why_gone(member.name) or why
            blocks, member.blocks = member.blocks, []
            member.state, member.note = "gone", str(why).splitlines()[0] if str(why) else ""
            member.cache = member.sessions = 0
        self.tell(f"{member.name}, which had {_ranges(blocks)}, is gone: {member.note}")

    def _ban(self, member: Member, why: str = "") -> None:
        with self._lock:
            seconds = member.ban(time.monotonic(), self.ban_seconds, why or "did not answer")
        told = why or f"did not answer for {self.step_timeout:g} s"
        self.tell(f"{member.name} {told}: it is left alone for {seconds:g} s")

    # -- ways ---------------------------------------------------------------------------------

    def _there(self) -> list[Member]:
        with self._lock:
            return [member for member in self._members.values() if member.state in ("online", "draining")]

    def _offers(self) -> dict[str, Member]:
        now = time.monotonic()
        return {member.name: member for member in self._there() if member.serves(now)}

    def way(self, begin: int, end: int, *, spread: bool = False) -> list[tuple[Span, Member]]:
        """A way through these blocks; those that nobody has any more are taken by who is left."""
        began = time.monotonic()
        while True:
            self._check_open()
            try:
                if not self._mended(begin, end):
                    continue
            except NoRoute:
                if not self._may_come(began):
                    raise
                continue
            members = self._offers()
            offers = {name: member.offer() for name, member in members.items()}
            try:
                spans = (
                    routing.spread(offers, begin, end, self._choose) if spread else routing.route(offers, begin, end)
                )
            except NoRoute:
                continue  # somebody has just gone
            return [(span, members[span.server]) for span in spans]

    def _may_come(self, since: float) -> bool:
        """Wait for whoever comes, where nobody is left who could take something; False when that is over."""
        with self._lock:
            joining = any(member.state == "joining" for member in self._members.values())
            if not joining and time.monotonic() - since >= self.route_timeout:
                return False
            with blocking_wait():
                self._changed.wait(0.1)
        return True

    def route(self, begin: int = 0, end: int | None = None) -> list[Span]:
        """The way that a session would take now."""
        with self.working():
            return [span for span, _ in self.way(begin, len(self) if end is None else end)]

    def _mended(self, begin: int, end: int) -> bool:
        """Have somebody take the blocks that nobody has; False if somebody else has to be found."""
        try:
            self._mend(begin, end)
        except Gone:
            return False
        return True

    def _mend(self, begin: int, end: int) -> None:
        members = self._offers()
        if not self._missing(members, begin, end):
            return
        with self._arranging:
            members = self._offers()
            blocks = {name: member.blocks for name, member in members.items()}
            room = {name: member.room for name, member in members.items()}
            try:
                spans = routing.assign(blocks, begin, end, self.sizes, room)
            except NoRoute as error:
                raise NoRoute("; ".join([str(error), *self._excused()])) from None
            for span in spans:  # who hangs is not waited for as long as who loads
                self.ask(members[span.server], "info")
            asked = [
                (span, self.send(members[span.server], "load", span.begin, span.end, extra=_LOADING)) for span in spans
            ]
            for span, answer in asked:
                member = members[span.server]
                try:
                    loaded = self.answer(member, answer)
                except NbdistError:
                    raise
                except Exception as error:  # it has no memory, say
                    self._ban(member, f"could not take {_ranges(range(*span[1:]))}: {type(error).__name__}: {error}")
                    raise Gone(f"{member.name}: {error}") from error
                with self._lock:
                    if member.state == "online":
                        member.blocks = loaded
                self.tell(f"{span.server} takes {_ranges(range(span.begin, span.end))}")

    @staticmethod
    def _missing(members: dict[str, Member], begin: int, end: int) -> bool:
        known = {number for member in members.values() for number in member.blocks}
        return any(number not in known for number in range(begin, end))

    def _excused(self) -> list[str]:
        """Why others do not serve."""
        told = [member.told(time.monotonic(), self.sizes, None) for member in list(self._members.values())]
        return [
            f"{each['name']} is {each['state']}{': ' if each['note'] else ''}{each['note']}"
            for each in told
            if each["state"] != "online"
        ]

    def has(self, member: Member, span: Span) -> bool:
        """Whether a server still is to be asked for these blocks."""
        if not member.serves(time.monotonic()):
            return False
        blocks = member.blocks
        return all(number in blocks for number in range(span.begin, span.end))

    def lives(self, member: Member) -> bool:
        """Whether a server can hand over what it has."""
        return member.state in ("online", "draining") and not member.is_banned(time.monotonic())

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
            found.set_exception(error)
        return found

    def answer(self, member: Member, asked: Future[Any]) -> Any:
        """What it says; `Gone` if it is lost, or does not answer in time."""
        member.load += 1
        try:
            return asked.wait()
        # Without its traceback: the call has the error, and its frames have the call, and with it a session's cache,
        # which would be there until the garbage collector comes.
        except (WorkerLost, RRefError) as error:
            self.lose(member.incarnation, error)
            raise Gone(member.name) from error.with_traceback(None)
        except RpcTimeout as error:
            self._ban(member)
            raise Gone(f"{member.name} did not answer") from error.with_traceback(None)
        except NotHere as error:
            with contextlib.suppress(NbdistError):
                found = member.server.rpc_sync(self.step_timeout).info()
                with self._lock:
                    member.blocks = [number for number in member.blocks if number in found.blocks]
            raise Forgotten(f"{member.name}: {error}") from error.with_traceback(None)
        except (NoSession, TimeoutError) as error:
            raise Forgotten(f"{member.name}: {error}") from error.with_traceback(None)
        finally:
            member.load -= 1

    def ask(self, member: Member, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a server, and wait."""
        return self.answer(member, self.send(member, method, *args, **kwargs))

    def compute(self, member: Member, method: str, tokens: int, blocks: int, *args: Any) -> Any:
        """Have a server compute something; its result."""
        began = time.perf_counter()
        reply: Reply = self.ask(member, method, *args, points=self.points(method, tokens))
        member.answered(reply, time.perf_counter() - began, tokens, blocks)
        return reply.result

    def abandon(self, id: str | None, members: Sequence[Member], begin: int | None = None) -> None:
        """Have servers forget a session, without waiting for that; or all that go through here."""
        ids = [id] if id is not None else [session.id for session in self._open_sessions()]
        with self.working():
            for member in members:
                for each in ids:
                    if member.state in ("online", "draining"):
                        self.send(member, "close", each, begin)

    # -- sessions -----------------------------------------------------------------------------

    def session(
        self, cache: Any, begin: int = 0, end: int | None = None, *, expected: int = 0, recover: Recover | None = None
    ) -> Session:
        """A session whose end is that of ``cache``."""
        recorded = adapter.RecordedCache(cache, len(self))
        session = Session(
            self,
            recorded.empty,
            begin=begin,
            end=len(self) if end is None else end,
            recover=recover or self.recover,
            expected=expected,
        )
        recorded.tell = session.note
        cache.nbdist = recorded, session
        with self._lock:
            self._sessions.add(session)
        with self._lock:
            if self._settler is None:
                self._settler = threading.Thread(
                    target=_settle, args=(weakref.ref(self), self._over), name="swarm settles", daemon=True
                )
                self._settler.start()
        weakref.finalize(cache, self._over.put, session.id).atexit = False
        return session

    def over(self, session: str) -> None:
        """A session is over: its cache is gone."""
        self.forget(session)
        self.news()

    def close(self) -> None:
        """Serve no longer; what the workers had is gone, and so is a folder that was made for it."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            members = list(self._members.values())
            for member in members:
                member.blocks = []
        for member in members:
            if member.state in ("online", "draining"):
                member.state = "offline"
                with contextlib.suppress(NbdistError):
                    member.server.release()
        self._over.put(None)
        self._folder.cleanup()
        self.news()

    def forget(self, session: str) -> None:
        """Have all servers forget a session, without waiting for that."""
        self.abandon(session, self._there())

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this swarm is closed")

    # -- models -------------------------------------------------------------------------------

    def tokenizer(self) -> Any:
        """The model's, if it came with one."""
        return self.checkpoint.tokenizer()

    def causal_lm(self, *, recover: Recover | None = None) -> Any:
        """A transformers model with embeddings and head here, and blocks there: `generate()`, ``loss.backward()``."""
        return self._model("CausalLM", recover)

    def model(self, *, recover: Recover | None = None) -> Any:
        """The same without a head: what comes out is hidden states."""
        return self._model("Model", recover)

    def sequence_classifier(self, num_labels: int | None = None, *, recover: Recover | None = None) -> Any:
        """The same with a head that tells classes of texts; one to be trained, if the model came without."""
        return self._model("SequenceClassification", recover, num_labels)

    def sequential(self) -> RemoteSequential:
        """The blocks alone, as a module: ``[a:b]`` of it is some of them, ``[i]`` one."""
        from nbdist.swarm.sequential import RemoteSequential

        return RemoteSequential(self)

    def _model(self, kind: str, recover: Recover | None, num_labels: int | None = None) -> Any:
        from nbdist.swarm.model import remote_model

        self._check_open()
        return remote_model(self, kind, recover=recover or self.recover, num_labels=num_labels)


def _settle(swarm: weakref.ref[Swarm], over: queue.SimpleQueue[str | None]) -> None:
    """A thread of its own tells servers which sessions are over: what notices that is a finaliser, and must not."""
    while (session := over.get()) is not None:
        found = swarm()
        if found is None:
            return
        with contextlib.suppress(NbdistError):
            found.over(session)
        del found


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Listener:
    """Tells a swarm of workers that are lost, and does not keep it."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = weakref.ref(swarm)

    def __call__(self, record: Record, why: str) -> None:
        swarm = self._swarm()
        if swarm is not None:
            swarm.lose(record.incarnation, why)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in a row, shortly."""
    found = []
    for _, group in itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        run = [number for _, number in group]
        found.append(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return f"blocks {', '.join(found)}" if found else "nothing"
