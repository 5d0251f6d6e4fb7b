"""A worker's part in a swarm: the blocks that it has loaded, and the caches of the sessions that go through them.

A `Server` is an object on the worker. Clients call it by its name (`nbdist.rpc.named`), so its methods run on the
threads of the worker's RPC agent. These threads only queue work and wait. One other thread computes
(`nbdist.swarm.server.runtime`), so a server that computes still answers other calls. The output of a step goes to the
session's next server at once, and also to the client, which keeps it in case a server dies.

How a step of a session proceeds::

    ServerSession           one thread at a time works for a session: `_go_on`, `busy`
    step()  ─► asked ┐
    push()  ─► given ┴─► take_up ─► `_compute`: reserve memory ─► computing thread ─┬─► next server: push()
                                                                                    └─► the step's future
"""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from nbdist.errors import NbdistError, RpcTimeout, UsageError, WorkerLost
from nbdist.gpus import staging
from nbdist.rpc.api import current_agent
from nbdist.rpc.functions import async_execution
from nbdist.rpc.futures import Future
from nbdist.rpc.named import NotOffered
from nbdist.rpc.waits import blocking_wait
from nbdist.swarm import adapter, model_cache, stacking
from nbdist.swarm.history import Step
from nbdist.swarm.server.cache_room import Room
from nbdist.swarm.server.neighbours import Address
from nbdist.swarm.server.queues import QueuedRequest, RequestQueues, prioritize
from nbdist.swarm.server.runtime import Runtime
from nbdist.swarm.server.session_caches import NoSession, ServerSession, StepCall, StepReply
from nbdist.swarm.server.sources import FarWeights, Source
from nbdist.swarm.weakly import weakly

if TYPE_CHECKING:
    from nbdist.wire.messages import Record


_MOST_ASKED = 1000  # steps of a session that wait for their inputs


class NotHere(NbdistError):
    """A server does not have a block any more: the swarm has moved the block to another server."""


@dataclass(frozen=True)
class Options:
    """Settings of each server, which `nbdist.swarm.serve` takes as keyword arguments.

    The constructor checks nothing: `serve` raises UsageError for a value that is not possible, and the servers' errors
    for a ``device`` or ``dtype`` that they cannot use. The fields cannot be changed.

    Example:
        >>> nbdist.swarm.Options(cache_bytes=10**9).session_timeout
        3600.0
    """

    cache_bytes: int | None = None
    """The most bytes of caches of a server; None for no limit. A session waits for memory, or gets `CacheFull`."""
    largest: int | None = None
    """The most tokens, of all sequences, of one request; None for no limit. A larger request fails with `TooLarge`."""
    stack: bool = False
    """True if cacheless requests of several clients may be computed together: faster, and equal within rounding."""
    session_timeout: float = 3600.0
    """Seconds without a call after which a server drops a session."""
    device: str | None = None
    """Where blocks and caches are: a device of the server's worker, such as "cuda:1" or "cpu". None for the GPU that a
    cluster has given to the worker, else the CPU. Outside of a cluster, GPUs need device maps between all members."""
    dtype: torch.dtype | None = None
    """The type of the blocks' weights, computations and caches; None for the type in the checkpoint. Hidden states are
    sent and returned in their own type."""
    prioritize: Callable[[str, int, float], float] = prioritize
    """Returns the priority of a request: the queue computes the request with the least number first.

    Its arguments are the kind ("step", "forward", "backward"), the number of tokens, and the points that the client
    spends on the request. The function is sent to the servers. The default is
    `nbdist.swarm.server.queues.prioritize`.
    """


class Info(NamedTuple):
    """The state of a server, as `Swarm.info` returns it."""

    pid: int
    """The process id of the worker."""
    blocks: list[int]
    """The numbers of the blocks that are loaded."""
    sessions: int
    """The number of sessions with caches here."""
    steps: int
    """The number of steps computed so far, of all sessions."""
    cache: int
    """The bytes that are reserved for caches."""
    wanting: int
    """The number of waiting requests for cache memory."""
    waiting: int
    """The number of queued requests."""
    busy: float
    """Seconds spent on computing so far."""


CALLED = (
    *("info", "open", "link", "close", "push", "step", "export", "adopt"),
    *("forward", "backward", "returns_tuple"),
)
"""The methods of a `Server` that clients and other servers call. The placer calls its deputy."""
FOR_CLIENTS = ("info", "open", "link", "close", "push", "step", "adopt", "returns_tuple")
"""The methods of these that clients on other hosts call; `nbdist.swarm.doors.doorkeeper` checks their arguments."""


class Server:
    """Loads and computes blocks of one model on a worker; its `nbdist.swarm.deputy.Deputy` keeps it.

    ``source`` says where the model is. Clients and other servers call this one by its ``name``. Several threads may
    call all methods at the same time. A session may have several spans here; methods name a span of a session by the
    session's ``id`` and the first block of the span, ``begin``. All but `open`, `adopt` and `close` raise NoSession if
    the session has no such span here.
    """

    def __init__(self, source: Source, options: Options | None = None, name: str = "server") -> None:
        self.name = name
        self.options = options or Options()  # as `serve` got them
        self._agent = current_agent()
        self._device = self.options.device or self._agent.me.device or "cpu"
        self._dtype = self.options.dtype
        # True if received tensors may be on another device than the blocks, or of another type.
        self._moves = self._dtype is not None or self._device != "cpu" or self._agent.me.device.startswith("cuda")
        _check_dtype(self._dtype, self._device)
        self._checkpoint = source.open()
        # The path of the model's list of layers, and that list, without weights; None before the first `load`.
        self._skeleton: Any = None
        self.blocks: dict[int, nn.Module] = {}  # that are loaded; only `load` and `unload` change this table
        self._loading = threading.Lock()  # held while blocks are loaded, minutes if they come from another host
        # Held while `blocks` is changed, and only for a moment, because the computing thread takes it.
        self._placing = threading.Lock()
        self._sessions: dict[tuple[str, int], ServerSession] = {}  # by id and first block of the span
        # Held for a moment while `_sessions` is changed: a session may be opened anew while it expires or closes.
        self._entering = threading.Lock()
        self._room = Room(self.options.cache_bytes)
        self._per_token = 0.0  # bytes of cache for a token in a block; 0 until the first step has shown it
        self._steps = 0
        # The computing thread and the agent refer to this object weakly: without other references it must be freed.
        self._runtime = Runtime(RequestQueues(self.options.largest), _compute, weakly(self.look))
        self._agent.named.publish(name, self, *CALLED, clients=FOR_CLIENTS)
        weakref.finalize(self, self._agent.on_lost(weakly(self.on_lost))).atexit = False

    # -- blocks -------------------------------------------------------------------------------

    def load(self, begin: int, end: int) -> list[int]:
        """Load the missing blocks from ``begin`` to before ``end``; return the numbers of all loaded blocks.

        After an error, which is raised, the blocks that were loaded before stay.
        """
        with self._loading:
            with self._placing:
                missing = [number for number in range(begin, end) if number not in self.blocks]
            if missing and self._skeleton is None:
                model = adapter.build(self._checkpoint.config)
                path = adapter.find_layers(model)
                self._skeleton = path, model.get_submodule(path)
            for number in missing:
                path, layers = self._skeleton
                self._checkpoint.fill(layers[number], f"{path}.{number}.")
                block = layers[number].to(self._device, self._dtype)
                with self._placing:
                    self.blocks[number] = block
            with self._placing:
                return sorted(self.blocks)

    def unload(self, keep: Sequence[int]) -> list[int]:
        """Drop all blocks except those in ``keep``; return the numbers of all blocks that are left.

        Waits until the computing thread has finished its current request.
        """

        def work() -> list[int]:  # on the computing thread, which else might be running one of these blocks
            with self._placing:
                for number in [number for number in self.blocks if number not in keep]:
                    adapter.empty(self.blocks.pop(number))  # the skeleton still has the module
                return sorted(self.blocks)

        found: list[int] = self._runtime.run(QueuedRequest("unload", 0, float("-inf"), (work, None)))
        return found

    def info(self) -> Info:
        """Return the server's state without waiting for the computing thread."""
        runtime, memory = self._runtime, (self._room.used, self._room.wanting)
        blocks = sorted(self.blocks)
        return Info(os.getpid(), blocks, self._count(), self._steps, *memory, runtime.waiting, runtime.busy)

    def _count(self) -> int:
        return len({id for id, _ in list(self._sessions)})  # a session may have several spans here

    def read_from(self, source: Source) -> None:
        """Ask another client for weights from now on, if this server asks for them at all."""
        if isinstance(self._checkpoint.weights, FarWeights):
            self._checkpoint.weights.source = source

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
        """Open a session at a span. If it is open there already, close it first.

        ``cache`` is the empty cache with which it begins; a copy is used. ``client`` is the incarnation of the agent
        whose death ends the session. ``expected`` is the number of tokens that it will have at its end, 0 if unknown.
        ``wants`` is (sequences, tokens, blocks, seconds): reserve cache memory for so many, and wait at most so many
        seconds for it; then raise `CacheFull`.
        """
        session = ServerSession(copy.deepcopy(cache), client, expected)
        self._enter(id, begin, session)
        if wants is not None:
            rows, tokens, blocks, patience = wants
            # 0 before the first step of any session: then nothing is reserved before that step has run.
            per_token = rows * blocks * self._per_token
            self._room.reserve(id, session, per_token, tokens, time.monotonic() + patience)

    def _enter(self, id: str, begin: int, session: ServerSession) -> None:
        """Register a session at a span; end the one that is registered there."""
        with self._entering:
            before = self._sessions.get((id, begin))
            self._sessions[id, begin] = session
        if before is not None:
            self._end(id, before, "it was opened anew")
        self._runtime.keep()  # it must drop the session when it has expired

    def link(self, id: str, begin: int, to: Address, at: int) -> None:
        """Push the output of a session's span to another server from now on, to its span there from block ``at`` on."""
        self.find(id, begin).next = to, at

    def close(self, id: str, begin: int | None = None) -> None:
        """Drop a session, or only one of its spans, if it is here; steps that wait for it fail with NoSession.

        Also drops the sessions whose ids go on after ``id`` with a slash: those of a client on another host.
        """
        for key, session in list(self._sessions.items()):
            if f"{key[0]}/".startswith(f"{id}/") and begin in (None, key[1]):
                self._drop(key, session, "its client has closed it")

    def _drop(self, key: tuple[str, int], session: ServerSession, why: str) -> None:
        """Take a session out of the table and end it, if the table still has this very object."""
        with self._entering:
            if self._sessions.get(key) is not session:
                return
            del self._sessions[key]
        self._end(key[0], session, why)

    def _end(self, id: str, session: ServerSession, why: str) -> None:
        session.end(f"session {id} is over: {why}")
        # Last: while the session is not marked as over, a thread of it could reserve memory again.
        self._room.release(session)

    def find(self, id: str, begin: int) -> ServerSession:
        """Return a session at a span, and record the time of this use."""
        if (session := self._sessions.get((id, begin))) is None:
            raise NoSession(
                f"there is no session {id} at block {begin} on this server: it was closed, moved away, or never opened"
            )
        session.used = time.monotonic()
        return session

    def push(self, id: str, begin: int, number: int, hidden: torch.Tensor) -> None:
        """Store the input of step ``number`` of a session. Pushing it twice is harmless.

        The step is computed as soon as both its input and the call of `step` have arrived.
        """
        session = self.find(id, begin)
        # Without the lock: the copy waits for the GPU, and `step` must not wait with it.
        there = _brought(hidden, self._device)
        with session.changed:
            session.give(number, there)
        self._go_on((id, begin), session)

    @async_execution
    def step(
        self,
        id: str,
        begin: int,
        number: int,
        step: Step,
        *,
        pushed: bool = False,
        push: bool = True,
        behind: float = 0.0,
        patience: float = 60.0,
        points: float = 0.0,
    ) -> Future[StepReply]:
        """Compute step ``number`` of a session on a span; return a future.

        The hidden states of the new tokens are in ``step``, or, with ``pushed``, are pushed before or after this call;
        no thread waits for them. The last step may be called for again, and gets the same answer.

        ``number`` is the same on all servers, and `REPLAYED` for a replayed step. ``push`` is False to keep the output
        from the next server. ``behind`` is the seconds that the servers before this one may need, ``patience`` the
        seconds, after those, until the hidden states must be here; a wait for memory may take half of it.

        The future fails with NoSession if the session ends meanwhile, TimeoutError if the hidden states do not arrive
        in time, `CacheFull` if there is no memory for the caches, NotHere if a block is not here, `TooLarge` for too
        many tokens, and UsageError for an earlier step than the last.
        """
        session = self.find(id, begin)
        deadline = time.monotonic() + behind + patience
        answer: Future[StepReply] = Future()
        asked = StepCall(number, step, push, deadline, patience, points, answer)
        # The size of the hidden states could not tell that they are pushed: a step may have no sequences or no tokens.
        there = _brought(step.hidden, self._device) if not pushed else None
        with session.changed:
            # Under the lock: `end` fails the calls that it finds in `asked`, and this one would come too late.
            if session.ended:
                raise NoSession(session.ended)
            if len(session.asked) >= _MOST_ASKED:
                raise UsageError(
                    f"session {id} has {_MOST_ASKED} steps without an input: no client has more than a few"
                )
            if there is not None:
                session.give(number, there)
            session.asked.append(asked)
        try:
            self._go_on((id, begin), session)
            return answer
        finally:
            del answer  # for the reason given at `StepCall.settle`: an error's frames must not hold the future

    def _go_on(self, key: tuple[str, int], session: ServerSession) -> None:
        """Take all steps of a session that are ready, one by one, unless another thread is doing so."""
        with session.changed:
            if session.busy:
                return
            session.busy = True
        while True:
            with session.changed:
                if (found := session.take_up()) is None:
                    session.busy = False
                    session.changed.notify_all()
                    return
            asked, hidden = found
            try:
                seconds = 0.0
                if hidden is not None:
                    seconds = self._compute(key, session, asked, hidden)
                assert session.last is not None  # a step was taken
                asked.settle(self._reply(session.last, seconds, session), None)
            except BaseException as error:  # it goes to the client that called for the step
                asked.settle(None, error)
                # An Exception is an answer, and this thread goes on. Any other error ends it, so another thread must be
                # able to.
                if not isinstance(error, Exception):
                    with session.changed:
                        session.busy = False
                    raise

    def _reply(self, result: Any, seconds: float, session: ServerSession | None = None) -> StepReply:
        reserved = 0 if session is None else self._room.of(session)
        return StepReply(result, seconds, self._room.used, self._count(), self._steps, reserved)

    def _compute(self, key: tuple[str, int], session: ServerSession, asked: StepCall, hidden: torch.Tensor) -> float:
        """Compute one step on the computing thread and push its output; return the seconds that it took.

        ``asked`` is the client's call, ``hidden`` the whole input. Reserves memory for the caches: before the step an
        estimate, after it their true size; both may raise `CacheFull`. If a block is not here, raises NotHere before
        the caches change. Any later error ends the session on this server.
        """
        step, begin = asked.step, key[1]
        rows, tokens = hidden.shape[:2]
        span = (begin, begin + len(step.calls))
        have = model_cache.length(session.cache, span)
        # Wait for memory for half of the time only: else the client would time out and take this server for dead.
        deadline = time.monotonic() + asked.patience / 2
        per_token = rows * len(step.calls) * self._per_token
        self._room.reserve(key[0], session, per_token, have + tokens, deadline)
        fits = 0 < per_token * (have + tokens) <= self._room.of(session)  # an estimate, made before the step

        def work() -> float:
            began = time.perf_counter()
            # All before the caches change: after NotHere, another server can adopt them.
            for number in range(*span):  # `unload` runs on this thread, too, so the blocks stay until the step ends
                self._block(number)
            try:
                # inference_mode costs less than no_grad in each of a thousand operations. Its tensors become ordinary
                # tensors when they are sent.
                with torch.inference_mode():
                    for operation in step.before:
                        model_cache.operate(session.cache, *operation, *span)
                    item = stacking.StackInput(hidden, step.calls, step.prompts)
                    found = self._run_blocks(begin, item, session.cache)
            # Whatever the model's code raises: some caches may have grown, so no server may adopt them.
            except BaseException as error:
                session.end(
                    f"session {key[0]} is over on this server: {type(error).__name__} in a step left its caches "
                    "incomplete"
                )
                session.cache = None  # nobody continues it
                raise
            seconds = time.perf_counter() - began
            session.taken_to(asked.number, found)
            self._steps += 1
            # Send at once, from this thread: the next server waits for the output, or after the last span the client.
            with self._agent.activate():
                if asked.push and session.next is not None:
                    session.next[0].hand_on(key[0], session.next[1], asked.number, found)
                elif fits:  # else the second reservation may fail, and its error is the answer
                    asked.settle(self._reply(found, seconds, session), None)
            return seconds

        seconds: float = self._run("step", rows * tokens, asked.points, (work, None))
        used, length = model_cache.nbytes(session.cache, span), model_cache.length(session.cache, span)
        cells = rows * length * len(step.calls)
        lengths = {model_cache.length(session.cache, (number, number + 1)) for number in range(*span)}
        if used and cells and not self._per_token and len(lengths) == 1:  # a client may leave caches out
            self._per_token = used / cells
        # The true size: a server's first step has no estimate, and the caches of blocks may differ.
        self._room.reserve(key[0], session, used / max(1, length), max(1, length), deadline)
        return seconds

    def export(self, id: str, begin: int, first: int, last: int, patience: float) -> tuple[Any, ...]:
        """Return what another server needs to continue a session on the blocks from ``first`` to before ``last``.

        This is a tuple: the caches of these blocks, the number of the last step, its output, and the number of tokens
        that the session expects. The session ends here, even if the other server then cannot continue it; its memory
        stays reserved until `close`. Waits up to ``patience`` seconds for the current step; if that is too short,
        raises TimeoutError, and the session stays here.
        """
        session = self.find(id, begin)
        with blocking_wait(), session.changed:
            while session.busy:
                if not session.changed.wait(patience):
                    raise TimeoutError(f"session {id} is still computing a step, so its caches cannot be moved now")
            if session.ended:
                raise NoSession(session.ended)
            # Under the lock, before any thread can begin another step, whose tokens the exported caches would lack.
            session.ended = f"session {id} is over on this server: another server has fetched its caches"
        session.end(session.ended)  # fails the waiting calls, which must not be answered with the lock held
        return model_cache.part(session.cache, first, last), session.taken, session.last, session.expected

    def adopt(self, id: str, begin: int, end: int, other: Address, at: int, client: int, patience: float) -> None:
        """Continue a session here on the blocks from ``begin`` to before ``end``, with caches fetched from ``other``.

        ``at`` is the first block of the session's span on ``other``. Waits up to ``patience`` seconds for the caches,
        and as long for memory. Raises NoSession if the other server is gone, lacks the session, or does not hand it
        over in time, and CacheFull if the caches do not fit here; then neither server continues the session.
        """
        try:
            found = other.export(id, at, begin, end, patience)
        except (NotOffered, WorkerLost, RpcTimeout, TimeoutError) as error:
            # The client finds out by itself whether the other server is dead. This server has not failed.
            raise NoSession(f"{other.worker} does not hand over session {id}: {error}") from None
        cache, taken, last, expected = found
        model_cache.move_cache(cache, self._device)
        session = ServerSession(cache, client, expected)
        session.taken, session.last = taken, last
        tokens = model_cache.length(cache, (begin, end))
        self._enter(id, begin, session)
        used = model_cache.nbytes(cache, (begin, end))
        try:
            self._room.reserve(id, session, used / max(1, tokens), tokens, time.monotonic() + patience)
        except BaseException:  # also Ctrl-C: nobody continues the session, so its place and memory must be free
            self._drop((id, begin), session, "its caches do not fit here")
            raise

    # -- without a session --------------------------------------------------------------------

    def forward(self, begin: int, item: stacking.StackInput, points: float = 0.0) -> StepReply:
        """Compute blocks from ``begin`` on without a cache; the reply's result is the hidden states behind them.

        Raises NotHere if a block is not here, and `TooLarge` for too many tokens.
        """
        return self._stateless("forward", begin, item, points)

    def backward(self, begin: int, item: stacking.StackInput, points: float = 0.0) -> StepReply:
        """Compute the blocks again and backpropagate the item's gradient; the weights get none.

        The reply's result is (gradient of the hidden states, gradient of the prompts or None). The rest is as in
        `forward`.
        """
        return self._stateless("backward", begin, item, points)

    def _stateless(self, kind: str, begin: int, item: stacking.StackInput, points: float) -> StepReply:
        """Let the computing thread compute a request of a ``kind``, "forward" or "backward"."""
        if self._moves:  # move all to one place: the requests of different clients may be stacked
            item = stacking.StackInput(*adapter.moved(tuple(item), self._device))
        compute: Callable[..., Any] = self._run_blocks if kind == "forward" else self._backpropagate

        def work(item: stacking.StackInput) -> tuple[Any, float]:
            began = time.perf_counter()
            with torch.no_grad():
                found = compute(begin, item)
            return found, time.perf_counter() - began

        hidden = item.hidden
        # A key for the queue: requests that agree in it may become one. `stacking.stack` compares the rest.
        together = kind, begin, len(item.calls), hidden.shape[1:], hidden.dtype
        is_alone = not self.options.stack or item.prompts is not None
        size = hidden.shape[0] * hidden.shape[1]
        found, seconds = self._run(kind, size, points, (work, item), None if is_alone else together)
        return self._reply(found, seconds)

    def _backpropagate(self, begin: int, item: stacking.StackInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the blocks of an item again with gradients; return the gradients of hidden states and prompts."""
        with torch.enable_grad():
            given = item.hidden.detach().requires_grad_()
            prompts = item.prompts.detach().requires_grad_() if item.prompts is not None else None
            wanted = [given] if prompts is None else [given, prompts]
            result = self._run_blocks(begin, item._replace(hidden=given, prompts=prompts))
            found = torch.autograd.grad(result, wanted, [item.gradient])
            _wait_for(found[0])
            return found[0], found[1] if prompts is not None else None

    def returns_tuple(self, begin: int, hidden: torch.Tensor, told: adapter.LayerCall) -> bool:
        """Call a block and return whether it returns the hidden states in a tuple: models differ in this."""

        def work() -> bool:
            args, kwargs = adapter.moved(told, self._device, self._dtype)
            given = adapter.moved(hidden, self._device, self._dtype)
            return isinstance(self._block(begin)(given, *args, **kwargs), tuple)

        found: bool = self._run("step", 1, 0.0, (work, None))
        return found

    # -- computing ----------------------------------------------------------------------------

    def _run(self, kind: str, size: int, points: float, work: _Work, together: Hashable = None) -> Any:
        """Queue work for the computing thread and wait for its result."""
        priority = float(self.options.prioritize(kind, size, points))  # if it is no number, only this caller fails
        return self._runtime.run(QueuedRequest(kind, size, priority, work, together))

    def _run_blocks(self, begin: int, item: stacking.StackInput, cache: Any = None) -> torch.Tensor:
        """Take an item through the blocks from ``begin`` on, one for each of its calls, on the computing thread.

        Its prompts are added to the hidden states of the first tokens before each block. The result has the type that
        the item's hidden states had, and stays on the blocks' device.
        """
        hidden, calls, prompts = item[:3]
        came = hidden.dtype
        if self._moves or hidden.is_cuda:
            hidden, calls, prompts = adapter.moved(item[:3], self._device, self._dtype)
        for number, told in enumerate(calls, begin):
            if prompts is not None:
                prompt = prompts[number - begin]
                count = prompt.shape[1]
                hidden = torch.cat([hidden[:, :count] + prompt, hidden[:, count:]], 1)
            hidden = adapter.call(self._block(number), hidden, told, cache)
        _wait_for(hidden)
        return hidden.to(came)

    def _block(self, number: int) -> nn.Module:
        if (block := self.blocks.get(number)) is None:
            raise NotHere(
                f"this server does not have block {number}, only {sorted(self.blocks)}: the swarm has moved it"
            )
        return block

    # -- looking after it ---------------------------------------------------------------------

    def look(self) -> bool:
        """Drop sessions that nobody uses, and fail waits that have timed out; return whether any session is left."""
        now = time.monotonic()
        for key, session in list(self._sessions.items()):
            # A long step is a use: it began before, and `used` is not renewed meanwhile.
            if now - session.used > self.options.session_timeout and not session.busy:
                self._drop(key, session, f"nobody has used it for {self.options.session_timeout:g} s")
            session.expire(now)
        self._room.expire(now)
        return bool(self._sessions)

    def on_lost(self, record: Record, _: str) -> None:
        """Drop the sessions of a client whose agent is lost."""
        for key, session in list(self._sessions.items()):
            if session.client == record.incarnation:
                self._drop(key, session, "its client is gone")


def _brought(hidden: torch.Tensor, device: str) -> torch.Tensor:
    """Return hidden states on a server's device, complete, by way of pinned memory if they are large."""
    # Callers hold no lock: a copy to a GPU waits for what the GPU does before, such as steps of other sessions.
    there = staging.to_gpu(hidden, device)
    return hidden.to(device) if there is None else there


def _wait_for(found: torch.Tensor) -> None:
    if found.is_cuda:
        # So that this time is counted: the client chooses routes by the seconds of steps (`StepReply.seconds`).
        torch.cuda.current_stream(found.device).synchronize()


def _check_dtype(dtype: torch.dtype | None, device: str) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"dtype is a type of floating-point numbers, such as torch.bfloat16, not {dtype!r}")
    if dtype is torch.bfloat16 and device.startswith("cuda"):
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                raise UsageError(
                    f"{torch.cuda.get_device_name()} would only emulate bfloat16, slowly; use dtype=torch.float16 or "
                    "torch.float32"
                )


# A function and the item to call it with, which may be stacked with other requests' items; None to call it alone.
_Work = tuple[Callable[..., Any], stacking.StackInput | None]


def _compute(works: Sequence[_Work]) -> list[Any]:
    """Compute requests that were taken together, in one call if possible; return a result or an error for each."""
    work = works[0][0]
    items = [item for _, item in works if item is not None]
    if not items:
        with torch.no_grad():
            return [work()]
    try:
        if (stacked := stacking.stack(items)) is not None:
            found, seconds = work(stacked)
            return [(part, seconds) for part in stacking.split(found, items)]
    except Exception:  # only one of the requests may be faulty
        if len(items) == 1:
            raise
    # One by one after a failure of all: only the faulty request gets an error.
    return [_outcome(work, item) for item in items]


def _outcome(work: Callable[[stacking.StackInput], Any], item: stacking.StackInput) -> Any:
    try:
        return work(item)
    except Exception as error:  # the model's code: whatever it raises is the answer to this request
        return error
