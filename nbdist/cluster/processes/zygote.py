"""The zygote: the process that imports torch once, forks the workers, and cleans up after them.

::

    the owner: the notebook               the zygote                                    the workers
    ┌───────────┐  Preload, Start, Signal, ┌─────────┐  fork, or spawn: `_start`         ┌─────────┐
    │ Processes │  Hurry ────────────────> │ _Zygote │ ────────────────────────────────> │ worker0 │ ──> processes
    │           │ <─────────────────────── │         │ ────────────────────────────────> │ worker1 │     that it starts
    └───────────┘  ZygoteReady, Preloaded, └─────────┘                                   └─────────┘
                   Started, ProcessFailed, ProcessEnded
                   over a socket pair: `MessageSocket`

    this one ends              the zygote notices by         and then
    a worker                   SIGCHLD                       `_reap`: kills the worker's process group, reads its last
                                                             words, sends ProcessEnded
    the owner, even killed     the line closes; `_owner`     `_end`: kills everything that was started from here,
                               becomes readable              removes the run directory, exits
    the zygote, killed         (Linux kills the workers: `_die_with`)

The zygote stands between the notebook and its workers because it must outlive both to clean up. It runs no code of the
user's, except for imports before the first worker starts, and holds no lock, so nothing can keep it from cleaning up.

Workers are spawned, and start more slowly, where forking is not safe (another thread runs, or the zygote has used a
GPU), not possible, or not wanted (``NBDIST_FORK=0``).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

_prctl = ctypes.CDLL(None).prctl
_PDEATHSIG, _SUBREAPER = 1, 36  # options of prctl: the signal at the parent's death; adopt the orphans of descendants

_THREAD_ENDS_WITHIN = 0.3  # seconds for which the system may still list a thread that has been joined
LAST_WORDS = "NBDIST_LAST_WORDS"
"""The environment variable that tells a worker the file number of its socket for `leave_last_words`."""

_IDLE_THREADS_END_WITHIN = 5.0  # the same after the zygote's own imports, for which nobody waits
_IDLE_FOR = 0.1  # seconds without a request before the zygote imports the next module of `Setup.idle`

_SPAWN = "from nbdist.cluster.processes.zygote import spawned; spawned()"


class Setup(msgspec.Struct):
    """The zygote's only argument, as JSON."""

    line: int
    """The file number of the zygote's end of the socket pair."""
    folder: str
    """The run directory, which the zygote removes when it ends."""
    owner: int
    """The pid of the process that started the zygote. The zygote ends when that process ends."""
    preload: list[str]
    """Modules to import before any worker starts."""
    fork: bool = True
    """True to fork workers where that is safe; else they are spawned."""
    idle: list[str] = []
    """Modules to import one after the other while nothing is asked, until the first request."""


class Hurry(msgspec.Struct, tag="hurry"):
    """Request: import no more of `Setup.idle`, because workers are wanted."""


class Preload(msgspec.Struct, tag="preload"):
    """Request: import more modules, before the first worker starts, as the owner would import them now."""

    modules: list[str]
    environment: dict[str, str]
    directory: str
    path: list[str]
    """The owner's ``sys.path``."""


class Start(msgspec.Struct, tag="start"):
    """Request: start a worker process."""

    name: str
    entry: str
    """``module:function``, which the worker calls with the arguments."""
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    log: str
    """The file that gets standard output and error while ipykernel does not capture them."""
    path: list[str]


class Signal(msgspec.Struct, tag="signal"):
    """Request: send a signal to a worker. Only its parent can be sure that the pid has not been reused."""

    name: str
    number: int


class ZygoteReady(msgspec.Struct, tag="ready"):
    """Event: the imports of `Setup` are done."""

    forks: bool
    """True if workers will be forked, False if they will be spawned."""
    complaints: list[str]
    """The modules that could not be imported, each with its error."""


class Preloaded(msgspec.Struct, tag="preloaded"):
    """Event: the imports of `Preload` are done. It has the fields of `ZygoteReady`."""

    forks: bool
    complaints: list[str]


class Started(msgspec.Struct, tag="started"):
    """Event: a worker process exists."""

    name: str
    pid: int


class ProcessFailed(msgspec.Struct, tag="failed"):
    """Event: a worker process could not be made."""

    name: str
    why: str


class ProcessEnded(msgspec.Struct, tag="ended"):
    """Event: a worker process has ended, with its exit code or minus the number of the signal that killed it."""

    name: str
    code: int


Request = Hurry | Preload | Start | Signal  # what the owner sends
Event = ZygoteReady | Preloaded | Started | ProcessFailed | ProcessEnded  # what the zygote sends


def encode_message(message: Any) -> bytes:
    """Return a message, or a tuple with one, as JSON in ASCII, without line breaks."""
    # Not by msgspec's JSON, which cannot have surrogates: Python has them for bytes that are not UTF-8, in environment
    # variables and paths.
    return json.dumps(msgspec.to_builtins(message)).encode()


def decode_message(data: bytes | str, type: Any) -> Any:
    """Return the message of this type, perhaps a union of types, that `encode_message` has written."""
    return msgspec.convert(json.loads(data), type)


class MessageSocket:
    """One end of the socket between owner and zygote, which carries one JSON message per text line."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = b""

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; do nothing if the other side has closed. Waits while the other side does not read.

        One thread at a time may call this, and nothing may interrupt it: a large message is sent in parts.
        """
        self.send_encoded(encode_message(message))

    def send_encoded(self, message: bytes) -> None:
        """Send a message that `encode_message` has written, in the same way as `send`."""
        with contextlib.suppress(OSError):
            self.socket.sendall(message + b"\n")

    def receive(self) -> list[bytes] | None:
        """Wait for data; return the lines that are now complete, perhaps none. None if the other side has closed."""
        with contextlib.suppress(ConnectionResetError):
            if data := self.socket.recv(1 << 16):
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                return lines
        return None


def main() -> None:
    """Run the zygote, the entry of its process; in a process that it forks, run the worker."""
    if (start := _Zygote(decode_message(sys.argv[1], Setup)).serve()) is not None:
        _become(start)


@contextlib.contextmanager
def frozen_imports(collect: bool = False) -> Iterator[None]:
    """Import modules in the block without garbage collections, and freeze all objects that exist at its end.

    Without this, collections take a sixth of the time of the import of torch, and find almost nothing. Later
    collections in each worker would visit the 340,000 objects of all modules, and write to pages that forked workers
    share. ``collect`` runs one collection at the end, for modules that may leave much behind: the user's.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collect:
            gc.collect()
        gc.freeze()
        if was_enabled:
            gc.enable()


def fork_zygote(setup: Setup, log: int, environment: Mapping[str, str]) -> int:
    """Fork the zygote from this process, which has imported the modules that workers need; return the zygote's pid.

    Only a process without other threads may call this. ``log`` is the file of the zygote's standard output and error.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        _redirect(log, environment)
        start = _Zygote(setup).serve()
        code = 0 if start is None else _run_to_the_end(start)
    except BaseException:  # nothing may leave: the frames above are another program's
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # ends here, too: to return would run that program


def _redirect(log: int, environment: Mapping[str, str]) -> None:
    """Give a forked process what `subprocess` gives a spawned one: an empty standard input, its log and variables."""
    null = os.open(os.devnull, os.O_RDONLY)
    for file, standard in ((null, 0), (log, 1), (log, 2)):
        os.dup2(file, standard)
    os.close(null)
    os.environ.clear()
    os.environ.update(environment)


def _run_to_the_end(start: Start) -> int:
    """Run a worker in a process that has another program's stack, because of `fork_zygote`; return its exit code."""
    code = 0
    try:
        _become(start)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # the worker's: printed and turned into an exit code, as Python would
        traceback.print_exc()
        code = 1
    # What Python does as it exits. To return for that would run the other program.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


def spawned() -> None:
    """Run a worker in a fresh interpreter; its `Start` request comes on standard input, which then becomes empty."""
    parent, start = decode_message(sys.stdin.buffer.read(), tuple[int, Start])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _die_with(parent)
    _become(start)


def _become(start: Start) -> None:
    """Call the entry function of a worker process, in the directory and with the ``sys.path`` of its request."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the zygote ignores SIGINT, and its children inherit that
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # children of Ray's processes have SIGINT blocked
    os.chdir(start.directory)
    sys.path[:] = start.path
    sys.argv = [start.entry]  # without the arguments: the secret of the cluster may be among them
    module, _, function = start.entry.partition(":")
    getattr(importlib.import_module(module), function)(*start.arguments)


class _Zygote:
    """The zygote's state: its socket to the owner (the notebook), and the workers that live, by pid."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._line = MessageSocket(socket.socket(fileno=setup.line))
        self._line.socket.set_inheritable(False)
        self._workers: dict[int, str] = {}  # the names of those that have not been reaped, by pid
        # By worker: the socket in which its pipes wait for `_read_last_words`, and the path of its log.
        self._unread: dict[int, tuple[socket.socket, str]] = {}
        self._forks = False  # decided after the imports, and again after each later one
        # The variables that the imports of `Preload` have set, and the entries they have added to ``sys.path``.
        self._set: dict[str, str] = {}
        self._added: list[str] = []
        self._wakeup, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # readable after a signal, for `_listen`
        self._owner = _open_process(setup.owner)  # readable when the owner ends; -1 if there is none

    def serve(self) -> Start | None:
        """Import, then serve requests until the owner ends, and exit; in a forked worker, return the request for it."""
        # A forked worker returns, so that it has no frame of the zygote's.
        me = os.getpid()
        failed = False
        _prctl(_SUBREAPER, 1, 0, 0, 0)
        self._heed_signals()
        try:
            complaints = self._import(self._setup.preload)
            self._forks = self._setup.fork and _is_safe_to_fork()
            self._line.send(ZygoteReady(self._forks, complaints))
            return self._listen()
        except Exception:  # the zygote's own: it ends, and the owner finds the traceback in the log
            traceback.print_exc()
            sys.stderr.flush()
            failed = True
            return None
        finally:
            if os.getpid() == me:  # else this is a forked worker
                self._end(keep_folder=failed)  # the owner reads the traceback in the log there, and removes the folder

    def _heed_signals(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _end)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only signals with a handler write to the wakeup file
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def _import(self, modules: Sequence[str], *, collect: bool = False) -> list[str]:
        """Import modules; return the names and errors of the modules that cannot be imported."""
        # This takes seconds, during which no request is read. So a thread watches for the owner's end meanwhile.
        done = threading.Event()
        watch = threading.Thread(target=self._watch_owner, args=(done,))
        watch.start()
        complaints = []
        with frozen_imports(collect):
            for name in modules:
                try:
                    importlib.import_module(name)
                except _Ended:  # SIGTERM, and not the module's own error
                    raise
                except (Exception, SystemExit) as error:  # a module that is a program may call sys.exit
                    complaints.append(f"{name}: {type(error).__name__}: {error}")
        done.set()
        watch.join()  # a process with two threads cannot fork safely
        return complaints

    def _watch_owner(self, done: threading.Event) -> None:
        """End the zygote and all its workers if the owner ends before ``done`` is set. In a thread of its own."""
        poller = select.poll()
        poller.register(self._line.socket, select.POLLRDHUP)
        if self._owner >= 0:
            poller.register(self._owner, select.POLLIN)
        while not done.is_set():
            if poller.poll(50):
                self._end()  # with the processes that an import may have started

    def _listen(self) -> Start | None:
        """Serve the owner's requests, and reap workers; return None, or in a forked worker the request for it."""
        idle = self._setup.idle[::-1] if self._forks else []
        poller = select.poll()
        poller.register(self._line.socket, select.POLLIN)
        poller.register(self._wakeup, select.POLLIN)
        if self._owner >= 0:
            poller.register(self._owner, select.POLLIN)
        while True:
            found = poller.poll(_IDLE_FOR * 1000 if idle else None)
            if not found:
                self._import([idle.pop()])
                self._heed_signals()
                self._forks = _is_safe_to_fork(_IDLE_THREADS_END_WITHIN)
                if not self._forks:
                    idle.clear()
            for file, _ in found:
                if file == self._owner:
                    return None
                if file == self._wakeup:
                    os.read(self._wakeup, 4096)
                    self._reap()
                    continue
                if (lines := self._line.receive()) is None:
                    return None
                idle.clear()  # imports would keep the processor from those who wait for workers
                for line in lines:
                    request: Request = decode_message(line, Request)
                    if isinstance(request, Signal):
                        self._signal(request)
                    elif isinstance(request, Preload):
                        self._preload(request)
                    elif isinstance(request, Start) and self._start(request):
                        return request

    # -- starting -----------------------------------------------------------------------------

    def _preload(self, request: Preload) -> None:
        """Import modules in the owner's present environment, directory and path, and send Preloaded."""
        complaints = []
        if self._forks:  # a spawned worker would not have the modules
            os.environ.update(request.environment)
            try:
                os.chdir(request.directory)
            except OSError as error:  # it was deleted a moment ago
                self._line.send(Preloaded(self._forks, [f"anything in {request.directory}: {error.strerror}"]))
                return
            sys.path[:] = request.path
            before = dict(os.environ)
            complaints = self._import(request.modules, collect=True)
            # Workers get what the imports have set in the environment. Signal handlers they have set are replaced.
            self._set = {name: value for name, value in os.environ.items() if before.get(name) != value}
            self._added = [entry for entry in sys.path if entry not in request.path]
            self._heed_signals()
            self._forks = _is_safe_to_fork()  # an import may have started a thread or used a GPU
        self._line.send(Preloaded(self._forks, complaints))

    def _start(self, start: Start) -> bool:
        """Start a worker and send Started or ProcessFailed; return True in the forked worker itself, else False."""
        # A forked worker would write text that is still buffered here a second time.
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        ours, theirs = socket.socketpair()  # for the worker's last words: see `leave_last_words`
        start.environment[LAST_WORDS] = str(theirs.fileno())
        try:
            pid = os.fork() if self._forks else self._spawn(start, theirs.fileno())
        except (OSError, ValueError) as error:  # ValueError for a variable that no environment can have
            ours.close()
            theirs.close()
            self._line.send(ProcessFailed(start.name, str(error)))
            return False
        if pid == 0:
            try:
                ours.close()
                theirs.detach()  # stays open: `leave_last_words` finds it by its number
                self._settle_in(start, parent)
            except BaseException:  # the forked worker must not go on as a second zygote, whatever fails
                traceback.print_exc()
                os._exit(1)
            return True
        theirs.close()
        self._workers[pid] = start.name
        self._unread[pid] = ours, start.log
        self._line.send(Started(start.name, pid))
        return False

    def _settle_in(self, start: Start, parent: int) -> None:
        """In a forked worker, give up the zygote's session, handlers and files, and take the request's environment."""
        os.setsid()
        _die_with(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for file in (self._wakeup, self._wake, self._owner):
            if file >= 0:
                os.close(file)
        self._line.socket.close()  # kept open, it would hide the zygote's death from the owner
        self._workers.clear()
        for other, _ in self._unread.values():
            other.close()
        log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        _redirect(log, {**start.environment, **self._set})
        os.close(log)
        start.path += self._added
        _reseed()

    @staticmethod
    def _spawn(start: Start, inherited: int) -> int:
        """Start `spawned` in a fresh interpreter, which inherits the file ``inherited``; return its pid."""
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
            stdin.write(encode_message((os.getpid(), start)))
        process.returncode = 0  # keeps Popen from waiting for the process, which `_reap` does
        return process.pid

    # -- ending -------------------------------------------------------------------------------

    def _signal(self, request: Signal) -> None:
        """Send a signal to a worker; ignore a name that no worker has, or has any more."""
        for pid, name in self._workers.items():
            if name == request.name:
                os.kill(pid, request.number)

    def _reap(self) -> None:
        """Reap all children that have ended, and send ProcessEnded for each that is a worker."""
        # The others are orphans: a process that a worker started is the zygote's child once the worker ends. A process
        # that has left the worker's process group lives until `_end`.
        with contextlib.suppress(ChildProcessError):  # there is no child left
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in self._workers:
                    _kill_group(found.si_pid)  # before waitpid, after which the number may be another process's
                _, status = os.waitpid(found.si_pid, 0)
                if (name := self._workers.pop(found.si_pid, None)) is not None:
                    _read_last_words(*self._unread.pop(found.si_pid))
                    self._line.send(ProcessEnded(name, os.waitstatus_to_exitcode(status)))

    def _end(self, keep_folder: bool = False) -> None:
        """Kill every process that was started from here, remove the run directory unless told to keep it, and exit."""
        for pid in list(self._workers):
            _kill_group(pid)
        while children := _children():  # as the subreaper, the zygote gets the children of killed processes
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
        if not keep_folder:
            shutil.rmtree(self._setup.folder, ignore_errors=True)
        os._exit(0)  # an ordinary exit takes long for all these modules


class _Ended(SystemExit):
    """Raised by SIGTERM."""


def _end(*_: object) -> None:
    raise _Ended(0)


def leave_last_words(streams: Sequence[int]) -> None:
    """In a worker, let the zygote read the text left in the pipes ``streams`` if the worker dies."""
    # Only the first call does something.
    if (number := os.environ.pop(LAST_WORDS, None)) is not None:
        with socket.socket(fileno=int(number)) as line:
            # The zygote receives this message after the worker's death, so until then only the worker reads the pipes.
            socket.send_fds(line, [b"!"], list(streams))


def _read_last_words(line: socket.socket, log: str) -> None:
    """Append to a dead worker's log the text that is left in the pipes that it sent with `leave_last_words`."""
    with line, contextlib.suppress(OSError), open(log, "ab") as file:
        line.setblocking(False)
        _, pipes, _, _ = socket.recv_fds(line, 1, 4)
        for pipe in pipes:
            os.set_blocking(pipe, False)
            with contextlib.suppress(BlockingIOError), open(pipe, "rb", buffering=0) as left:
                while data := left.read(1 << 16):
                    file.write(data)


def _open_process(pid: int) -> int:
    """Return a file that becomes readable when the owner ends; -1 where the system has none."""
    # The socket to the owner does not suffice: a process that the owner has forked keeps it open.
    try:
        file = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1  # the socket to the owner must do
    if os.getppid() != pid:
        # The owner ended before the call, and another process may have its number.
        os._exit(0)
    return file


def _die_with(parent: int) -> None:
    """Let Linux kill this process when its parent dies, even while a thread holds the GIL; exit if it is dead."""
    _prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl, so no signal will come
        os._exit(0)


def _kill_group(pid: int) -> None:
    """Kill a worker and the processes in its process group, whose number is the worker's pid."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _is_safe_to_fork(within: float = _THREAD_ENDS_WITHIN) -> bool:
    """Return whether a forked worker would be sound: this process has one thread, and has not used a GPU."""
    # A child has a copy of the forking thread only, and cannot use CUDA that was initialised before the fork.
    deadline = time.monotonic() + within
    while _threads() > 1:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.002)
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


def _threads() -> int:
    with contextlib.suppress(OSError):
        # C libraries' threads count, too: Python's count lacks them.
        return len(os.listdir("/proc/self/task"))
    return threading.active_count()


def _children() -> list[int]:
    me, found = str(os.getpid()), []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[1] == me:
                found.append(int(path.parent.name))
    return found


def _reseed() -> None:
    """Seed the random generators of a forked worker again: else all workers would draw the same numbers."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()
