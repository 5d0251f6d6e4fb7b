"""A worker's part in a swarm: blocks that it has loaded, and the caches of the sessions that go through them.

It is a value that lives on the worker; clients call its methods by a reference. Whoever calls only brings work: one
thread computes (`nbdist.swarm.runtime`), so that a busy server answers. What comes out of a step goes on to the next
server of the session at once, and to the client besides, who keeps it for the case that somebody dies.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from nbdist.errors import NbdistError, RpcTimeout, RRefError, WorkerLost
from nbdist.rpc.api import current_agent
from nbdist.rpc.functions import async_execution
from nbdist.rpc.futures import Future, blocking_wait
from nbdist.swarm import adapter, neighbours, stacking
from nbdist.swarm.held import Asked, Held, NoSession, Reply
from nbdist.swarm.history import Step
from nbdist.swarm.large import fetch, leave
from nbdist.swarm.neighbours import Address
from nbdist.swarm.pools import Pools, Request, prioritize
from nbdist.swarm.room import Room
from nbdist.swarm.runtime import Runtime

if TYPE_CHECKING:
    from nbdist.wire.messages import Record

__all__ = ["Info", "NotHere", "Options", "Server"]


class NotHere(NbdistError):
    """A server does not have a block, any more."""


@dataclass(frozen=True)
class Options:
    """How a server serves."""

    cache_bytes: int | None = None
    """Room for caches; None for as much as there is."""
    largest: int | None = None
    """Tokens that one request may have."""
    stack: bool = False
    """Whether several clients' requests without caches may be computed as one: faster, and equal within rounding."""
    session_timeout: float = 3600.0
    """Seconds after which a session that nobody has used is over."""
    prioritize: Callable[[str, int, float], float] = prioritize
    """How soon something is computed, of its kind ("step", "forward", "backward"), its tokens, and the points that the
    client spends on it; the least is first."""


class Info(NamedTuple):
    """How a server is."""

    pid: int
    blocks: list[int]
    sessions: int
    steps: int
    """So many steps it has taken, of all sessions."""
    cache: int
    """Bytes of caches."""
    wanting: int
    """Sessions that wait for room."""
    waiting: int
    """Requests that have not been begun."""
    busy: float
    """Seconds for which it has computed."""


class Server:
    """Serves blocks of one model."""

    def __init__(self, folder: str, options: Options | None = None, key: str = "") -> None:
        self._options = options or Options()
        self._checkpoint = adapter.Checkpoint(folder)
        self._skeleton: Any = None
        self._blocks: dict[int, nn.Module] = {}
        self._loading = threading.Lock()
        self._sessions: dict[tuple[str, int], Held] = {}
        self._room = Room(self._options.cache_bytes)
        self._per_token = 0.0
        """Bytes of cache of one token of one text in one block."""
        self._steps = 0
        self._runtime = Runtime(Pools(self._options.largest), _compute, partial(_look, weakref.ref(self)))
        neighbours.register(key, self)
        self._agent = current_agent()
        weakref.finalize(self, self._agent.on_lost(partial(_lost, weakref.ref(self)))).atexit = False

    # -- blocks -------------------------------------------------------------------------------

    def load(self, begin: int, end: int) -> list[int]:
        """Have these blocks; all that it has then."""
        with self._loading:
            missing = [number for number in range(begin, end) if number not in self._blocks]
            if missing and self._skeleton is None:
                model = adapter.build(self._checkpoint.config)
                path = adapter.find_layers(model)
                self._skeleton = path, model.get_submodule(path)
            for number in missing:
                path, layers = self._skeleton
                self._checkpoint.fill(layers[number], f"{path}.{number}.")
                self._blocks[number] = layers[number]
            return sorted(self._blocks)

    def unload(self, keep: Sequence[int]) -> list[int]:
        """Have these blocks only; all that it has then."""

        def work() -> list[int]:  # by the thread that computes, which else may be in one of them
            with self._loading:
                for number in [number for number in self._blocks if number not in keep]:
                    adapter.empty(self._blocks.pop(number))
                return sorted(self._blocks)

        found: list[int] = self._runtime.run(Request("unload", 0, float("-inf"), (work, None)))
        return found

    def info(self) -> Info:
        """How it is, at once."""
        runtime = self._runtime
        return Info(
            os.getpid(),
            sorted(self._blocks),
            self._count(),
            self._steps,
            self._room.used,
            self._room.wanting,
            runtime.waiting,
            runtime.busy,
        )

    def _count(self) -> int:
        return len({id for id, _ in list(self._sessions)})

    # -- sessions -----------------------------------------------------------------------------

    def open(
        self,
        id: str,
        begin: int,
        cache: Any,
        client: int,
        expected: int = 0,
        wants: tuple[int, int, int, float] | None = None,
    ) -> None:
        """A session comes to the span that begins with this block; ``cache`` is what its caches begin as.

        It wants room for so many texts of so many tokens in so many blocks, for which it waits so many seconds.
        """
        session = Held(copy.deepcopy(cache), client, expected)
        self._enter(id, begin, session)
        if wants is not None:
            rows, tokens, blocks, patience = wants
            per_token = rows * blocks * self._per_token
            self._room.reserve((id, begin), session, per_token, tokens, time.monotonic() + patience)

    def _enter(self, id: str, begin: int, session: Held) -> None:
        before = self._sessions.pop((id, begin), None)
        if before is not None:
            self._end((id, begin), before, "it was opened anew")
        self._sessions[id, begin] = session
        self._runtime.keep()

    def link(self, id: str, begin: int, to: Address, at: int) -> None:
        """What comes out of a session's span goes on to there, to the span that begins with block ``at``."""
        self._find(id, begin).next = to, at

    def close(self, id: str, begin: int | None = None) -> None:
        """A session is over, or its span that begins there; what it had here is gone, and nobody waits for it."""
        for key in [key for key in list(self._sessions) if key[0] == id and begin in (None, key[1])]:
            session = self._sessions.pop(key, None)
            if session is not None:
                self._end(key, session, "its client has closed it")

    def _end(self, key: tuple[str, int], session: Held, why: str) -> None:
        session.end(f"session {key[0]} is over: {why}")
        self._room.release(key)

    def _find(self, id: str, begin: int) -> Held:
        session = self._sessions.get((id, begin))
        if session is None:
            raise NoSession(f"there is no session {id} at block {begin} here")
        session.used = time.monotonic()
        return session

    def push(self, id: str, begin: int, number: int, at: int, hidden: torch.Tensor) -> None:
        """Hidden states for a step of that number: those from token ``at`` on. Again, if need be: that is no matter."""
        session = self._find(id, begin)
        with session.changed:
            session.give(number, at, hidden)
        self._go_on((id, begin), session)

    @async_execution
    def step(
        self,
        id: str,
        begin: int,
        number: int,
        tokens: int,
        step: Step,
        *,
        push: bool = True,
        behind: float = 0.0,
        patience: float = 60.0,
        points: float = 0.0,
    ) -> Future[Reply]:
        """Take the tokens of a session's step of that number through the span that begins with this block.

        The hidden states come along, or have been pushed, or will be, for which those before may need ``behind``
        seconds: no thread waits for that. Then it may take ``patience``. A step that was taken already has the same
        answer again. Numbers go up; `AGAIN` is that of each that other servers have taken before.
        """
        session = self._find(id, begin)
        deadline = time.monotonic() + behind + patience
        answer: Future[Reply] = Future()
        asked = Asked(number, tokens, step, push, deadline, patience, points, answer)
        with session.changed:
            if session.ended:
                raise NoSession(session.ended)
            if step.hidden.numel():
                session.give(number, 0, step.hidden)
            session.asked.append(asked)
        try:
            self._go_on((id, begin), session)
            return answer
        finally:
            del answer  # as `Asked.settle` does

    def _go_on(self, key: tuple[str, int], session: Held) -> None:
        """Do what can be done for a session, unless somebody does."""
        with session.changed:
            if session.busy or session.exported:
                return
            session.busy = True
        while True:
            with session.changed:
                found = session.take_up()
                if found is None:
                    session.busy = False
                    session.changed.notify_all()
                    return
            asked, hidden = found
            try:
                seconds = 0.0
                if hidden is not None:
                    seconds = self._take(key, session, asked, hidden)
                assert session.last is not None  # a step was taken
                asked.settle(self._reply(session.last, seconds), None)
            except BaseException as error:  # whoever asked is told
                asked.settle(None, error)
                if not isinstance(error, Exception):
                    with session.changed:
                        session.busy = False
                    raise

    def _reply(self, result: Any, seconds: float) -> Reply:
        return Reply(leave(result), seconds, self._room.used, self._count(), self._steps)

    def _take(self, key: tuple[str, int], session: Held, asked: Asked, hidden: torch.Tensor) -> float:
        step, begin = asked.step, key[1]
        rows, tokens = hidden.shape[:2]
        span = (begin, begin + len(step.calls))
        have = adapter.length(session.cache, span)
        # In half of the time: who waits longer for an answer takes this server for dead.
        deadline = time.monotonic() + asked.patience / 2
        per_token = rows * len(step.calls) * self._per_token
        self._room.reserve(key, session, per_token, have + tokens, deadline)
        fits = 0 < per_token * (have + tokens) <= self._room.of(key)  # as far as can be told before

        def work() -> float:
            began = time.perf_counter()
            # It costs less than no_grad at each of a thousand operations. What travels is an ordinary tensor again.
            with torch.inference_mode():
                for operation in step.before:
                    adapter.operate(session.cache, *operation, *span)
                found = self._through(begin, hidden, step.calls, session.cache, step.prompts)
            seconds = time.perf_counter() - began
            session.taken_to(asked.number, found)
            self._steps += 1
            # At once, by this thread: the next server waits for it, or the client, if there is no next.
            with self._agent.activate():
                if asked.push and session.next is not None:
                    neighbours.hand_on(session.next[0], key[0], session.next[1], asked.number, found)
                elif fits:
                    asked.settle(self._reply(found, seconds), None)
            return seconds

        seconds: float = self._run("step", rows * tokens, asked.points, work)
        used, length = adapter.nbytes(session.cache, span), adapter.length(session.cache, span)
        if used and not self._per_token:
            self._per_token = used / (rows * length * len(step.calls))
        self._room.reserve(key, session, used / max(1, length), length, deadline)
        return seconds

    def export(self, id: str, begin: int, first: int, last: int, patience: float) -> tuple[Any, ...]:
        """What another server needs to go on with some blocks of a session."""
        session = self._find(id, begin)
        with blocking_wait(), session.changed:
            while session.busy:
                if not session.changed.wait(patience):
                    raise TimeoutError(f"session {id} is busy")
            session.exported = True  # it is not gone on with here
        return adapter.part(session.cache, first, last), session.taken, session.last, session.expected

    def adopt(self, id: str, begin: int, end: int, other: Address, at: int, client: int, patience: float) -> None:
        """Go on with some blocks of a session that another server has at its block ``at``, where that is now."""
        try:
            found = neighbours.call(other, patience, "export", id, at, begin, end, patience / 2)
        except (
            neighbours.NobodyThere,
            WorkerLost,
            RpcTimeout,
            TimeoutError,
        ) as error:  # whose fault that is is to be seen by the client
            raise NoSession(f"{other.worker} does not hand over session {id}: {error}") from None
        cache, taken, last, expected = found
        session = Held(cache, client, expected)
        session.taken, session.last = taken, last
        tokens = adapter.length(cache, (begin, end))
        self._enter(id, begin, session)
        used = adapter.nbytes(cache, (begin, end))
        try:
            self._room.reserve((id, begin), session, used / max(1, tokens), tokens, time.monotonic() + patience)
        except BaseException:
            self.close(id, begin)
            raise

    # -- without a session --------------------------------------------------------------------

    def forward(
        self,
        begin: int,
        hidden: torch.Tensor,
        calls: Sequence[adapter.LayerCall],
        prompts: torch.Tensor | None = None,
        layout: stacking.Layout = stacking.ANY,
        points: float = 0.0,
        patience: float = 60.0,
    ) -> Reply:
        """Take hidden states through blocks, and remember nothing. ``patience`` is for each piece of what goes in."""
        return self._stateless("forward", begin, (hidden, prompts, None), calls, layout, points, patience)

    def backward(
        self,
        begin: int,
        hidden: torch.Tensor,
        calls: Sequence[adapter.LayerCall],
        gradient: torch.Tensor,
        prompts: torch.Tensor | None = None,
        layout: stacking.Layout = stacking.ANY,
        points: float = 0.0,
        patience: float = 60.0,
    ) -> Reply:
        """The gradients of what went in, and of prompts, of that of what came out: the way is computed again."""
        return self._stateless("backward", begin, (hidden, prompts, gradient), calls, layout, points, patience)

    def _stateless(
        self,
        kind: str,
        begin: int,
        given: tuple[Any, Any, Any],
        calls: Sequence[adapter.LayerCall],
        layout: stacking.Layout,
        points: float,
        patience: float,
    ) -> Reply:
        try:
            hidden, prompts, gradient = fetch(given, patience)
        except (WorkerLost, RpcTimeout, RRefError) as error:  # of the client: this server is not to blame
            raise TimeoutError(f"what goes in has not come from the client: {error}") from None
        item = stacking.Item(hidden, tuple(calls), prompts, gradient, layout)

        def work(item: stacking.Item) -> tuple[Any, float]:
            began = time.perf_counter()
            found: Any
            if kind == "forward":
                with torch.no_grad():
                    found = self._through(begin, item.hidden, item.calls, None, item.prompts)
            else:
                found = self._back(begin, item)
            return found, time.perf_counter() - began

        together = (kind, begin, len(item.calls), hidden.shape[1:], hidden.dtype) if self._options.stack else None
        size = hidden.shape[0] * hidden.shape[1]
        found, seconds = self._run(kind, size, points, work, item, together if prompts is None else None)
        return self._reply(found, seconds)

    def _back(self, begin: int, item: stacking.Item) -> tuple[torch.Tensor, torch.Tensor | None]:
        with torch.enable_grad():
            given = item.hidden.detach().requires_grad_()
            prompts = item.prompts.detach().requires_grad_() if item.prompts is not None else None
            wanted = [given] if prompts is None else [given, prompts]
            found = torch.autograd.grad(self._through(begin, given, item.calls, None, prompts), wanted, [item.gradient])
            return found[0], found[1] if prompts is not None else None

    def returns_tuple(self, begin: int, hidden: torch.Tensor, told: adapter.LayerCall) -> bool:
        """Whether a block hands on its hidden states in a tuple."""

        def work() -> bool:
            args, kwargs = told
            return isinstance(self._block(begin)(hidden, *args, **kwargs), tuple)

        found: bool = self._run("step", 1, 0.0, work)
        return found

    # -- computing ----------------------------------------------------------------------------

    def _run(
        self,
        kind: str,
        size: int,
        points: float,
        work: Callable[..., Any],
        item: stacking.Item | None = None,
        together: Hashable = None,
    ) -> Any:
        priority = float(self._options.prioritize(kind, size, points))  # what is none fails here, and is the asker's
        return self._runtime.run(Request(kind, size, priority, (work, item), together))

    def _through(
        self,
        begin: int,
        hidden: torch.Tensor,
        calls: Sequence[adapter.LayerCall],
        cache: Any,
        prompts: torch.Tensor | None,
    ) -> torch.Tensor:
        for number, told in enumerate(calls, begin):
            if prompts is not None:
                prompt = prompts[number - begin]
                count = prompt.shape[1]
                hidden = torch.cat([hidden[:, :count] + prompt, hidden[:, count:]], 1)
            hidden = adapter.call(self._block(number), hidden, told, cache)
        return hidden

    def _block(self, number: int) -> nn.Module:
        block = self._blocks.get(number)
        if block is None:
            raise NotHere(f"block {number} is not here, which has {sorted(self._blocks)}")
        return block

    # -- looking after it ---------------------------------------------------------------------

    def look(self) -> bool:
        """See to what is due; whether there is something left to look after."""
        now = time.monotonic()
        for key, session in list(self._sessions.items()):
            if now - session.used > self._options.session_timeout and not session.busy:
                self._sessions.pop(key, None)
                self._end(key, session, f"nobody has used it for {self._options.session_timeout:g} s")
            session.expire(now)
        self._room.expire(now)
        return bool(self._sessions)

    def on_lost(self, client: int) -> None:
        """A client is gone: so are its sessions."""
        for key, session in list(self._sessions.items()):
            if session.client == client:
                self._sessions.pop(key, None)
                self._end(key, session, "its client is gone")


def _look(server: weakref.ref[Server]) -> bool:
    # By the thread that computes, and by the agent: neither is to keep a server that nobody has.
    found = server()
    return found is not None and found.look()


def _lost(server: weakref.ref[Server], record: Record, _: str) -> None:
    found = server()
    if found is not None:
        found.on_lost(record.incarnation)


_Work = tuple[Callable[..., Any], stacking.Item | None]
"""What to call, and with what; that may be put together with others'."""


def _compute(works: Sequence[_Work]) -> list[Any]:
    """On the thread that computes: an outcome for each."""
    work = works[0][0]
    items = [item for _, item in works if item is not None]
    if not items:
        with torch.no_grad():
            return [work()]
    try:
        stacked = stacking.stack(items)
        if stacked is not None:
            found, seconds = work(stacked)
            return [(part, seconds) for part in stacking.split(found, items)]
    except Exception:  # of one of them, which is not the others' fault
        if len(items) == 1:
            raise
    return [_outcome(work, item) for item in items]


def _outcome(work: Callable[[stacking.Item], Any], item: stacking.Item) -> Any:
    try:
        return work(item)
    except Exception as error:
        return error
