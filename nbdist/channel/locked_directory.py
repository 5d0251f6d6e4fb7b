"""Directories that each belong to one process, and show by a lock whether that process lives.

A channel has such a directory for its sockets, and a cluster for its run. The directory contains a file that its
process has locked. When an agent starts, it removes each directory whose lock is free (`sweep`).
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
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


def sweep() -> int:
    """Remove the directories of this user's agents that were killed; return how many there were."""
    return sweep_directories(runtime_directory(), "agent")


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
