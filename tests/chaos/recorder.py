"""Writes a process's entries of the ledger so that they survive the process, and reads those of all.

Each process appends whole lines to a file of its own with one `write` each: what is written is the kernel's, and a
SIGKILL takes none of it back. The file is opened once, so that a full file table loses no entry.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from chaos.ledger import KINDS, Entry

FOLDER = "NBDIST_CHAOS"
"""The environment variable that names the storm's folder to every process of the storm."""

_lock = threading.Lock()
_open: tuple[int, int] | None = None


def folder() -> Path:
    """Return the folder of the storm that this process is in."""
    return Path(os.environ[FOLDER])


def ready() -> None:
    """Open this process's file, before its file table may fill."""
    _file()


def _file() -> int:
    """Return the number of this process's file; a forked process opens one of its own."""
    global _open
    with _lock:
        if _open is None or _open[0] != os.getpid():
            path = folder() / "ledger" / str(os.getpid())
            _open = os.getpid(), os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return _open[1]


def write(entry: Entry) -> None:
    """Append an entry."""
    line = json.dumps([type(entry).__name__, *dataclasses.astuple(entry)]) + "\n"
    os.write(_file(), line.encode())


def read(path: Path) -> list[Entry]:
    """Return all entries that the processes of the storm in ``path`` have written."""
    entries = []
    for file in sorted((path / "ledger").iterdir()):
        for line in file.read_text().split("\n")[
            :-1
        ]:  # behind the last end of a line there is nothing, or no whole one
            kind, *values = json.loads(line)
            entries.append(KINDS[kind](*values))
    return entries


def digest(value: Any) -> str:
    """Return a short text that is the same for equal values, tensors included."""
    if hasattr(value, "numpy"):
        value = (list(value.shape), value.detach().numpy().tobytes())
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
