"""The process that workers come from: it imports what they need once, forks them, and sees them out.

It stands between the notebook and its workers because it is the one process that outlives either. However the notebook
ends, SIGKILL included, the line to it closes; the zygote then kills all that came from it, grandchildren too, and
removes the run directory (G5). It runs nobody's code, but for what it is told to import before there are workers, and
holds no lock, so nothing keeps it from that. Should the zygote itself be killed, the kernel kills the workers.

Where forking is not safe (a thread runs already) or not to be had, workers are spawned: slower, otherwise the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec

__all__ = [
    "Ended",
    "Failed",
    "Line",
    "Preload",
    "Preloaded",
    "Ready",
    "Setup",
    "Signal",
    "Start",
    "Started",
    "leave_last_words",
    "main",
    "spawned",
]

_PDEATHSIG, _SUBREAPER = 1, 36
_ENDING = 0.3
"""Seconds that a thread which has been joined may be there for still."""
LAST_WORDS = "NBDIST_LAST_WORDS"
"""Names, to a worker, the file by which it hands over what it may leave unread."""

_SPAWN = "from nbdist.cluster.zygote import spawned; spawned()"


class Setup(msgspec.Struct):
    """What the zygote is told when it starts."""

    line: int
    """The file number of its end of the line."""
    folder: str
    """The run directory; removed at the end."""
    owner: int
    """The pid of who started it; it ends when that ends."""
    preload: list[str]
    fork: bool = True


class Preload(msgspec.Struct, tag="preload"):
    """Import more, before the first worker is started, as the owner would now."""

    modules: list[str]
    environment: dict[str, str]
    directory: str
    path: list[str]
    """``sys.path``."""


class Start(msgspec.Struct, tag="start"):
    """Start a worker process."""

    name: str
    entry: str
    """``module:function``; it is called with the arguments."""
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    log: str
    """A file for what is written to standard output and error before, and after, anybody captures them."""
    path: list[str]
    """``sys.path`` there."""


class Signal(msgspec.Struct, tag="signal"):
    """Send a signal to a worker: only its parent knows that the pid is still that worker's."""

    name: str
    number: int


class Ready(msgspec.Struct, tag="ready"):
    """The zygote has imported what it should."""

    forks: bool
    complaints: list[str]


class Preloaded(msgspec.Struct, tag="preloaded"):
    """That has been done."""

    forks: bool
    complaints: list[str]


class Started(msgspec.Struct, tag="started"):
    """A worker process exists."""

    name: str
    pid: int


class Failed(msgspec.Struct, tag="failed"):
    """A worker process could not be made."""

    name: str
    why: str


class Ended(msgspec.Struct, tag="ended"):
    """A worker process has ended: with its exit code, or minus the signal that killed it."""

    name: str
    code: int


class Line:
    """One JSON message per text line, over a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = b""

    def send(self, message: msgspec.Struct) -> None:
        """Send; nothing happens where the other side has gone."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self) -> list[bytes] | None:
        """What has come, in whole lines; None at the end. Waits if there is nothing yet."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return lines


def main() -> None:
    """Be the zygote, and in a process that it forks, the worker."""
    start = _Zygote(msgspec.json.decode(sys.argv[1], type=Setup)).serve()
    if start is not None:
        _become(start)


def spawned() -> None:
    """Be a worker that was started afresh."""
    parent, start = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[int, Start])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _die_with(parent)
    _become(start)


def _become(start: Start) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the zygote ignores it, and that is inherited
    os.chdir(start.directory)
    sys.path[:] = start.path
    sys.argv = [start.entry, *start.arguments]
    module, _, function = start.entry.partition(":")
    getattr(importlib.import_module(module), function)(*start.arguments)


class _Zygote:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._line = Line(socket.socket(fileno=setup.line))
        self._line.socket.set_inheritable(False)
        self._workers: dict[int, str] = {}
        self._unread: dict[int, tuple[socket.socket, str]] = {}
        self._forks = False
        self._set: dict[str, str] = {}
        self._added: list[str] = []
        """What modules that were imported for the user have set in the environment, and added to ``sys.path``."""
        self._wakeup, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._owner = _open_process(setup.owner)

    def serve(self) -> Start | None:
        """Work until the owner ends; in a forked worker, return what it shall be."""
        me = os.getpid()
        _prctl(_SUBREAPER, 1)
        self._heed_signals()
        try:
            complaints = self._import(self._setup.preload)
            self._forks = self._setup.fork and hasattr(os, "fork") and _is_safe_to_fork()
            self._line.send(Ready(self._forks, complaints))
            return self._listen()
        finally:
            if os.getpid() == me:
                self._end()

    def _heed_signals(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _end)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def _import(self, modules: Sequence[str]) -> list[str]:
        """Import what workers need, and look after the owner meanwhile: it takes seconds."""
        done = threading.Event()
        watch = threading.Thread(target=self._watch_owner, args=(done,))
        watch.start()
        complaints = []
        for name in modules:
            try:
                importlib.import_module(name)
            except _Ended:
                raise
            except (Exception, SystemExit) as error:  # a program that is imported may end
                complaints.append(f"{name}: {type(error).__name__}: {error}")
        done.set()
        watch.join()
        gc.collect()
        gc.freeze()  # a collection in a worker must not touch, and so copy, the pages it shares with us
        return complaints

    def _watch_owner(self, done: threading.Event) -> None:
        poller = select.poll()
        poller.register(self._line.socket, select.POLLRDHUP)
        if self._owner >= 0:
            poller.register(self._owner, select.POLLIN)
        while not done.is_set():
            if poller.poll(50):
                self._end()  # what is being imported may have started processes

    def _listen(self) -> Start | None:
        poller = select.poll()
        poller.register(self._line.socket, select.POLLIN)
        poller.register(self._wakeup, select.POLLIN)
        if self._owner >= 0:
            poller.register(self._owner, select.POLLIN)
        while True:
            for file, _ in poller.poll():
                if file == self._owner:
                    return None
                if file == self._wakeup:
                    os.read(self._wakeup, 4096)
                    self._reap()
                    continue
                lines = self._line.receive()
                if lines is None:
                    return None
                for line in lines:
                    request: Preload | Start | Signal = msgspec.json.decode(line, type=Preload | Start | Signal)
                    if isinstance(request, Signal):
                        self._signal(request)
                    elif isinstance(request, Preload):
                        self._preload(request)
                    elif self._start(request):
                        return request

    # -- starting -----------------------------------------------------------------------------

    def _preload(self, request: Preload) -> None:
        complaints = []
        if self._forks:  # what is spawned would have nothing of it
            os.environ.update(request.environment)
            os.chdir(request.directory)
            sys.path[:] = request.path
            before = dict(os.environ)
            complaints = self._import(request.modules)
            # What that has set is theirs who have imported it; signals are not.
            self._set = {name: value for name, value in os.environ.items() if before.get(name) != value}
            self._added = [entry for entry in sys.path if entry not in request.path]
            self._heed_signals()
            self._forks = _is_safe_to_fork()
        self._line.send(Preloaded(self._forks, complaints))

    def _start(self, start: Start) -> bool:
        """Start a worker; true in the worker itself."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        ours, theirs = socket.socketpair()
        start.environment[LAST_WORDS] = str(theirs.fileno())
        try:
            pid = os.fork() if self._forks else self._spawn(start, theirs.fileno())
        except OSError as error:
            ours.close()
            theirs.close()
            self._line.send(Failed(start.name, str(error)))
            return False
        if pid == 0:
            try:
                ours.close()
                theirs.detach()
                self._settle_in(start, parent)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            return True
        theirs.close()
        self._workers[pid] = start.name
        self._unread[pid] = ours, start.log
        self._line.send(Started(start.name, pid))
        return False

    def _settle_in(self, start: Start, parent: int) -> None:
        """In a forked worker: become a process of one's own."""
        os.setsid()
        _die_with(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for file in (self._wakeup, self._wake, self._owner):
            if file >= 0:
                os.close(file)
        self._line.socket.close()
        self._workers.clear()
        for other, _ in self._unread.values():
            other.close()
        log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for file, standard in ((null, 0), (log, 1), (log, 2)):
            os.dup2(file, standard)
        os.close(log)
        os.close(null)
        os.environ.clear()
        os.environ.update(start.environment)
        os.environ.update(self._set)
        start.path += self._added
        _reseed()

    @staticmethod
    def _spawn(start: Start, inherited: int) -> int:
        boot = f"import sys; sys.path[:] = {start.path!r}; {_SPAWN}"
        with open(start.log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", boot],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=start.environment,
                pass_fds=[inherited],
                start_new_session=True,
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(msgspec.json.encode((os.getpid(), start)))
        process.returncode = 0  # it is `_reap` that waits for it
        return process.pid

    # -- ending -------------------------------------------------------------------------------

    def _signal(self, request: Signal) -> None:
        for pid, name in self._workers.items():
            if name == request.name:
                os.kill(pid, request.number)

    def _reap(self) -> None:
        """Take leave of all that has ended, workers and what they left to us."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            if found.si_pid in self._workers:
                _kill_group(found.si_pid)  # while the number cannot be anybody else's
            _, status = os.waitpid(found.si_pid, 0)
            name = self._workers.pop(found.si_pid, None)
            if name is not None:
                _read_last_words(*self._unread.pop(found.si_pid))
                self._line.send(Ended(name, os.waitstatus_to_exitcode(status)))

    def _end(self) -> None:
        """Kill all that came from here, and leave nothing."""
        for pid in list(self._workers):
            _kill_group(pid)
        while children := _children():  # those of the killed become ours, whatever session they are in
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
        shutil.rmtree(self._setup.folder, ignore_errors=True)
        os._exit(0)  # nothing else is left to do, and taking down every module takes long


class _Ended(SystemExit):
    """It is to end."""


def _end(*_: object) -> None:
    raise _Ended(0)


def leave_last_words(streams: Sequence[int]) -> None:
    """In a worker: let the zygote read what is still in these pipes should the worker die before it has read it.

    They lie in a message that the zygote takes only then; meanwhile nobody but the worker reads them.
    """
    number = os.environ.pop(LAST_WORDS, None)
    if number is not None:
        with socket.socket(fileno=int(number)) as line:
            socket.send_fds(line, [b"!"], list(streams))


def _read_last_words(line: socket.socket, log: str) -> None:
    with line, contextlib.suppress(OSError), open(log, "ab") as file:
        line.setblocking(False)
        _, pipes, _, _ = socket.recv_fds(line, 1, 4)
        for pipe in pipes:
            os.set_blocking(pipe, False)
            with contextlib.suppress(BlockingIOError), open(pipe, "rb", buffering=0) as left:
                while data := left.read(1 << 16):
                    file.write(data)


def _open_process(pid: int) -> int:
    """A file that becomes readable when the owner ends: the line stays open in what the owner has forked."""
    try:
        file = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1  # the end of the line must do
    if os.getppid() != pid:
        os._exit(0)
    return file


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, which holds also while a thread keeps the GIL."""
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError):  # Linux alone has it
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _is_safe_to_fork() -> bool:
    """Whether a fork has all that this process has: it has but one of its threads, and nothing of its GPUs."""
    deadline = time.monotonic() + _ENDING
    while _threads() > 1:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.002)
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _children() -> list[int]:
    me, found = str(os.getpid()), []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[1] == me:
                found.append(int(path.parent.name))
    return found


def _reseed() -> None:
    """Forked generators would all give the same numbers."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()
