"""Keeps one text in a file that many processes change by compare-and-set. Members of ``file://`` meet there.

torch's FileStore appends records to its file. A process that is killed in the middle of a write leaves half a record,
and then torch's C++ reader spins for ever, holding the GIL, in every process that opens the file. Here each change
writes a new file and renames it over the old one (`os.replace`), so a reader sees the old text or the new text, never a
part. The lock is the kernel's (`flock`), and ends with the process that holds it.

The file lies beside the path in the URL (``PATH.rpc``): a program may give the same URL to torch's
``init_process_group``, whose FileStore uses the path itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from nbdist.errors import RendezvousError

# Seconds to wait for the lock. Its holder needs less than a millisecond, unless it is stopped or the disk hangs.
_LOCK_TIMEOUT = 2.0

_POLL = 0.001  # seconds between two attempts to take the lock

# Bytes. A roster takes about 300 bytes for each member; a larger file belongs to another program.
_LARGEST_ROSTER = 64 << 20


class MeetingFile:
    """One text, shared by the processes that name the same path. Any thread may use it."""

    def __init__(self, path: str) -> None:
        """Check that the file can be used; raise RendezvousError at once if not. Leaves no empty file behind."""
        self._path = f"{path}.rpc"
        self._draft = Path(f"{self._path}.new")
        try:
            self.compare_set("", "", "")
        except TimeoutError:  # another process is slow; if it stays so, the next `compare_set` raises the error
            pass
        except OSError as error:
            raise RendezvousError(
                f"members cannot meet at file://{path}: {error.strerror} ({self._path}). Name a file in a folder that "
                "exists and that all members may write to"
            ) from error

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if the text is ``expected``; return the text that the file has then. ``key`` is ignored.

        Raises TimeoutError if another process holds the lock for 2 s, OSError if the disk is full or the folder is
        gone, and RendezvousError if the file is too large.
        """
        with self._locked() as file:
            text = self._text(file)
            if text == expected.encode() and expected != desired:
                text = desired.encode()
                if text:
                    self._replace(text)
            if not text:  # `_open` has made the file, or its text has been removed
                self._draft.unlink(missing_ok=True)  # a killed process or an interrupted `_replace` may have left it
                os.unlink(self._path)
            return text

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Return a context manager that holds the lock of the file at the path; it yields the file's descriptor."""
        deadline = time.monotonic() + _LOCK_TIMEOUT
        while True:
            file = self._open()
            try:
                if self._lock(file):
                    yield file
                    return
            finally:
                os.close(file)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"another process has held the lock of {self._path} for {_LOCK_TIMEOUT:g} s: end that process, or "
                    "meet at another path"
                )
            time.sleep(_POLL)

    def _lock(self, file: int) -> bool:
        """Lock an open file; return False if another process holds the lock, or has put a new file in its place."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except (BlockingIOError, FileNotFoundError):
            return False

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def _text(self, file: int) -> bytes:
        size = os.fstat(file).st_size
        if size > _LARGEST_ROSTER:
            raise RendezvousError(
                f"{self._path} has {size} bytes, too many for a list of members: another program's file. Meet at "
                "another path, or remove the file"
            )
        return os.pread(file, size, 0)

    def _replace(self, text: bytes) -> None:
        """Replace the file by a new one with ``text``. Only the holder of the lock may call this."""
        self._draft.unlink(missing_ok=True)  # from a process that was killed before it could rename the draft
        try:
            file = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(file, "wb") as new:
                new.write(text)
            # So a reader sees the old text or the new one (test_processes_killed_while_they_write_leave_a_whole_text).
            os.replace(self._draft, self._path)
        except OSError:
            self._draft.unlink(missing_ok=True)  # the disk may be full
            raise
