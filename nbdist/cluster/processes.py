"""The worker processes of one cluster, as their owner sees them: through the zygote.

This is the mechanism of the local launcher: start, signal, hear of ends, and be sure that nothing is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec

from nbdist.cluster.zygote import Ended, Failed, Line, Preload, Preloaded, Ready, Setup, Signal, Start, Started
from nbdist.errors import UsageError, WorkerLost

__all__ = ["Processes", "describe_exit"]

_log = logging.getLogger("nbdist.cluster")
_BOOT = "from nbdist.cluster.zygote import main; main()"


class Processes:
    """A zygote and the workers that came from it.

    ``on_end(name, code)`` is called in a thread of this object's own, once for every worker that ends.
    """

    def __init__(
        self,
        folder: Path,
        on_end: Callable[[str, int], None],
        *,
        preload: Sequence[str] = (),
        fork: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.on_end = on_end
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._starting: dict[str, Future[int]] = {}
        self._living: dict[str, int] = {}
        self._ready: Future[Ready] = Future()
        self._preloading: Future[None] = Future()
        self._closing = False
        ours, theirs = socket.socketpair()
        setup = Setup(theirs.fileno(), str(folder), os.getpid(), list(preload), fork)
        with contextlib.ExitStack() as undo, theirs, (folder / "zygote.log").open("wb") as log:
            undo.callback(ours.close)
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {_BOOT}", msgspec.json.encode(setup)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=None if environment is None else dict(environment),
            )
            undo.pop_all()
        self._line = Line(ours)
        self._thread = threading.Thread(target=self._read, name="nbdist-processes", daemon=True)
        self._thread.start()

    def ready(self, timeout: float | None = None) -> Ready:
        """Wait until the zygote has imported what it should."""
        return self._ready.result(timeout)

    def preload(self, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> Future[None]:
        """Have the zygote import more, once, before any worker is started; it fails where one cannot be imported."""
        self._line.send(Preload(list(modules), _environment(environment), os.getcwd(), _path()))
        return self._preloading

    def start(
        self,
        name: str,
        entry: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Future[int]:
        """Start a worker that calls ``entry``, a ``module:function``; its pid, as soon as it is known."""
        with self._lock:
            if self._closing:
                raise WorkerLost(f"{name} cannot start: the process that starts workers has ended")
            if name in self._living or name in self._starting:
                raise UsageError(f"there is a living worker {name!r} already")
            future = self._starting[name] = Future[int]()
        start = Start(
            name,
            entry,
            list(arguments),
            _environment(environment),
            os.getcwd(),
            str(self.log(name)),
            _path(),
        )
        self._line.send(start)
        return future

    def log(self, name: str) -> Path:
        """The file with what a worker wrote where nobody captured it."""
        return self.folder / f"{name}.log"

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a worker, if it lives."""
        self._line.send(Signal(name, number))

    @property
    def living(self) -> dict[str, int]:
        """The pids of the workers that live, by name."""
        with self._lock:
            return dict(self._living)

    @property
    def pid(self) -> int:
        """The zygote's own."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether workers can be started."""
        return not self._closing and self._process.poll() is None

    def close(self, timeout: float = 10.0) -> None:
        """Kill all workers and what they started, and wait until nothing is left."""
        with self._lock:
            self._closing = True
        with contextlib.suppress(OSError):  # closed before
            self._line.socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        self._line.socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- what the zygote says -----------------------------------------------------------------

    def _read(self) -> None:
        while (lines := self._line.receive()) is not None:
            for line in lines:
                self._take(msgspec.json.decode(line, type=Ready | Preloaded | Started | Failed | Ended))
        self._zygote_ended()

    def _take(self, event: Ready | Preloaded | Started | Failed | Ended) -> None:
        if isinstance(event, Ready):
            for complaint in event.complaints:
                _log.warning("what all workers need could not be imported once for all: %s", complaint)
            self._ready.set_result(event)
        elif isinstance(event, Preloaded):
            self._imported(event)
        elif isinstance(event, Started):
            with self._lock:
                self._living[event.name] = event.pid
                future = self._starting.pop(event.name)
            if future.set_running_or_notify_cancel():
                future.set_result(event.pid)
        elif isinstance(event, Failed):
            with self._lock:
                future = self._starting.pop(event.name)
            if future.set_running_or_notify_cancel():
                future.set_exception(WorkerLost(f"{event.name} cannot start: {event.why}"))
        else:
            with self._lock:
                self._living.pop(event.name, None)
            self.on_end(event.name, event.code)

    def _imported(self, event: Preloaded) -> None:
        if not event.forks:
            why = "it has begun a thread, or uses a GPU" if self.ready().forks else "they are not forked here"
            _log.warning("workers begin without what was to be imported before they start: %s", why)
        if self._preloading.set_running_or_notify_cancel():
            if event.complaints:
                self._preloading.set_exception(UsageError(f"cannot import {'; '.join(event.complaints)}"))
            else:
                self._preloading.set_result(None)

    def _zygote_ended(self) -> None:
        """The kernel has killed the workers with it."""
        said = ""
        with self._lock:
            self._closing = True
            living, self._living = self._living, {}
            starting, self._starting = self._starting, {}
        with contextlib.suppress(OSError):
            said = (self.folder / "zygote.log").read_text(errors="replace").strip()
        error = WorkerLost(f"the process that starts workers has ended{': ' + said[-2000:] if said else ''}")
        if not self._ready.done():
            self._ready.set_exception(error)
        if not self._preloading.done() and self._preloading.set_running_or_notify_cancel():
            self._preloading.set_exception(error)
        for future in starting.values():
            if future.set_running_or_notify_cancel():  # nobody may wait any more
                future.set_exception(error)
        for name in living:
            self.on_end(name, -signal.SIGKILL)


def _environment(given: Mapping[str, str] | None) -> dict[str, str]:
    return dict(os.environ if given is None else given)


def _path() -> list[str]:
    return [entry and os.path.abspath(entry) for entry in sys.path]


def describe_exit(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = {"SIGKILL": " (out of memory, or killed by hand)", "SIGSEGV": " (a crash in native code)"}.get(name, "")
    return f"was killed by {name}{hint}"
