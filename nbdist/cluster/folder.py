"""The run directory of a cluster: kernel sockets, connection files, logs; this user's alone, and short of path.

The zygote removes it. Where the zygote was killed too, whoever makes the next one does.
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

_LONGEST = 107
"""Bytes of a unix socket's path."""

_SOCKET = "/agent-1234567-0123456789abcdef/in"


def make_folder() -> Path:
    """Make a fresh run directory.

    Raises:
        UsageError: the paths of sockets in it would be too long.
        ResourceError: the disk is full, or this process has too many files open. Nothing is left behind.
    """
    base = runtime_directory()
    _sweep(base)
    folder = base / f"cluster-{secrets.token_hex(4)}"
    if len(os.fsencode(str(folder) + _SOCKET)) > _LONGEST:
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
    for folder in base.glob("cluster-*"):
        try:
            pid, started = map(int, (folder / "owner").read_text().split())
        except (OSError, ValueError):
            continue  # being made, or removed
        if not is_alive(pid, started):
            shutil.rmtree(folder, ignore_errors=True)
