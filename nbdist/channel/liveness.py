"""Knowing at once that a process of this host has ended.

Linux tells through a pidfd, within a millisecond; elsewhere the process table is read every 50 ms. A pid
alone says nothing (it is reused), so a process is named by its pid and the time it started.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["ProcessWatch", "is_alive", "started_at"]

_POLL_MS = 50

_log = logging.getLogger("nbdist.channel")


def started_at(pid: int) -> int:
    """When the process started, in the kernel's ticks; 0 where that cannot be known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Whether that very process runs."""
    if started:
        return started_at(pid) == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class ProcessWatch:
    """Calls back when processes end."""

    def __init__(self, on_end: Callable[[int], None]) -> None:
        self._on_end = on_end
        self._lock = threading.Lock()
        self._files: dict[int, int] = {}
        self._polled: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def watch(self, pid: int, started: int) -> None:
        """Tell when this process ends; at once, if it has."""
        with self._lock:
            if self._closed or pid in self._polled or pid in self._files.values():
                return
            try:
                file = os.pidfd_open(pid)
            except ProcessLookupError:
                self._polled[pid] = -1
            except (AttributeError, OSError):
                self._polled[pid] = started
            else:
                if is_alive(pid, started):
                    self._files[file] = pid
                else:
                    os.close(file)
                    self._polled[pid] = -1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nbdist-liveness", daemon=True)
                self._thread.start()
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_in, b"w")

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                poller = select.poll()
                poller.register(self._wake_out, select.POLLIN)
                for file in self._files:
                    poller.register(file, select.POLLIN)
                polled = dict(self._polled)
            ended = [pid for pid, started in polled.items() if started == -1 or not is_alive(pid, started)]
            for file, _ in poller.poll(0 if ended else _POLL_MS if polled else None):
                if file == self._wake_out:
                    with contextlib.suppress(OSError):
                        os.read(file, 4096)
                elif file in self._files:
                    ended.append(self._files[file])
            with self._lock:
                for file, pid in list(self._files.items()):
                    if pid in ended:
                        del self._files[file]
                        os.close(file)
                for pid in ended:
                    self._polled.pop(pid, None)
            for pid in ended:
                try:
                    self._on_end(pid)
                except Exception:
                    _log.exception("a listener failed to hear of the end of process %d", pid)

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
        self._wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
        for file in self._files:
            os.close(file)
        self._files.clear()
        wake_in, self._wake_in = self._wake_in, -1  # the number may soon be another file's
        os.close(wake_in)
        os.close(self._wake_out)
