"""The phases of a storm, told by files in its folder: a process whose file table is full sees them, too.

======== ==========================================================================================
storm    work, whatever happens
settle   start nothing new, and wait for what is under way
check    all have settled: work once more, undisturbed, and drop everything
release  all have checked, and nobody calls any more: look whether anything is left
leave    all have looked: end
======== ==========================================================================================

Each process marks the end of its part in a phase; the storm begins the next one when all have.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from chaos.recorder import folder

SETTLE, CHECK, RELEASE, LEAVE = "settle", "check", "release", "leave"


def has_come(phase: str) -> bool:
    """Return whether the storm has reached a phase."""
    return os.path.exists(folder() / "phases" / phase)


def wait_for(phase: str) -> None:
    """Return when the phase has come."""
    while not has_come(phase):
        time.sleep(0.05)


def mark(phase: str, name: str) -> None:
    """Say that this process has done its part in a phase."""
    (folder() / "phases" / f"{phase}-{name}").touch()


def arrive(name: str, pid: int) -> None:
    """Say that ``name`` is now the process ``pid``, and works."""
    draft = folder() / f"new-{name}"
    draft.write_text(str(pid))
    draft.rename(folder() / "here" / name)


def begin(path: Path, phase: str) -> None:
    """Begin a phase of the storm in ``path``."""
    (path / "phases" / phase).touch()


def is_marked(path: Path, phase: str, name: str) -> bool:
    """Return whether ``name`` has done its part in a phase of the storm in ``path``."""
    return (path / "phases" / f"{phase}-{name}").exists()


def present(path: Path) -> dict[str, int]:
    """Return the processes of the storm in ``path`` that have arrived and live, by name."""
    found = {file.name: int(file.read_text()) for file in (path / "here").iterdir()}
    return {name: pid for name, pid in found.items() if is_running(pid)}


def is_running(pid: int) -> bool:
    """Return whether a process is there and no zombie. Nobody waits long enough here for a number to be used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
