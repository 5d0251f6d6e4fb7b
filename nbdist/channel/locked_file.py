"""A lock that several processes take in turn at a file, and files that are replaced as a whole.

torch's FileStore appends records to its file. A process that is killed in the middle of a write leaves half a record,
and then torch's C++ reader spins for ever, holding the GIL, in every process that opens the file. Here each change
writes a draft and renames it over the old file (`os.replace`), so a reader sees the old content or the new content,
never a part. The lock is the kernel's (`flock`), and ends with the process that holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from nbdist.errors import SecurityError

_POLL = 0.0005  # seconds between two attempts to take the lock


@contextlib.contextmanager
def locked(path: Path, timeout: float) -> Iterator[int]:
    """Return a context manager that holds the lock of the file at ``path``; it yields the file's descriptor.

    Makes a missing file. Raises TimeoutError if another process or thread holds the lock for ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:  # polled, as an endless wait in `flock` could not time out
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if _lock(file, path):
                yield file
                return
        finally:
            # `close` alone would leave the lock to a child that another thread has forked meanwhile.
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"another process has held the lock of {path} for {timeout:g} s: end that process, or meet at another "
                "path"
            )
        time.sleep(_POLL)


def _lock(file: int, path: Path) -> bool:
    """Lock an open file; return False if another process holds the lock, or has put a new file in its place."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


def read_private(path: Path, risk: str) -> bytes:
    """Return the contents of a file. Raises SecurityError, which names the ``risk``, if others may open it; OSError."""
    found = path.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise SecurityError(
            f"others may read or write {path}, or own it, and {risk}, and keep the file your own (chmod 600 {path})"
        )
    return path.read_bytes()


def write_whole(path: Path, content: bytes, draft: Path) -> None:
    """Replace the file at ``path`` by a new one that only this user can open; ``draft`` is its path until it is whole.

    No other process may write to the same draft meanwhile. A draft that a killed process has left is overwritten.
    """
    draft.unlink(missing_ok=True)
    try:
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(file, "wb") as new:
            new.write(content)
        # So a reader sees the old content or the new (test_processes_killed_while_they_write_leave_a_whole_text).
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)  # the disk may be full
        raise
