"""Asks a worker's host about the worker's process. This works even while the worker holds the GIL.

The frames of the main thread come by a signal, at which the worker writes them to a file in its run directory; the
handler needs no GIL. torch's flight recorder comes from a thread of torch's own. Memory and CPU time come from
``/proc``. Only launchers call this: it works on the worker's host.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec

from nbdist.cluster.processes.process_memory import own_bytes
from nbdist.cluster.processes.setup import WHERE_SIGNAL, record_socket, where_file

ANSWER_WITHIN = 0.3  # seconds to wait for an answer
_RECORD_WITHIN = 0.1  # seconds of these for each read of the record, which takes some milliseconds
_POLL = 0.005  # seconds between two looks at the file
_LARGE = 1 << 18  # bytes of the file above which it is emptied first: each question appends to it
_RECORD = "/handler/fr_trace_json?includecollectives=true"
# The last line of an answer: the outermost frame, or faulthandler's mark that there are more frames.
_ENDS = ("in <module>\n", "  ...\n")


class Probe(msgspec.Struct, frozen=True):
    """The facts about a worker's process that its host can tell, at one moment."""

    frames: str = ""
    """The frames of the main thread as Python's faulthandler writes them; empty if the worker has written none."""
    memory: int | None = None
    """Bytes in pages that no other process has; None if the system has no count."""
    cpu_seconds: float | None = None
    """CPU time that the process has used, in seconds; None if the system does not tell."""
    record: bytes = b""
    """torch's record of the process's collectives, as JSON; empty if there is none."""
    formed: int = 0
    """When the present process group began to form, in nanoseconds since the epoch by the host's clock."""


def probe(folder: Path, name: str, pid: int | None, send: Callable[[str, int], None]) -> Future[Probe]:
    """Ask about the worker ``name``, whose process is ``pid``; return the future of the `Probe`, which never fails."""
    # Done after `ANSWER_WITHIN` seconds at most: a worker that is stopped, or has died, writes no frames.
    found: Future[Probe] = Future()

    def ask() -> None:
        frames, record, formed = "", b"", 0
        deadline = time.monotonic() + ANSWER_WITHIN  # one for both: a worker that is stopped answers neither
        with contextlib.suppress(OSError, http.client.HTTPException):
            record, formed = _read_record(record_socket(str(folder), name))
        with contextlib.suppress(OSError):
            frames = _ask_for_frames(where_file(str(folder), name), lambda: send(name, WHERE_SIGNAL), deadline)
        found.set_result(Probe(frames, own_bytes(pid), _cpu_seconds(pid), record, formed))

    threading.Thread(target=ask, name="nbdist-probe", daemon=True).start()
    return found


def _ask_for_frames(path: str, signal_it: Callable[[], None], deadline: float) -> str:
    """Signal a worker and return the frames that it then writes to the file at ``path``."""
    if os.path.getsize(path) > _LARGE:
        os.truncate(path, 0)
    before = os.path.getsize(path)
    signal_it()
    while not (answer := _read_from(path, before)).endswith(_ENDS) and time.monotonic() < deadline:
        time.sleep(_POLL)
    return answer


class _UnixConnection(http.client.HTTPConnection):
    """A connection to the server at a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_RECORD_WITHIN)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _read_record(path: str) -> tuple[bytes, int]:
    """Return what a worker tells at the socket at ``path``, and the socket's time; OSError if it tells nothing."""
    with contextlib.closing(_UnixConnection(path)) as connection:
        connection.request("POST", _RECORD)
        return connection.getresponse().read(), os.stat(path).st_mtime_ns


def _read_from(path: str, start: int) -> str:
    with open(path, errors="replace") as file:
        file.seek(start)
        return file.read()


def _stat(pid: int | None) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; none if the system does not tell."""
    with contextlib.suppress(OSError):
        # after the last ")": the name of the program, in brackets, may have any characters
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _cpu_seconds(pid: int | None) -> float | None:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else None  # utime and stime


def is_stopped(pid: int | None) -> bool:
    """Return whether a signal such as SIGSTOP has stopped a process of this host."""
    return _stat(pid)[:1] == ["T"]
