"""``python -m nbdist doctor``: what this installation has to work with, one line each.

Every line is found out by trying, not by looking for a name. What keeps agents from working makes the exit
code 1; what is only missing for speed does not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from nbdist import __version__
from nbdist.channel.security import Secret, runtime_directory
from nbdist.errors import NbdistError

__all__ = ["examine"]

_PACKAGES = ("torch", "pyzmq", "msgspec", "cloudpickle")


def examine() -> int:
    """Print what there is; 1 if agents cannot work."""
    _line("nbdist", f"{__version__}, {Path(__file__).parent}")
    _line("Python", f"{platform.python_version()}, {sys.executable}")
    for package in _PACKAGES:
        try:
            _line(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            _line(package, "not installed")
    needed = [_try("runtime directory", _runtime_directory), _try("unix sockets", _unix_sockets)]
    needed += [_try("secret", _secret), _try("CURVE", _curve)]
    _try("memfd", _memfd)
    _try("pidfd", _pidfd)
    with contextlib.suppress(NbdistError, OSError):
        _agents()
    return 0 if all(needed) else 1


def _line(what: str, found: str) -> None:
    print(f"{what:<18} {found}")


def _try(what: str, find: Callable[[], str]) -> bool:
    try:
        _line(what, find())
    except (NbdistError, OSError, AttributeError, RuntimeError) as error:
        _line(what, f"no: {error}")
        return False
    return True


def _runtime_directory() -> str:
    return str(runtime_directory())


def _unix_sockets() -> str:
    path = runtime_directory() / f"doctor-{os.getpid()}"
    with contextlib.ExitStack() as undo:
        door = undo.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(str(path))
        undo.callback(path.unlink)
        door.listen()
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.connect(str(path))
    return "yes"


def _secret() -> str:
    if Secret.find(None).shared_off_host:
        return os.environ["NBDIST_SECRET_FILE"]
    return "this user's own; members on this host only"


def _curve() -> str:
    Secret.find(None).curve("member")
    return "yes"


def _memfd() -> str:
    os.close(os.memfd_create("nbdist-doctor"))
    return "yes"


def _pidfd() -> str:
    os.close(os.pidfd_open(os.getpid()))
    return "yes"


def _agents() -> None:
    """The agents of this user on this host, and what dead ones have left."""
    for path, is_alive in sorted(_directories()):
        pid = path.name.split("-")[1]
        if is_alive:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            _line(f"agent of {pid}", command.replace("\0", " ").strip() or "?")
        else:
            _line(f"agent of {pid}", "has died; the next agent that starts cleans up after it")


def _directories() -> Iterator[tuple[Path, bool]]:
    for path in runtime_directory().glob("agent-*-*"):
        try:
            with (path / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield path, False
        except BlockingIOError:
            yield path, True
        except FileNotFoundError:
            pass  # it is going right now
