"""``python -m nbdist doctor``: shows what this installation can use, one line each.

Every feature is tried out, not looked up by its name. The indented text below a line says what is wrong with it, and
what to do about it. `_try` prints what the function of a feature returns, or "no" and the error that it raises. If
agents cannot work, the exit code is 1; a feature that is only missing for speed does not change it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist import __version__
from nbdist.amounts import counted, duration, size
from nbdist.channel import machine
from nbdist.channel.secret import Secret, runtime_directory
from nbdist.errors import NbdistError, VersionMismatch

if TYPE_CHECKING:
    from nbdist.cluster.examination.findings import Finding
    from nbdist.cluster.examination.machine import MachineFacts
    from nbdist.cluster.examination.speed import RoundTrips
    from nbdist.cluster.hosts.admission import NotebookFacts
    from nbdist.cluster.hosts.trials import TrialWay

_PACKAGES = ("torch", "pyzmq", "msgspec", "cloudpickle")


def examine(invitation: str | None = None) -> int:
    """Print versions, the features of this machine and this user's agents; return 1 if agents cannot work, else 0.

    With the path of a notebook's ``invitation``, also prints what a worker of this host would find there, and returns 1
    if the notebook would refuse it. Raises UsageError or SecurityError if the file cannot be used.
    """
    _line("nbdist", f"{__version__}, {Path(__file__).parent}")
    _line("Python", f"{platform.python_version()}, {sys.executable}")
    for package in _PACKAGES:
        try:
            _line(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            _line(package, "not installed")
    # These decide the exit code: agents do not work without them.
    needed = [_try("runtime directory", lambda: str(runtime_directory())), _try("unix sockets", _unix_sockets)]
    needed += [_try("secret", _secret), _try("CURVE", _curve)]
    _line("may use", machine.limits() or "all cores and all memory")
    _try("memfd", _memfd)
    _try("pidfd", _pidfd)
    _try("shared memory", _shared_memory)
    _try("open files", lambda: _with_own_findings(f"at most {counted(_facts().files_limit, 'file')}", "open files"))
    _try("ports", _ports)
    _try("GPUs", _gpus)
    _try("NCCL", lambda: _with_own_findings(_facts().nccl or "none", "NCCL"))
    with contextlib.suppress(NbdistError, OSError):  # the line of the runtime directory has said why
        _agents()
    if invitation is not None:
        needed += [_try("the notebook", lambda: _notebook(invitation))]
    return 0 if all(needed) else 1


def _notebook(path: str) -> str:
    """Print what a worker of this host would find at the notebook of an invitation; return the notebook's versions."""
    from nbdist.cluster.examination.findings import of_clock
    from nbdist.cluster.hosts.admission import describe_myself
    from nbdist.cluster.hosts.interfaces import interface_of
    from nbdist.cluster.hosts.invitations import read_invitation
    from nbdist.cluster.hosts.trials import TrialWay

    with TrialWay(read_invitation(path)) as way:
        _line("this host", f"{way.own_address}, interface {interface_of(way.own_address) or 'unknown'}")
        spent = time.monotonic()
        facts = way.ask_for_facts()
        _line("first answer", f"{duration(time.monotonic() - spent)}, with the handshake of a new connection")
        # Before the measurements: a worker of these versions would be refused.
        if facts.misfit:
            raise VersionMismatch(facts.misfit)
        trips: list[RoundTrips] = []
        if _try("latency", lambda: _latency(way, trips)):
            ahead = trips[0].ahead
            told = f"{duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} this host's"
            _line("notebook's clock", _with_findings(told, of_clock(-ahead)))
            if _try("bandwidth", lambda: _bandwidth(way, trips[0].fastest)):  # else its answer may still come
                _try("other ports", lambda: _ports_there(way, facts))
    found = f"nbdist {facts.nbdist}, Python {facts.python}, torch {facts.torch} on {facts.host}: a worker may join"
    mine = describe_myself("", 0).torch
    if facts.torch != mine:
        found += f"\ntorch is {mine} here. Install the same torch on all hosts: NCCL works only with itself."
    return found


def _latency(way: TrialWay, trips: list[RoundTrips]) -> str:
    trips.append(way.round_trips())
    return f"{duration(trips[0].latency)}, there and back"


def _bandwidth(way: TrialWay, fastest: float) -> str:
    there, back = way.rates(fastest)
    return f"{size(int(there))}/s there, {size(int(back))}/s back"


def _ports_there(way: TrialWay, facts: NotebookFacts) -> str:
    told = [
        f"{who} {unreached}. Open all TCP ports between the two hosts: agents, gloo and NCCL listen at free ports. "
        "Start the worker with --host if others reach this host at another address."
        for who, unreached in (
            ("this host does not reach", way.unreached_from_here(facts)),
            ("the notebook's host does not reach", way.unreached_from_there()),
        )
        if unreached
    ]
    return "\n".join(["not reached:" if told else "reached, from both sides", *told])


def _line(what: str, found: str) -> None:
    """Print a line, with ``what`` padded to a column; further lines of ``found`` are indented."""
    first, *more = found.split("\n")
    print(f"{what:<18} {first}")
    for line in more:
        print(f"{'':<18} {line}")


def _with_findings(found: str, findings: Iterable[Finding]) -> str:
    return "\n".join([found, *map(str, findings)])


def _with_own_findings(found: str, topic: str, facts: MachineFacts | None = None) -> str:
    """Return the text ``found``, and below it the findings about this machine and process with this ``topic``."""
    from nbdist.cluster.examination.findings import of_machine, of_process

    facts = facts or _facts()
    return _with_findings(found, [each for each in [*of_machine(facts), *of_process(facts)] if each.topic == topic])


def _try(what: str, find: Callable[[], str]) -> bool:
    try:
        _line(what, find())
    except Exception as error:  # such as one of CUDA's many
        _line(what, f"no: {error}")
        return False
    return True


def _unix_sockets() -> str:
    path = runtime_directory() / f"doctor-{os.getpid()}"
    with contextlib.ExitStack() as undo:
        door = undo.enter_context(socket.socket(socket.AF_UNIX))
        # Not every file system has sockets.
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
    Secret.find(None).curve("member")  # raises where ZeroMQ was built without CURVE
    return "yes"


def _memfd() -> str:
    os.close(os.memfd_create("nbdist-doctor"))
    return "yes"


def _pidfd() -> str:
    os.close(os.pidfd_open(os.getpid()))  # an old kernel lacks it, and so may Python: OSError, AttributeError
    return "yes"


@functools.cache
def _facts() -> MachineFacts:
    """Return the facts about this process and its machine, without those that only CUDA can tell."""
    # Here: what comes before is shown even where torch cannot be imported.
    from nbdist.cluster.examination.machine import describe_machine

    return describe_machine()


def _shared_memory() -> str:
    from nbdist.channel.shared_memory.arena import default_bound

    facts = _facts()
    files = "no /dev/shm" if facts.shared_files_left is None else f"{size(facts.shared_files_left)} free in /dev/shm"
    room = f"{size(facts.memory_left)} of {size(facts.memory)} left; each agent shares up to {size(default_bound())}"
    return _with_own_findings(f"{room}; {files}", "shared memory")


def _ports() -> str:
    found = _facts().ports
    told = "any free ones" if found is None else f"free ones from {found[0]} to {found[1]}"
    return _with_own_findings(f"{told}; hosts of one cluster must reach each other at all of them", "ports")


def _gpus() -> str:
    from nbdist.channel.shared_memory import gpu_memory
    from nbdist.cluster.examination.machine import describe_machine
    from nbdist.gpus import staging

    count = _facts().gpu_count
    shared = [str(index) for index in range(count) if gpu_memory.is_available(index)]
    if not count:
        return _with_own_findings("none", "GPUs")
    told = f"in the memory of GPU {', '.join(shared)}" if shared else "by way of the host's memory"
    found = [
        f"{count}; processes that share a GPU pass tensors {told}",
        f"large tensors for another GPU, another host or the CPU go {staging.describe()}",
    ]
    facts = describe_machine(every_gpu=True)
    found += [f"GPU {gpu.index}: {gpu.name}, {gpu.capability[0]}.{gpu.capability[1]}" for gpu in facts.gpus]
    return _with_own_findings("\n".join(found), "GPUs", facts)


def _agents() -> None:
    """Print a line for each agent of this user."""
    for path in sorted(runtime_directory().glob("agent-*-*")):
        pid = path.name.split("-")[1]
        try:
            with (path / "lock").open("rb") as lock:
                # A living agent holds the lock alone. Shared here: another doctor is no agent.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found = "has died; the next agent that starts cleans up after it"
        except FileNotFoundError:
            continue  # the agent is removing it right now
        except BlockingIOError:
            command = ""
            with contextlib.suppress(OSError):  # it has just ended, or it runs in another container
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            found = command.replace("\0", " ").strip() or "?"
        _line(f"agent of {pid}", found)
