"""Keeps one text in a file that many processes change by compare-and-set: where members meet by ``file://``.

torch's FileStore appends records to its file. A process that is killed in the middle of a write leaves half a record,
and torch's C++ reader then spins for ever, holding the GIL, in every process that opens the file. Here each change is
a whole new file that takes the old one's place (`os.replace`), so a reader sees the old text or the new one, never a
part; and the lock is the kernel's (`flock`), which ends with the process that held it.

The file lies beside the path in the URL (``PATH.rpc``), because a program may give the same URL to torch's
``init_process_group``, whose FileStore has that path for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from nbdist.errors import RendezvousError

__all__ = ["MeetingFile"]

_PATIENCE = 2.0
"""Seconds to wait for the lock. Its holder needs less than a millisecond, unless it is stopped, or the disk hangs."""

_POLL = 0.001

_LARGEST = 64 << 20
"""Bytes. A roster takes some 300 for each member; what is larger is another program's file."""


class MeetingFile:
    """One text, shared by the processes that name the same path; any thread may use it."""

    def __init__(self, path: str) -> None:
        """Open the file, or make it; a path that cannot be used is a RendezvousError at once."""
        self._path = f"{path}.rpc"
        self._draft = Path(f"{self._path}.new")
        try:
            self.compare_set("", "", "")
        except TimeoutError:  # another process is slow just now; whoever reads next will see
            pass
        except OSError as error:
            raise RendezvousError(
                f"members cannot meet at file://{path}: {error.strerror} ({self._path}). Name a file in a folder that "
                "exists and that all members may write to"
            ) from error

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if the text is ``expected``; return the text as it is then.

        The file has one text, whatever the ``key``, which is there because torch's stores take one. There is no
        file while the text is empty. Raises TimeoutError where another process holds the lock for 2 s, and OSError
        where the disk is full or the folder is gone; the caller tries again, or gives up.
        """
        with self._locked() as file:
            text = self._text(file)
            if text == expected.encode() and expected != desired:
                text = desired.encode()
                if text:
                    self._replace(text)
            if not text:  # also where it was opened, and so made, only to be read: nothing is left behind
                self._draft.unlink(missing_ok=True)  # of a process that was killed, or of an interrupted `_replace`
                os.unlink(self._path)
            return text

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock of the file that has the path now; another process may replace the file before it is locked."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            file = self._open()
            try:
                if self._lock(file):
                    yield file
                    return
            finally:
                os.close(file)
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has held the lock of {self._path} for {_PATIENCE:g} s")
            time.sleep(_POLL)

    def _lock(self, file: int) -> bool:
        """Lock an open file; False where another process holds the lock, or has put a new file in its place."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except (BlockingIOError, FileNotFoundError):
            return False

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def _text(self, file: int) -> bytes:
        size = os.fstat(file).st_size
        if size > _LARGEST:
            raise RendezvousError(f"{self._path} has {size} bytes: it is not a file at which members of nbdist meet")
        return os.pread(file, size, 0)

    def _replace(self, text: bytes) -> None:
        """Put a new file in the old one's place. Only the holder of the lock gets here, so the draft is its own."""
        self._draft.unlink(missing_ok=True)  # of a process that was killed before it could put it in place
        try:
            file = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(file, "wb") as new:
                new.write(text)
            os.replace(self._draft, self._path)
        except OSError:
            self._draft.unlink(missing_ok=True)  # a full disk
            raise
