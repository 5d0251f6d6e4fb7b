"""What a storm has left behind: processes that carry its name in their environment, and files in its folders."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from chaos.recorder import FOLDER


def processes(folder: Path) -> dict[int, str]:
    """Return the living processes of the storm in ``folder``, grandchildren too, with their command lines."""
    mark = f"{FOLDER}={folder}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = command[:120]
            except OSError:  # it has ended, or is another user's
                continue
    return found


def end(folder: Path) -> None:
    """Kill every process of the storm in ``folder``."""
    for pid in processes(folder):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def files(folder: Path) -> list[str]:
    """Return the files and sockets below ``folder``, but for the user's secret, and for the folder of torch's compiler.

    The secret stays on purpose; the compiler's folder is torch's.
    """
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return [path for path in found if path != "secret" and not path.startswith("torchinductor_")]
