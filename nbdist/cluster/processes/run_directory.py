"""Makes the run directory of a cluster: kernel sockets, connection files and logs, which only this user can read.

The zygote removes the directory when the cluster ends. If the zygote was killed, the next `make_folder` removes it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from nbdist.channel.liveness import is_alive, started_at
from nbdist.channel.resources import refusals_in_words
from nbdist.channel.security import runtime_directory
from nbdist.errors import UsageError

__all__ = ["make_folder"]

_LONGEST_PATH = 107
"""The most bytes that the path of a unix socket can have."""

_LONGEST_SOCKET = "/agent-1234567-0123456789abcdef/in"
"""A path below the run directory that is as long as the longest: the socket of an agent, by pid and incarnation."""


def make_folder() -> Path:
    """Make a new run directory of a cluster and return its path. Also removes the directories of ended processes.

    A run directory holds sockets, connection files and logs, and a file with the pid of its owner, the process that
    made it. Raises UsageError if the paths of sockets in it would be too long, ResourceError if the disk is full or
    this process has too many files open. In both cases nothing is left behind.
    """
    base = runtime_directory()
    _sweep(base)
    folder = base / f"cluster-{secrets.token_hex(4)}"
    if len(os.fsencode(str(folder) + _LONGEST_SOCKET)) > _LONGEST_PATH:
        raise UsageError(f"the path {base} is too long for sockets in it; set NBDIST_RUNTIME_DIR to a shorter one")
    with refusals_in_words(f"{folder} cannot be made"):
        folder.mkdir(mode=0o700)
        try:
            (folder / "owner").write_text(f"{os.getpid()} {started_at(os.getpid())}")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder


def _sweep(base: Path) -> None:
    """Remove the run directories below ``base`` whose owner, the process that made them, has ended.

    The zygote usually does that. A directory whose file ``owner`` cannot be read stays.
    """
    for folder in base.glob("cluster-*"):
        try:
            pid, started = map(int, (folder / "owner").read_text().split())
        except (OSError, ValueError):
            continue  # another process is making or removing it
        if not is_alive(pid, started):
            shutil.rmtree(folder, ignore_errors=True)
