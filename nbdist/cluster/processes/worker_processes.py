"""`Processes`: starts, signals and ends the worker processes of one cluster, through a zygote. For `LocalLauncher`.

The module `nbdist.cluster.processes.zygote` has a drawing of both sides, and defines the messages between them. One
thread, `_send_all`, sends the requests of all threads. Another one, `_read`, receives the zygote's answers, and settles
the futures for which other threads wait::

    request                     event that answers it       what waits
    (the constructor)           ZygoteReady                 `ready`
    Hurry                       none
    Preload                     Preloaded                   the future of `preload`
    Start                       Started or ProcessFailed    the future of `start`
    Signal                      none
    (a worker ends)             ProcessEnded                `on_end` is called
    (the zygote ends)           the line closes             all of these: `_zygote_ended`
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from nbdist.cluster.processes import zygote
from nbdist.cluster.processes.run_directory import remove_folder
from nbdist.errors import UsageError, WorkerLost

_log = logging.getLogger("nbdist.cluster")
# The code that the zygote's interpreter runs, after it has taken over this process's ``sys.path``.
_BOOT = "from nbdist.cluster.processes.zygote import main; main()"
_POLL = 0.005  # seconds between two looks whether a forked zygote has ended


class Processes:
    """A zygote (the process that forks workers) and the workers that it has started. Any thread may call the methods.

    Two threads of its own send requests and read what the zygote sends. The second one calls ``on_end(name, code)``
    once for every worker that ends, where ``code`` is the exit code, or minus the number of the signal that killed the
    worker.

    Args:
        folder: The run directory, which must exist and contain nothing else: it is removed at the end.
        on_end: See above; by default, a function that does nothing. It may be replaced as long as no worker has been
            started.
        preload: Modules that the zygote imports at once. One that cannot be imported costs only a warning.
        idle: Modules that it imports afterwards, one after the other, until the first request.
        fork: Whether to fork workers where that is safe.
        environment: The zygote's environment variables; None for this process's variables.
        fork_zygote: Whether to fork the zygote itself from this process, which then must have no other thread: it has
            this process's imports at no cost.
    """

    def __init__(
        self,
        folder: Path,
        on_end: Callable[[str, int], None] = lambda name, code: None,
        *,
        preload: Sequence[str] = (),
        idle: Sequence[str] = (),
        fork: bool = True,
        environment: Mapping[str, str] | None = None,
        fork_zygote: bool = False,
    ) -> None:
        self.folder = folder
        self.on_end = on_end
        self.owner = os.getpid()
        """The process that started the zygote, and alone may use this object: not one that was forked from it."""
        self._lock = threading.Lock()
        # The messages to the zygote, whole, which a thread of its own sends; None ends it. So the messages of several
        # threads do not mix, no Ctrl-C cuts one, and no caller waits while the zygote imports and reads nothing.
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._starting: dict[str, Future[int]] = {}  # those that the zygote has not answered
        self._living: dict[str, int] = {}
        self._ready: Future[zygote.ZygoteReady] = Future()
        self._preloading: Future[None] = Future()
        self._closing = False  # True once no worker can start: `close` was called, or the zygote has ended
        ours, theirs = socket.socketpair()
        setup = zygote.Setup(theirs.fileno(), str(folder), os.getpid(), list(preload), fork, list(idle))
        with contextlib.ExitStack() as undo, theirs, (folder / "zygote.log").open("wb") as log:
            undo.callback(ours.close)
            self._process: subprocess.Popen[bytes] | _Forked
            if fork_zygote:
                self._process = _Forked(zygote.fork_zygote(setup, log.fileno(), _environment(environment)))
            else:
                code = f"import sys; sys.path[:] = {sys.path!r}; {_BOOT}"
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code, zygote.encode_message(setup)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=None if environment is None else dict(environment),
                )
            undo.pop_all()
        self.pid = self._process.pid
        """The zygote's process id."""
        self.line = zygote.MessageSocket(ours)
        """The line to the zygote. Only the thread `_send_all` sends on it."""
        self._thread = threading.Thread(target=self._read, name="nbdist-processes", daemon=True)
        self._thread.start()
        threading.Thread(target=self._send_all, name="nbdist-to-zygote", daemon=True).start()

    def ready(self, timeout: float | None = None) -> zygote.ZygoteReady:
        """Wait until the zygote has done its imports; return whether it forks workers, and which imports failed."""
        return self._ready.result(timeout)

    def hurry(self) -> None:
        """Let the zygote import no more of ``idle``; it ends an import that has begun. Does nothing if it is dead."""
        self._send(zygote.Hurry())

    def preload(self, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> Future[None]:
        """Let the zygote import more modules, once at most, and before any worker is started."""
        self._send(zygote.Preload(list(modules), _environment(environment), _directory(), _import_path()))
        return self._preloading

    def start(
        self, name: str, entry: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> Future[int]:
        """Start a worker that calls ``entry`` (``module:function``) with ``arguments``; return a future of its pid."""
        start = zygote.Start(
            name, entry, list(arguments), _environment(environment), _directory(), str(self.log(name)), _import_path()
        )
        with self._lock:
            if self._closing:
                raise WorkerLost(
                    f"{name} cannot start: the process that starts workers has ended; "
                    "shut this cluster down and start another"
                )
            if name in self._living or name in self._starting:
                raise UsageError(f"a worker called {name!r} runs already")
            future = self._starting[name] = Future[int]()
        self._send(start)
        return future

    def log(self, name: str) -> Path:
        """Return the file that gets the worker's standard output and error where nothing captures them."""
        return self.folder / f"{name}.log"

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a worker; do nothing if it has ended."""
        self._send(zygote.Signal(name, number))

    @property
    def living(self) -> dict[str, int]:
        """The pids of the workers that live, by name, as far as the zygote has reported."""
        with self._lock:
            return dict(self._living)

    @property
    def usable(self) -> bool:
        """Return whether the zygote lives, so that it can start workers."""
        return not self._closing and self._process.poll() is None

    def close(self, timeout: float = 10.0) -> None:
        """Kill all workers and the processes that they started, wait for that, and remove the run directory."""
        with self._lock:
            self._closing = True
        self._outbox.put(None)
        with contextlib.suppress(OSError):  # the socket was closed by an earlier call
            # The zygote ends when it reads the end of the line.
            self.line.socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)  # the workers die with the zygote: see `_die_with` there
            self._process.wait()
        if threading.current_thread() is not self._thread:  # else `on_end` has called this, in that thread
            self._thread.join(timeout)
        self.line.socket.close()
        remove_folder(self.folder)

    # -- messages to and from the zygote ---------------------------------------------------------------

    def _send(self, message: zygote.Request) -> None:
        self._outbox.put(zygote.encode_message(message))

    def _send_all(self) -> None:
        while (message := self._outbox.get()) is not None:
            self.line.send_encoded(message)

    def _read(self) -> None:
        while (lines := self.line.receive()) is not None:
            for line in lines:
                self._handle_event(zygote.decode_message(line, zygote.Event))
        self._zygote_ended()

    def _handle_event(self, event: zygote.Event) -> None:
        if isinstance(event, zygote.ZygoteReady):
            for complaint in event.complaints:
                _log.warning(
                    "a module could not be imported for all workers before they start; each worker will try again: %s",
                    complaint,
                )
            self._ready.set_result(event)
        elif isinstance(event, zygote.Preloaded):
            self._imported(event)
        elif isinstance(event, zygote.Started):
            with self._lock:
                self._living[event.name] = event.pid
                future = self._starting.pop(event.name)
            if future.set_running_or_notify_cancel():
                future.set_result(event.pid)
        elif isinstance(event, zygote.ProcessFailed):
            with self._lock:
                future = self._starting.pop(event.name)
            if future.set_running_or_notify_cancel():
                future.set_exception(WorkerLost(f"{event.name} cannot start: {event.why}"))
        else:
            with self._lock:
                self._living.pop(event.name, None)
            self.on_end(event.name, event.code)

    def _imported(self, event: zygote.Preloaded) -> None:
        if not event.forks:
            forked_before = self.ready().forks
            why = "one of them has begun a thread, or uses a GPU" if forked_before else "workers are not forked here"
            _log.warning("each worker has to import the modules to preload by itself: %s", why)
        if self._preloading.set_running_or_notify_cancel():
            if event.complaints:
                self._preloading.set_exception(
                    UsageError(f"cannot import {'; '.join(event.complaints)}. Correct the modules to preload")
                )
            else:
                self._preloading.set_result(None)

    def _zygote_ended(self) -> None:
        """Fail all futures that wait for the zygote, which has ended; report its workers, which Linux has killed."""
        said = ""
        with self._lock:
            self._closing = True  # with the tables taken, under one lock: `start` puts no future there afterwards
            living, self._living = self._living, {}
            starting, self._starting = self._starting, {}
        with contextlib.suppress(OSError):
            said = (self.folder / "zygote.log").read_text(errors="replace").strip()
        error = WorkerLost(
            "the process that starts workers has ended, so no worker can live; shut this cluster down and start another"
            f"{': ' + said[-2000:] if said else ''}"
        )
        imports: tuple[Future[Any], ...] = self._ready, self._preloading
        for future in (*(each for each in imports if not each.done()), *starting.values()):
            if future.set_running_or_notify_cancel():  # False if the caller has cancelled it
                future.set_exception(error)
        for name in living:
            self.on_end(name, -signal.SIGKILL)


class _Forked:
    """A process that was forked from this one, with the methods of `subprocess.Popen` that are needed here.

    Any thread may call them.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, 0 if it cannot be known; None if the process still runs."""
        with self._lock:
            if self.returncode is None:
                try:
                    ended, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # whoever started this process had it ignore SIGCHLD
                    self.returncode = 0
                else:
                    if ended:
                        self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code. Raises `subprocess.TimeoutExpired` after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("zygote", timeout or 0.0)
            time.sleep(_POLL)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # else the number may be another process's
            os.kill(self.pid, number)


def _environment(given: Mapping[str, str] | None) -> dict[str, str]:
    return dict(os.environ if given is None else given)


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "the working directory of this process, in which workers start, has been deleted: change to another one, "
            "with %cd in a notebook or os.chdir"
        ) from None


def _import_path() -> list[str]:
    # ``""`` stands for the current directory, and stays.
    return [entry and os.path.abspath(entry) for entry in sys.path]


def describe_exit(how: int | str) -> str:
    """Return in words how a process ended: ``how`` is its exit code, minus the signal that killed it, or words."""
    if isinstance(how, str):
        return how
    if how >= 0:
        return f"exited with code {how}"
    try:
        name = signal.Signals(-how).name
    except ValueError:
        name = f"signal {-how}"
    hint = {"SIGKILL": " (out of memory, or killed by hand)", "SIGSEGV": " (a crash in native code)"}.get(name, "")
    return f"was killed by {name}{hint}"
