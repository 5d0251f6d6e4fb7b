"""Reads where all threads of workers are in the user's code: for `%dist_stacks`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from nbdist.amounts import duration
from nbdist.autograd.api import recorder
from nbdist.cluster.held_locks import say_lock
from nbdist.cluster.jupyter.labels import read_frames
from nbdist.cluster.partings import Parting
from nbdist.cluster.whereabouts import say_place
from nbdist.code_lines import users_lines
from nbdist.code_places import is_users
from nbdist.errors import NbdistError
from nbdist.rpc.agent import active_agent
from nbdist.rpc.asking import ask_each
from nbdist.rpc.calls.executor import Request
from nbdist.thread_frames import lines_of, outwards, thread_frames

if TYPE_CHECKING:
    from nbdist.cluster.cluster import Cluster

_ANSWER_WITHIN = 1.0
"""Seconds for a worker to answer. One that holds the GIL cannot; then its host is asked."""
_SERVES = Request.invoke.__code__
"""The code of the frame that runs a call; its ``self`` is the call."""


class ThreadStack(NamedTuple):
    """A thread that runs the user's code."""

    thread: str
    """The thread's name."""
    lines: tuple[str, ...]
    """The lines of the user's code that it is in, the innermost first."""
    at: str = ""
    """The call of a library that it is in, such as ``dist.recv(src=0)``, or the lock that it waits for."""
    serves: str = ""
    """The call of another worker that it runs, with the caller and the time."""


class Stacks(NamedTuple):
    """The threads of several workers, at about one moment."""

    threads: dict[str, Sequence[ThreadStack]]
    """The threads of each worker that has answered, by its name."""
    silent: dict[str, ThreadStack | None]
    """The main thread of each worker that has not, from its host; None if that knows no line of the user's code."""
    lost: dict[str, str]
    """The reason why each other worker is lost."""
    partings: Sequence[Parting]
    """The collectives to which some workers have not come."""


def read_stacks(cluster: Cluster, targets: str | None) -> Stacks:
    """Return where the threads of some workers are, in at most about two seconds."""
    workers = cluster.select(targets)
    with recorder().contexts.outside():
        names = dict.fromkeys([worker.name for worker in workers if worker.alive], ())
        answered = ask_each(cluster.agent, own_stacks, names, timeout=_ANSWER_WITHIN).or_raise(but=NbdistError)
    probes = {name: cluster.probe(name) for name in names if name not in answered}
    silent: dict[str, ThreadStack | None] = dict.fromkeys(probes)
    for name, probe in probes.items():
        with contextlib.suppress(Exception):  # the worker ends, or its host cannot be reached
            if lines := tuple(map(str, users_lines(read_frames(probe.result(_ANSWER_WITHIN).frames)))):
                silent[name] = ThreadStack(threading.main_thread().name, lines)
    lost = {worker.name: worker.lost or worker.state for worker in workers if not worker.alive}
    threads = {name: answered[name] for name in names if name in answered}
    return Stacks(threads, silent, lost, cluster.partings(probes))


def own_stacks() -> list[ThreadStack]:
    """Return the threads of this worker that run the user's code, the main thread first; but the one that asks."""
    threads = thread_frames()
    names = {each.ident: each.name for each in threading.enumerate()}
    main = threading.main_thread().ident
    found = []
    for ident in sorted(threads, key=lambda each: each != main):
        if (place := say_place(threads[ident])) is None:
            continue
        calls = (each.f_locals["self"] for each in outwards(threads[ident]) if each.f_code is _SERVES)
        serves = next(map(_say_call, calls), "")
        lines = tuple(map(str, users_lines(lines_of(threads[ident]))))
        at = say_lock(ident, threads) or ("" if is_users(threads[ident].f_code.co_filename) else place[0])
        found.append(ThreadStack(names.get(ident, "a thread without a name"), lines, at, serves))
    return found


def _say_call(request: Request) -> str:
    agent = active_agent()
    assert agent is not None  # it runs the call
    return f"{request.call.function} for {agent.name_of(request.sender)}, {duration(time.monotonic() - request.since)}"
