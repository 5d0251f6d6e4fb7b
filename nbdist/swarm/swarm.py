"""A model served by several workers, some of which may die; and models for whoever uses it, which do not notice."""

from __future__ import annotations

import contextlib
import queue
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist import durations, trace
from nbdist.errors import UsageError
from nbdist.rpc import api
from nbdist.swarm import adapter, routing
from nbdist.swarm.crew import Crew, Gone
from nbdist.swarm.journal import Journal
from nbdist.swarm.names import folder_of
from nbdist.swarm.routing import Span, named
from nbdist.swarm.server import Info, Options
from nbdist.swarm.session import Recover, Session
from nbdist.swarm.stacking import ANY, Layout

if TYPE_CHECKING:
    from nbdist.swarm.sequential import RemoteSequential

__all__ = ["Swarm", "serve"]


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
    workers has; else they are cut so that the largest part is as small as can be. A worker takes up to ``room`` bytes
    of blocks.

    A session whose server is lost is brought to another one step by step, so that all that follows is equal to the last
    bit (``recover="exact"``), or at once, which is faster and equal within rounding (``"fast"``).

    A server that has not answered within ``step_timeout`` seconds is left alone for a while. Room for a session's
    caches is waited for up to ``cache_timeout``, and somebody to take blocks that nobody can take, as when all workers
    are being started anew, up to ``route_timeout``.

    Steps of more than ``chunk`` tokens are taken in parts; what is computed without a cache goes in parts of
    ``micro_batch`` texts, which are under way at the same time. ``spend`` says how many points to spend on a request of
    a kind ("step", "forward", "backward") of so many tokens. All else is the servers': `nbdist.swarm.Options`.
    """
    servers = Options(**options)  # first: a name may be wrong
    durations.positive(servers.session_timeout, "session_timeout")
    step_timeout = durations.positive(step_timeout, "step_timeout")
    cache_timeout = durations.bounded(cache_timeout, "cache_timeout")
    route_timeout = durations.bounded(route_timeout, "route_timeout")
    tell = trace.steps()
    tell("serve: the model's weights are read ...")
    # In the agent's directory: what removes that after a kill removes the weights, too.
    folder = tempfile.TemporaryDirectory(prefix="swarm-", dir=api.current_agent().directory)
    if isinstance(model, str | Path):
        known = Path(model) if Path(model).is_dir() else folder_of(str(model))
        checkpoint = adapter.Checkpoint.opened(known, Path(folder.name))
    else:
        adapter.write_checkpoint(model, Path(folder.name))
        checkpoint = adapter.Checkpoint(folder.name)
    found = Swarm(
        checkpoint,
        folder,
        servers,
        recover=recover,
        step_timeout=step_timeout,
        cache_timeout=cache_timeout,
        route_timeout=route_timeout,
        chunk=chunk,
        micro_batch=micro_batch,
        room=room,
        spend=spend,
    )
    if spans is None:
        spans = routing.cut(found.sizes, len(workers))
    if len(spans) > len(workers):
        raise UsageError(f"{len(spans)} spans are for {len(spans)} workers, not {len(workers)}")
    for begin, end in spans:
        found.check(begin, end)
    with found.crew.working():
        found.crew.start(workers, spans, tell)
    tell(f"serve: {len(spans)} workers serve {len(found)} blocks, {sum(found.sizes) / 1e6:.0f} MB.")
    return found


class Swarm:
    """The servers of one model, as their client knows them; see `serve`, which makes it."""

    def __init__(
        self,
        checkpoint: adapter.Checkpoint,
        folder: tempfile.TemporaryDirectory[str],
        options: Options,
        *,
        recover: Recover,
        step_timeout: float,
        cache_timeout: float,
        route_timeout: float,
        chunk: int | None,
        micro_batch: int | None,
        room: int | None,
        spend: Callable[[str, int], float],
    ) -> None:
        self.checkpoint = checkpoint
        self.recover: Recover = recover
        self.cache_timeout = cache_timeout
        self.chunk = chunk
        self.micro_batch = micro_batch
        self.layout: Layout = ANY
        """How texts lie in what blocks are called with."""
        skeleton = adapter.build(checkpoint.config)
        path = adapter.find_layers(skeleton)
        self.sizes = [checkpoint.nbytes(f"{path}.{n}.") for n in range(len(skeleton.get_submodule(path)))]
        """Bytes of each block."""
        self.journal = Journal()
        self.crew = Crew(
            str(checkpoint.folder),
            self.sizes,
            options,
            self.journal,
            room=room,
            step_timeout=step_timeout,
            route_timeout=route_timeout,
            spend=spend,
        )
        self._folder = folder  # it goes with the swarm
        self._closed: list[dict[str, Any]] | None = None
        """How each worker was when the swarm was closed."""
        self._lock = threading.Lock()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._over: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._settler: threading.Thread | None = None
        weakref.finalize(self, self._over.put, None).atexit = False

    # -- looking ------------------------------------------------------------------------------

    @property
    def blocks(self) -> dict[str, list[int]]:
        """Which blocks each worker has."""
        return {member.name: list(member.blocks) for member in self.crew.there}

    @property
    def states(self) -> dict[str, str]:
        """How each worker is that has ever served."""
        return {each["name"]: each["state"] for each in self._told()}

    @property
    def log(self) -> list[str]:
        """What has happened."""
        return self.journal.lines

    def info(self) -> dict[str, Info]:
        """How each server is that answers: they are asked."""
        with self.crew.working():
            found = {}
            for member in self.crew.there:
                with contextlib.suppress(Gone):
                    found[member.name] = self.crew.ask(member, "info")
            return found

    def route(self, begin: int = 0, end: int | None = None) -> list[Span]:
        """The way that a session would take now."""
        end = self.check(begin, end)
        with self.crew.working():
            return [span for span, _ in self.crew.way(begin, end)]

    def check(self, begin: int, end: int | None) -> int:
        """Whether there are such blocks; their end, which is that of all if it was not said."""
        end = len(self) if end is None else end
        if not 0 <= begin < end <= len(self):
            raise UsageError(f"there are no blocks from {begin} to {end}: there are {len(self)}, from 0 on")
        return end

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        over = "; it is over" if self.ended else ""
        lines = [f"<Swarm of {len(self)} blocks, {sum(self.sizes) / 1e6:.1f} MB{over}>"]
        for each in self._told():
            blocks = [number for begin, end in each["blocks"] for number in range(begin, end)]
            lines.append(
                f"  {each['name']}: {named(blocks)}{'' if each['state'] == 'online' else ', ' + each['state']}"
            )
        return "\n".join(lines)

    def _told(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [member.told(now, self.sizes, self.crew.options.cache_bytes) for member in self.crew.members]

    @property
    def ended(self) -> bool:
        """Whether the swarm serves no longer: it was closed, or its cluster has ended."""
        return self.crew.ended

    def snapshot(self) -> dict[str, Any]:
        """Return what a map shows. Nobody is asked. Of a swarm that was closed, it is how the swarm was then."""
        servers = self._told() if self._closed is None else self._closed
        return {"count": len(self), "bytes": sum(self.sizes), "servers": servers, **self.journal.told()}

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback()`` called, by whatever thread, when something has changed. Returns what ends that."""
        return self.journal.listen(callback)

    # -- workers that come and go -------------------------------------------------------------

    def join(self, worker: int | str, begin: int = 0, end: int | None = None) -> None:
        """Have one more worker serve blocks: all, or these. One that serves already takes these besides."""
        end = self.check(begin, end)
        with self.crew.working():
            self.crew.join(worker, begin, end, trace.steps())

    def leave(self, worker: int | str) -> None:
        """Relieve a worker: others take its blocks, the sessions that go through it move there, and it is done."""
        member = self.crew.member(worker)
        with self.crew.working():
            self.crew.relieve(member)
            for session in self._open_sessions():
                session.settle()
                self.crew.abandon(session.id, [member])
            self.crew.dismiss(member)

    def move(self, begin: int, end: int, worker: int | str) -> None:
        """Have a worker take these blocks from whoever has them; the sessions go along."""
        member = self.crew.member(worker)
        end = self.check(begin, end)
        with self.crew.working():
            relieved = self.crew.shift(begin, end, member)
            try:
                for session in self._open_sessions():
                    session.settle()
            finally:
                self.crew.unload(relieved)

    def kill(self, worker: int | str) -> None:
        """Kill a worker's process, as an accident would."""
        with self.crew.working():
            self.crew.kill(self.crew.member(worker))

    def close(self) -> None:
        """Serve no longer; what the workers had is gone, and so is a folder that was made for it."""
        if not self.ended:
            self._closed = self._told()
        self.crew.close()
        self._over.put(None)
        self._folder.cleanup()
        self.journal.news()

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
            if self._settler is None:
                self._settler = threading.Thread(
                    target=_settle, args=(weakref.ref(self), self._over), name="swarm settles", daemon=True
                )
                self._settler.start()
        weakref.finalize(cache, self._over.put, session.id).atexit = False
        return session

    def over(self, session: str) -> None:
        """A session is over: its cache is gone, or is wanted no longer."""
        self.crew.abandon(session)
        self.journal.news()

    def _open_sessions(self) -> list[Session]:
        with self._lock:
            return list(self._sessions)

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

        self.crew.check_open()
        return remote_model(self, kind, recover=recover or self.recover, num_labels=num_labels)


def _settle(swarm: weakref.ref[Swarm], over: queue.SimpleQueue[str | None]) -> None:
    """A thread of its own tells servers which sessions are over: what notices that is a finaliser, and must not."""
    while (session := over.get()) is not None:
        found = swarm()
        if found is None:
            return
        with contextlib.suppress(Exception):  # without this thread, none would be closed any more
            found.over(session)
        del found
