"""Directories that belong to one process or to several, and show by a lock whether one of these lives.

A channel has such a directory for its sockets, and a cluster for its run; a swarm has a shared one for its weights. The
directory contains a file that its processes have locked. When an agent starts, or has lost a member of its host, it
removes each directory whose lock is free (`sweep`).
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
import weakref
from pathlib import Path
from typing import IO

from nbdist.channel.after_fork import call_forked
from nbdist.channel.secret import runtime_directory


class LockedDirectory:
    """A process's own directory, with a file that stays locked while the process lives."""

    def __init__(self, base: Path, label: str) -> None:
        """Make and lock the directory ``base / label``. Raises OSError on failure, as when another process has it."""
        self.path = base / label
        draft = self.path.with_name(f"new-{label}")  # else others would remove it before it is locked
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, draft, ignore_errors=True)
            draft.mkdir(mode=0o700)
            self._lock: IO[bytes] = undo.enter_context((draft / "lock").open("wb"))
            # The kernel keeps the lock, also for processes of other containers, where a process id would say nothing.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.rename(self.path)
            undo.pop_all()
        call_forked(self)

    def forked(self) -> None:
        """Close the lock's file in a forked process. Else the child would keep the lock after the parent's death."""
        self._lock.close()

    def remove(self) -> None:
        """Delete the directory with its files, and release the lock. Errors while deleting are ignored."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


class SharedDirectory:
    """A directory that several processes hold. It is removed by the last one that leaves it, or if all die, by `sweep`.

    A process leaves with ``leave()``, when the object is garbage-collected, or at its end. To leave twice is harmless.
    """

    def __init__(self, path: Path, draft: Path | None = None) -> None:
        """Hold the directory ``path``, too, which a process on this host holds; or make it from the folder ``draft``.

        Raises OSError if no such directory is there any more.
        """
        self.path = path
        self._lock = ((draft or path) / "lock").open("r+b")  # NFS locks only files that are open for writing
        self.leave = weakref.finalize(self, _leave, path, self._lock)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if draft is not None:
                draft.rename(path)
        except OSError:
            self.forked()
            raise
        call_forked(self)

    @classmethod
    def make(cls, base: Path, label: str) -> SharedDirectory:
        """Make the directory ``base / label``, and hold it."""
        draft = base / f"new-{label}"  # else others would remove it before it is locked
        draft.mkdir(mode=0o700)
        (draft / "lock").touch()
        return cls(base / label, draft)

    def forked(self) -> None:
        """Close the lock's file in a forked process, which leaves the directory to its parent."""
        self.leave.detach()
        self._lock.close()


def _leave(path: Path, lock: IO[bytes]) -> None:
    with contextlib.suppress(OSError):
        # Unlock first: two processes that both hold the lock, and leave now, would keep it from each other.
        fcntl.flock(lock, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    lock.close()


def sweep() -> int:
    """Remove the directories of this user's agents and swarms that were killed; return how many there were."""
    return sum(sweep_directories(runtime_directory(), kind) for kind in ("agent", "swarm"))


def sweep_directories(base: Path, kind: str) -> int:
    """Remove each `LockedDirectory` named ``KIND-…`` in ``base`` whose process has died; return the number."""
    removed = 0
    for path in base.glob(f"{kind}-*"):
        try:
            with (path / "lock").open("r+b") as lock:  # NFS locks only files that are open for writing
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
        except BlockingIOError:
            pass  # its process is alive
        except (FileNotFoundError, NotADirectoryError):
            # Its process may be removing it right now. If it is more than 60 s old, that is not so.
            with contextlib.suppress(OSError):
                if path.exists() and not any(path.iterdir()) and _age(path) > 60:
                    path.rmdir()
    for path in base.glob(f"new-{kind}-*"):
        with contextlib.suppress(OSError):
            if _age(path) > 60:
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
    return removed


def _age(path: Path) -> float:
    """Return the seconds since a file or directory was last changed."""
    return time.time() - path.stat().st_mtime
