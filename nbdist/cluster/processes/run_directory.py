"""Makes the run directory of a cluster: kernel sockets, connection files and logs, which only this user can read.

The zygote removes the directory when the cluster ends. If the zygote was killed, the next `make_folder` removes it: its
owner, the process that made it, held a lock in it while it lived.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from nbdist.channel.locked_directory import LockedDirectory, sweep_directories
from nbdist.channel.resources import refusals_in_words
from nbdist.channel.secret import runtime_directory
from nbdist.errors import UsageError

_KIND = "cluster"  # the beginning of the names of run directories
_LONGEST_PATH = 107  # the most bytes that the path of a unix socket can have
# A path below the run directory that is as long as the longest: the socket of an agent, by pid and incarnation.
_LONGEST_SOCKET = "/agent-1234567-0123456789abcdef/in"
_held: dict[Path, LockedDirectory] = {}  # the run directories of this process, whose locks it holds


def make_folder() -> Path:
    """Make a new run directory of a cluster and return its path. Also removes the directories of ended processes."""
    base = runtime_directory()
    sweep_directories(base, _KIND)
    name = f"{_KIND}-{secrets.token_hex(4)}"
    folder = base / name
    if len(os.fsencode(str(folder) + _LONGEST_SOCKET)) > _LONGEST_PATH:
        raise UsageError(f"the path {base} is too long for sockets in it; set NBDIST_RUNTIME_DIR to a shorter one")
    with refusals_in_words(f"{folder} cannot be made"):
        _held[folder] = LockedDirectory(base, name)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a run directory with its files, if it still exists."""
    if (held := _held.pop(folder, None)) is not None:
        held.remove()
    else:
        shutil.rmtree(folder, ignore_errors=True)
