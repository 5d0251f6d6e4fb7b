"""The client's end of a door: takes the place of an agent, in a process that is no member of the workers' world."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from msgspec import convert

from nbdist.channel.door import LARGEST, DoorLink
from nbdist.channel.locked_directory import LockedDirectory, sweep
from nbdist.channel.secret import runtime_directory
from nbdist.errors import NbdistError, RemoteError, SecurityError, UsageError, WorkerLost
from nbdist.ids import new_incarnation
from nbdist.rpc.futures import Future
from nbdist.rpc.named import NamedObject
from nbdist.swarm import model_cache
from nbdist.swarm.adapter import TEXTS, Checkpoint
from nbdist.swarm.client.crew import Crew
from nbdist.swarm.directory.directory import SwarmNews
from nbdist.swarm.directory.placing import SwarmFacts
from nbdist.swarm.doors.client_invitation import ClientInvitation
from nbdist.swarm.doors.doorkeeper import END, NEWS, SILENT_SECONDS, WELCOME
from nbdist.swarm.policy import Policy
from nbdist.swarm.server.neighbours import Address
from nbdist.swarm.server.server import Info, Options
from nbdist.swarm.server.session_caches import StepReply
from nbdist.swarm.server.sources import FarWeights, Source
from nbdist.wire import plain

_ANSWER_SECONDS = 60.0  # until the member at the door has read its files
_WELCOME = tuple[Address, Address, tuple[list[int], int | None, dict[str, Any]], SwarmNews]
_RESULTS: dict[str, Any] = {
    "info": Info,
    "step": StepReply,
    "news": SwarmNews,
}  # of methods whose results are not plain


class Outside:
    """Takes the place of an `nbdist.rpc.agent.Agent` in a `Crew` and a `FarPlacer`. Any thread may use it."""

    def __init__(self, invitation: ClientInvitation) -> None:
        """Connect, and wait for the swarm's facts. Raises WorkerLost if nobody answers, or the door refuses."""
        self.me = SimpleNamespace(incarnation=new_incarnation(), name="client")
        self._address = invitation.address
        self._heard = time.monotonic()
        self._why = ""  # the reason why the link is over; empty while it is not
        welcome: Future[Any] = Future()
        self._pending: dict[int, tuple[Future[Any], Any]] = {WELCOME: (welcome, _WELCOME)}  # with the results' types
        self._numbers = itertools.count(WELCOME + 1)
        self._lock = threading.Lock()  # guards `_pending` and `_why`
        self._crew: Callable[[], Crew | None] | None = None
        self._directory: LockedDirectory | None = None
        self._config: Any = None
        self._link = DoorLink(invitation.address, invitation.key, self._take, self._tick)
        self._link.send(invitation.hello)
        try:
            self.placer, self._weights, (sizes, cache_bytes, policy), self._news = welcome.wait()
        except BaseException:  # also Ctrl-C
            self.close()
            raise
        source = Source("", (), *self._weights)  # to call, not to open: its file is on another host
        self.facts = SwarmFacts(source, sizes, Options(cache_bytes=cache_bytes), Policy(**policy), "", "")

    # -- in the place of an agent -------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True once the link is over."""
        return bool(self._why)

    def at(self, to: str, name: str) -> NamedObject:
        """Return an object of the swarm, by its worker and name."""
        return NamedObject(self, to, name)

    def activate(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that does nothing: no agent calls."""
        return contextlib.nullcontext()

    def members(self) -> Sequence[Any]:
        """Return an empty list: a client knows no members."""
        return ()

    def fate(self, incarnation: int) -> None:
        """Return None: the news of the directory say what has happened to a server."""

    def on_lost(self, listener: Any) -> Callable[[], None]:
        """Do nothing, and return a function that does nothing, as `fate` does."""
        return lambda: None

    # -- calls --------------------------------------------------------------------------------

    def asynchronous(
        self, to: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, timeout: float, label: str
    ) -> Future[Any]:
        """Send a call of `NamedObject`; return the future of its result.

        Raises EncodeError, UsageError for a message that is too large, SecurityError for a call without a cache.
        """
        name, method, *arguments = args
        if method in ("forward", "backward"):
            raise SecurityError(
                "a client on another host can only write texts: call the model with a cache (use_cache=True), without "
                "gradients, or connect on the host of the process that serves"
            )
        if method == "open":
            arguments[2] = model_cache.description(arguments[2], self._config)
        keywords = {key: value for key, value in (kwargs or {}).items() if key != "points"}  # clients spend none
        number, future = next(self._numbers), Future[Any]()
        data = plain.encode((number, to, name, method, arguments, keywords, float(timeout) if timeout > 0 else 1e9))
        if len(data) > LARGEST:
            raise UsageError(
                f"a client's message has at most {LARGEST} bytes, and this one has {len(data)}: take fewer tokens at "
                "once, or serve the model with a smaller chunk (`nbdist.swarm.serve`)"
            )
        with self._lock:
            if self._why:
                future.set_exception(WorkerLost(self._why))
                return future
            self._pending[number] = future, _RESULTS.get(method, Any)
        self._link.send(data)
        return future

    def ask(self, method: str, *args: Any, timeout: float) -> Any:
        """Call a method of the swarm's checkpoint, as `Source.ask` does."""
        return self.at(*self._weights).ask(method, *args, timeout=timeout)

    # -- answers, in the thread of the link ---------------------------------------------------

    def tell(self, crew: Crew) -> None:
        """Tell a crew the news of the swarm's directory, now and later. The link ends with the crew."""
        self._crew = weakref.ref(crew)
        crew.take(self._news)

    def _take(self, data: bytes) -> None:
        self._heard = time.monotonic()
        if not data:
            return
        number, failure, value = plain.decode(data, tuple[int, str | None, Any])
        if number == END:
            self._lose(f"has ended the link: {value}")
        elif number == NEWS:
            self._news = convert(value, SwarmNews)
            if self._crew is not None and (crew := self._crew()) is not None:
                crew.take(self._news)
        elif (known := self._pending.pop(number, None)) is not None:
            future, kind = known
            if failure is None:
                future.set_result(convert(value, kind))
            else:
                future.set_exception(_error(failure, value))

    def _tick(self) -> None:
        self._link.send(b"")
        if self._crew is not None and self._crew() is None:
            self.close()
        if time.monotonic() - self._heard > SILENT_SECONDS:
            self._lose(
                f"has not answered for {SILENT_SECONDS:g} s: its process has ended, or cannot be reached from here, or "
                "the invitation is of an earlier swarm"
            )

    def _lose(self, why: str) -> None:
        """Fail all calls, and end. A second call does nothing."""
        with self._lock:
            if self._why:
                return
            self._why = f"the swarm's door at {self._address} {why}. Connect again, by a new invitation if need be"
            pending, self._pending = list(self._pending.values()), {}
        for future, _ in pending:
            future.set_exception(WorkerLost(self._why))
        self._link.close()

    def close(self) -> None:
        """End the link, and remove the model's files. A second call does nothing."""
        self._link.send(b"bye")
        self._lose("was left")
        if self._directory is not None:
            self._directory.remove()

    # -- the model ----------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Read the model's configuration and tokenizer, and return its checkpoint, which reads weights by calls."""
        sweep()  # what killed clients have left
        label = f"agent-{os.getpid()}-{self.me.incarnation:x}"
        self._directory = LockedDirectory(runtime_directory(), label)
        weakref.finalize(self, self._directory.remove)  # when this process ends
        texts, sizes = self.ask("texts", timeout=_ANSWER_SECONDS)
        for name in TEXTS:  # no other names
            if name in texts:
                (self._directory.path / name).write_bytes(texts[name])
        found = Checkpoint(self._directory.path, FarWeights(self, sizes))
        self._config = found.config
        return found


def _error(name: str, text: str) -> Exception:
    """Return an error of nbdist's, or a TimeoutError, by the name of its class; any other one as a RemoteError."""
    kinds: list[type[Exception]] = [NbdistError, TimeoutError]
    for kind in kinds:
        kinds += kind.__subclasses__()  # these are looked at in turn
    return next((kind(text) for kind in kinds if kind.__name__ == name), RemoteError(f"{name}: {text}"))
