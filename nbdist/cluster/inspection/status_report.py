"""The worker's side of `%dist_status`: reports what this worker does, while its main thread may be busy."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from typing import NamedTuple

from nbdist.cluster.processes.process_memory import own_bytes
from nbdist.cluster.whereabouts import say_place
from nbdist.cluster.worker.debugger import STOPS_ASK
from nbdist.cluster.worker.flight_recorder import progress
from nbdist.code_lines import users_lines
from nbdist.rpc.agent import Agent, active_agent
from nbdist.rpc.core.pending import Pending
from nbdist.thread_frames import lines_of, thread_frames


class StatusReport(NamedTuple):
    """A worker's answer to `nbdist.cluster.inspection.status.collect`."""

    calls: int | None
    """The number of calls that run, without the one that asks; None if the worker did not answer."""
    doing: str = ""
    """The call that has run longest, its caller and its seconds, and the number of further calls."""
    where: str = ""
    """The line of the user's code that the worker runs."""
    waits: dict[str, int] = {}  # noqa: RUF012 - never changed
    """The number of unanswered calls that the worker has made, by the name of the worker they went to."""
    sent: dict[str, int] = {}  # noqa: RUF012
    """Bytes that the worker has sent, by the receiver's name."""
    gpu_memory: int | None = None
    """Bytes that torch has reserved on the worker's GPUs."""
    gpu_busy: int | None = None
    """Percent of the last moment in which the worker's GPU computed, for any process."""
    memory: int | None = None
    """Bytes in pages that no other process has; None where the system has no count."""
    cpu_seconds: float | None = None
    """CPU time that the worker's process has used, in seconds; None if it is not known."""
    in_collective: bool = False
    """True if the worker is in a collective: see `Position.in_collective`."""
    has_broken_group: bool = False
    """True if an interrupt has broken off a process group, on this worker or on another one."""


def make_report() -> StatusReport:
    """Make this worker's report. Called on the worker, in a thread of its agent."""
    process = StatusReport(0, memory=own_bytes(), cpu_seconds=time.process_time())
    if (agent := active_agent()) is None:
        return process
    return process._replace(
        calls=agent.exchange.active - 1,
        doing=agent.executor.doing(but=1),  # the newest asks for this report
        where=_users_line(),
        waits=dict(Counter(call.worker for call in users_calls(agent))),
        sent=agent.sent(),
        gpu_memory=gpu_memory(),
        gpu_busy=gpu_busy(),
        in_collective=bool(progress()[1]),
        has_broken_group=bool(getattr(agent.named.find("collectives"), "is_broken", False)),
    )


def users_calls(agent: Agent) -> list[Pending]:
    """Return the unanswered calls of an agent of this process, without those for which only nbdist's own code waits."""
    frames = thread_frames()

    def is_users_own(call: Pending) -> bool:
        frame = frames.get(call.thread) if call.is_waited_for else None
        return frame is None or say_place(frame) is not None

    return [call for call in agent.awaited() if call.function != STOPS_ASK and is_users_own(call)]


def gpu_memory() -> int | None:
    """Return the bytes that torch has reserved on this process's GPUs; None without GPUs, or before they are used."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return None
    # All devices, because the calling thread's current device need not be the worker's.
    return int(sum(cuda.memory_reserved(device) for device in range(cuda.device_count())))


def gpu_busy() -> int | None:
    """Return the percentage of the last moment in which the worker's GPU computed, for any process; None if unknown."""
    cuda, agent = sys.modules.get("torch.cuda"), active_agent()
    if cuda is None or not cuda.is_initialized() or agent is None or not agent.me.device.startswith("cuda"):
        return None
    try:
        return int(cuda.utilization(agent.me.device))
    except Exception:  # of torch or of the package, which has errors of its own
        return None


def _users_line() -> str:
    """Return the line of the user's code that some thread runs, the main thread's if it runs any; "" if none does."""
    frames = thread_frames()
    del frames[threading.get_ident()]
    main = threading.main_thread().ident
    threads = sorted(frames, key=lambda thread: thread != main)
    return next((str(line) for thread in threads for line in users_lines(lines_of(frames[thread]))), "")
