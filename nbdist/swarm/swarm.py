"""A model served by several workers, some of which may die; and a model for whoever uses it, which does not notice."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbdist.autograd.api import recorder
from nbdist.errors import NbdistError, RRefError, UsageError, WorkerLost
from nbdist.rpc import api
from nbdist.rpc.rref import RRef
from nbdist.swarm import adapter, routing
from nbdist.swarm.names import folder_of
from nbdist.swarm.routing import Span
from nbdist.swarm.server import Info, Server
from nbdist.swarm.session import Gone, Session

__all__ = ["Swarm", "serve"]


def serve(model: Any, workers: Sequence[int | str], spans: Sequence[tuple[int, int]] | None = None) -> Swarm:
    """Have workers serve a model's blocks.

    ``model`` is a transformers model, a folder with one, or ``"smollm2"``. ``spans`` says which blocks each of the
    workers has; else they are cut so that the largest part is as small as can be.
    """
    folder = tempfile.TemporaryDirectory(prefix="nbdist-swarm-")
    if isinstance(model, str | Path):
        known = Path(model) if Path(model).is_dir() else folder_of(str(model))
        checkpoint = adapter.Checkpoint.opened(known, Path(folder.name))
    else:
        adapter.write_checkpoint(model, Path(folder.name))
        checkpoint = adapter.Checkpoint(folder.name)
    found = Swarm(checkpoint, folder)
    if spans is None:
        spans = routing.cut(found.sizes, len(workers))
    if len(spans) > len(workers):
        raise UsageError(f"{len(spans)} spans are for {len(spans)} workers, not {len(workers)}")
    found.start([api.get_worker_info(w) if isinstance(w, str) else w for w in workers], spans)
    return found


class Swarm:
    """The servers of one model."""

    def __init__(self, checkpoint: adapter.Checkpoint, folder: Any) -> None:
        self.checkpoint = checkpoint
        self._folder = folder  # it goes with the swarm
        skeleton = adapter.build(checkpoint.config)
        self.path = adapter.find_layers(skeleton)
        count = len(skeleton.get_submodule(self.path))
        self.sizes = [checkpoint.nbytes(f"{self.path}.{number}.") for number in range(count)]
        """Bytes of each block."""
        self.log: deque[str] = deque(maxlen=200)
        """What has happened."""
        self._servers: dict[str, RRef[Server]] = {}
        self._blocks: dict[str, list[int]] = {}
        self._over: deque[str] = deque()
        self._lock = threading.RLock()

    def start(self, workers: Sequence[Any], spans: Sequence[tuple[int, int]]) -> None:
        """Have these workers load these blocks."""
        with self._quiet():
            made = [
                (w, span, api.remote(w, Server, (str(self.checkpoint.folder),)))
                for w, span in zip(workers, spans, strict=False)
            ]
            asked = [(rref, rref.rpc_async().load(*span)) for _, span, rref in made]
            for rref, answer in asked:
                self._add(rref, answer.wait())

    def _add(self, rref: RRef[Server], blocks: list[int]) -> None:
        with self._lock:
            self._servers[rref.owner_name()] = rref
            self._blocks[rref.owner_name()] = blocks
        self.log.append(f"{rref.owner_name()} serves {_ranges(blocks)}")

    @property
    def blocks(self) -> dict[str, list[int]]:
        """Which blocks each worker has."""
        with self._lock:
            return {name: list(numbers) for name, numbers in self._blocks.items()}

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        lines = [f"<Swarm of {len(self)} blocks, {sum(self.sizes) / 1e6:.1f} MB>"]
        lines += [f"  {name}: {_ranges(numbers)}" for name, numbers in self.blocks.items()]
        return "\n".join(lines)

    # -- workers that come and go -------------------------------------------------------------

    def join(self, worker: int | str, begin: int = 0, end: int | None = None) -> None:
        """Have one more worker serve blocks: all, or these."""
        with self._quiet():
            rref: RRef[Server] = api.remote(worker, Server, (str(self.checkpoint.folder),))
            self._add(rref, rref.rpc_sync().load(begin, len(self) if end is None else end))

    def kill(self, worker: int | str) -> None:
        """Kill a worker's process, as an accident would."""
        name = worker if isinstance(worker, str) else self._name_of(worker)
        if name not in self.blocks:
            raise UsageError(f"{name} serves nothing")
        info: Info = self.ask(self.server(name), "info")
        self.log.append(f"{name} is killed")
        os.kill(info.pid, signal.SIGKILL)

    @staticmethod
    def _name_of(id: int) -> str:
        members = recorder().membership.members()
        return next((member.name for member in members if member.id == id), str(id))

    def lose(self, server: RRef[Server], why: object) -> None:
        """A server is gone."""
        with self._lock:
            name = next((name for name, known in self._servers.items() if known is server), None)
            if name is None:
                return  # that is known; or its worker is back, and serves anew
            del self._servers[name]
            blocks = self._blocks.pop(name)
        self.log.append(f"{name}, which had {_ranges(blocks)}, is gone: {str(why).splitlines()[0]}")

    # -- for sessions -------------------------------------------------------------------------

    def route(self, begin: int, end: int) -> list[Span]:
        """A way through these blocks; those that nobody has any more are taken by who is left."""
        while True:
            try:
                for span in routing.assign(self.blocks, begin, end):
                    self._give(span)
            except Gone:
                continue
            return routing.route(self.blocks, begin, end)

    def _give(self, span: Span) -> None:
        server = self.server(span.server)
        loaded = self.ask(server, "load", span.begin, span.end)
        with self._lock:
            if self._servers.get(span.server) is server:
                self._blocks[span.server] = loaded
        self.log.append(f"{span.server} takes {_ranges(range(span.begin, span.end))}")

    def servers(self, begin: int, end: int) -> list[tuple[Span, RRef[Server]]]:
        """A way through these blocks, and who serves each part."""
        while True:
            with contextlib.suppress(Gone):
                return [(span, self.server(span.server)) for span in self.route(begin, end)]

    def server(self, name: str) -> RRef[Server]:
        """The server on a worker; `Gone` where there is none any more."""
        with self._lock:
            found = self._servers.get(name)
        if found is None:
            raise Gone(name)
        return found

    def ask(self, server: RRef[Server], method: str, *args: Any) -> Any:
        """Call a server; `Gone` if its worker is lost."""
        with self._quiet():
            try:
                return getattr(server.rpc_sync(0), method)(*args)
            except (WorkerLost, RRefError) as error:
                self.lose(server, error)
                raise Gone(server.owner_name()) from error

    @staticmethod
    def _quiet() -> contextlib.AbstractContextManager[None]:
        """Calls are ours, and none of the user's context."""
        return recorder().contexts.outside()

    def session(self, cache: Any) -> Session:
        """A session whose end is that of ``cache``."""
        self.settle()
        recorded = adapter.RecordedCache(cache)
        session = Session(self, recorded.empty)
        recorded.tell = session.note
        cache.nbdist = recorded, session
        weakref.finalize(cache, self._over.append, session.id).atexit = False
        return session

    def settle(self) -> None:
        """Tell servers which sessions are over: those whose caches are gone. A finaliser must not do that itself."""
        told = []
        with self._lock:
            servers = list(self._servers.values())
        while self._over:
            id = self._over.popleft()
            for server in servers:
                with contextlib.suppress(NbdistError), self._quiet():
                    told.append(server.rpc_async().close(id))
        for answer in told:
            with contextlib.suppress(NbdistError):
                answer.wait()

    def close(self) -> None:
        """Serve no longer; what the workers had is gone, and so is a folder that was made for it."""
        with self._lock:
            self._servers.clear()
            self._blocks.clear()
        self._folder.cleanup()

    # -- models -------------------------------------------------------------------------------

    def tokenizer(self) -> Any:
        """The model's, if it came with one."""
        return self.checkpoint.tokenizer()

    def causal_lm(self) -> Any:
        """A transformers model with embeddings and head here, and blocks there: `generate()`, ``loss.backward()``."""
        from nbdist.swarm.model import remote_model

        return remote_model(self)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in a row, shortly."""
    found = []
    for _, group in itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        run = [number for _, number in group]
        found.append(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return f"blocks {', '.join(found)}" if found else "nothing"
