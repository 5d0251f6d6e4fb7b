"""Reports, as soon as it happens, that a process of this host has ended.

A process is identified by its pid and the time at which it started, because the kernel reuses pids. Each watched
process is in one of two tables of `ProcessWatch`::

    watch ──> _polled: checked every 50 ms ─ a pidfd can be opened ──> _files: the kernel tells within a millisecond
                        │                                                              │
                        └── no such process, another start time, zombie ──> on_end <───┴── the pidfd is readable

Only these answers of the kernel mean that a process has ended: no such process (ENOENT, ESRCH), another start time,
or state Z (zombie) or X (dead). Any other error, such as EMFILE when this process has too many files open, is no
answer: the process counts as alive, and the kernel is asked again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

from nbdist.channel.resources import refusals_in_words

_LOOK_EVERY_MS = 50  # between two checks of the processes that have no pidfd
_ENDED = 0  # the start time that `_look_up` returns for a process that has ended or is a zombie

_log = logging.getLogger("nbdist.channel")


def started_at(pid: int) -> int:
    """Return when the process started, in clock ticks since boot; 0 if it has ended or the kernel does not answer."""
    return _look_up(pid) or 0


def _look_up(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot; None if the kernel does not answer."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return _ENDED
    except OSError:  # mostly EMFILE and ENFILE: reading the process table needs a file
        return None
    fields = stat.rpartition(")")[2].split()  # the program's name, before it, may have spaces and parentheses
    return _ENDED if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Return whether the process with this pid and start time runs; True if the kernel does not answer.

    ``started`` is the result of `started_at`. If it is 0, the start time is not known, and any process with this pid
    counts, even a zombie.
    """
    if started and (found := _look_up(pid)) is not None:
        return found == started
    try:
        os.kill(pid, 0)  # needs no file, but takes a zombie or another process with a reused pid for this process
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class ProcessWatch:
    """Calls ``on_end(pid)`` once for each watched process that ends, in the watch's own thread, until `close`."""

    def __init__(self, on_end: Callable[[int], None]) -> None:
        self._on_end = on_end
        self._lock = threading.Lock()
        self._files: dict[int, int] = {}  # the pid behind each open pidfd
        # The start time, by pid, of each process that has no pidfd yet, or can have none.
        self._polled: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        with refusals_in_words("cannot watch other processes"):
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def watch(self, pid: int, started: int) -> None:
        """Report the end of this process by ``on_end(pid)``; at once if it has ended already.

        ``started`` is the result of `started_at`; 0 if it is not known. A pid that is watched already is ignored.
        """
        with self._lock:
            if self._closed or pid in self._polled or pid in self._files.values():
                return
            self._polled[pid] = started
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nbdist-liveness", daemon=True)
                self._thread.start()
        self._wake()

    def _wake(self) -> None:
        """Make the watch's thread check at once for new processes, and whether the watch is closed."""
        with contextlib.suppress(OSError, ValueError):  # closed
            os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                ended = [pid for pid, started in list(self._polled.items()) if self._has_ended(pid, started)]
                poller = select.poll()
                poller.register(self._bell, select.POLLIN)
                for file in self._files:
                    poller.register(file, select.POLLIN)
                timeout = 0 if ended else _LOOK_EVERY_MS if self._polled else None
            for file, _ in poller.poll(timeout):
                if file == self._bell:
                    os.eventfd_read(file)
                elif file in self._files:
                    ended.append(self._files[file])
            with self._lock:
                for file, pid in list(self._files.items()):
                    if pid in ended:
                        del self._files[file]
                        os.close(file)
                for pid in ended:
                    self._polled.pop(pid, None)
            for pid in ended:  # without the lock: `on_end` may close the watch
                try:
                    self._on_end(pid)
                except Exception:  # the agent's function: whatever it raises, later ends must be reported, too
                    _log.exception("process %d has ended; the function that was to handle this failed", pid)

    def _has_ended(self, pid: int, started: int) -> bool:
        """Return whether a process in `_polled` has ended; else move it to `_files` if it has a pidfd."""
        # The caller holds the lock.
        try:
            file = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        except (AttributeError, OSError):
            return not is_alive(pid, started)
        # Read the start time after opening the pidfd. If it is right, the pidfd belongs to this very process, and not
        # to a later one with the same pid.
        if started and (found := _look_up(pid)) != started:
            os.close(file)
            return found is not None  # else the kernel did not answer; the next check asks again
        del self._polled[pid]
        self._files[file] = pid
        return False

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
        self._wake()
        if thread is not None and thread is not threading.current_thread():  # `on_end` may call this
            thread.join(1.0)
        for file in self._files:
            os.close(file)
        self._files.clear()
        bell, self._bell = self._bell, -1  # `_wake` must not write to another file that gets this number
        os.close(bell)
