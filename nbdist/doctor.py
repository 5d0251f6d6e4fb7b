"""``python -m nbdist doctor``: shows what this installation can use, one line each.

Every feature is tried out, not looked up by its name. If agents cannot work, the exit code is 1; a feature that is only
missing for speed does not change it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from nbdist import __version__
from nbdist.channel import machine
from nbdist.channel.security import Secret, runtime_directory
from nbdist.errors import NbdistError, VersionMismatch

__all__ = ["examine"]

_PACKAGES = ("torch", "pyzmq", "msgspec", "cloudpickle")
_NOTEBOOK_ANSWERS_WITHIN = 10.0
"""Seconds for the answer of a notebook on another host."""


def examine(invitation: str | None = None) -> int:
    """Print versions, the features of this machine and this user's agents; return 1 if agents cannot work, else 0.

    With the path of an ``invitation`` of a notebook, also what a worker of this host would find there; 1 if it would be
    refused. Raises UsageError or SecurityError if the file cannot be used.
    """
    _line("nbdist", f"{__version__}, {Path(__file__).parent}")
    _line("Python", f"{platform.python_version()}, {sys.executable}")
    for package in _PACKAGES:
        try:
            _line(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            _line(package, "not installed")
    needed = [_try("runtime directory", _runtime_directory), _try("unix sockets", _unix_sockets)]
    needed += [_try("secret", _secret), _try("CURVE", _curve)]
    _line("may use", machine.limits() or "all cores and all memory")
    _try("memfd", _memfd)
    _try("pidfd", _pidfd)
    _try("GPUs", _gpus)
    with contextlib.suppress(NbdistError, OSError):
        _agents()
    if invitation is not None:
        needed += [_try("the notebook", lambda: _notebook(invitation))]
    return 0 if all(needed) else 1


def _notebook(path: str) -> str:
    """Ask the notebook of an invitation, and print what there is to know before a worker of this host joins it.

    Returns its versions. Raises UsageError or SecurityError for the invitation, ChannelError if nobody answers, and
    VersionMismatch if a worker of this process's versions would be refused.
    """
    import msgspec

    from nbdist.channel.entrance import knock
    from nbdist.cluster.hosts.admission import QUESTION, Denied, NotebookFacts, decode_answer, describe_myself
    from nbdist.cluster.hosts.interfaces import interface_of, own_address_towards
    from nbdist.cluster.hosts.invitations import read_invitation

    invitation = read_invitation(path)
    address, _, port = invitation.address.removeprefix("tcp://").rpartition(":")
    own = own_address_towards(address.strip("[]"), int(port))
    _line("this host there", f"{own}, interface {interface_of(own) or 'unknown'}")
    request = QUESTION + msgspec.msgpack.encode(describe_myself(invitation.token, 1))
    began, spent = time.time(), time.monotonic()
    answer = decode_answer(knock(invitation.address, invitation.key.encode(), request, _NOTEBOOK_ANSWERS_WITHIN))
    spent = time.monotonic() - spent
    if isinstance(answer, Denied):
        raise answer.error()
    assert isinstance(answer, NotebookFacts)
    _line("its answer took", f"{spent * 1000:.0f} ms, with the handshake of a new connection")
    _line("its clock", f"{answer.now - began - spent / 2:+.2f} s beside this one's")
    if answer.misfit:
        raise VersionMismatch(answer.misfit)
    return f"nbdist {answer.nbdist}, Python {answer.python}, torch {answer.torch} on {answer.host}: a worker may join"


def _line(what: str, found: str) -> None:
    """Print one line: the name of a feature or package, padded to a column, and what was found."""
    print(f"{what:<18} {found}")


def _try(what: str, find: Callable[[], str]) -> bool:
    """Print the result of ``find()``, or "no" and the error that it raised; return whether it succeeded."""
    try:
        _line(what, find())
    except (NbdistError, OSError, AttributeError, ImportError, RuntimeError) as error:
        _line(what, f"no: {error}")
        return False
    return True


def _runtime_directory() -> str:
    """Return the path of this user's directory for sockets; make it if it does not exist."""
    return str(runtime_directory())


def _unix_sockets() -> str:
    """Return "yes" if a unix socket in the directory for sockets can be connected to. Raises an error if not."""
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
    """Return where agents read the secret that they prove to one another.

    That is the path of the file that several hosts share, or a phrase that says that it is this user's own. Raises an
    error if the secret cannot be read.
    """
    if Secret.find(None).shared_off_host:
        return os.environ["NBDIST_SECRET_FILE"]
    return "this user's own; members on this host only"


def _curve() -> str:
    """Return "yes" if this machine's ZeroMQ can derive CURVE keys, which encrypt connections.

    Raises an error if not.
    """
    Secret.find(None).curve("member")
    return "yes"


def _memfd() -> str:
    """Return "yes" if this process can make memory to share with agents of this host. Raises OSError if not."""
    os.close(os.memfd_create("nbdist-doctor"))
    return "yes"


def _pidfd() -> str:
    """Return "yes" if a pidfd can watch a process, so that the kernel reports its end at once.

    Raises OSError or AttributeError if not.
    """
    os.close(os.pidfd_open(os.getpid()))
    return "yes"


def _gpus() -> str:
    """Return how many GPUs torch sees, and which of them have memory that processes can share."""
    import torch  # here, so that everything else is shown if torch cannot be imported

    from nbdist.channel.shared_memory import gpu_memory

    count = torch.cuda.device_count()
    shared = [str(index) for index in range(count) if gpu_memory.is_available(index)]
    if not count:
        return "none"
    told = f"in the memory of GPU {', '.join(shared)}" if shared else "by way of the host's memory"
    return f"{count}; processes that share a GPU pass tensors {told}"


def _agents() -> None:
    """Print a line for each agent of this user on this host: its process and command, or that it has died."""
    for path, is_alive in sorted(_directories()):
        pid = path.name.split("-")[1]
        if is_alive:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            _line(f"agent of {pid}", command.replace("\0", " ").strip() or "?")
        else:
            _line(f"agent of {pid}", "has died; the next agent that starts cleans up after it")


def _directories() -> Iterator[tuple[Path, bool]]:
    """Yield the directory of each agent of this user, and whether the agent is alive: it holds the directory's lock."""
    for path in runtime_directory().glob("agent-*-*"):
        try:
            with (path / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield path, False
        except BlockingIOError:
            yield path, True
        except FileNotFoundError:
            pass  # the agent is removing it right now
