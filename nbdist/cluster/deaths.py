"""`Deaths`: brings together what the launcher and what the agent know of a worker's end."""

from __future__ import annotations

import signal
from collections.abc import Callable

from nbdist.cluster.jupyter.kernel_connection import KernelThread
from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.team import Team
from nbdist.rpc.agent import Agent
from nbdist.wire.messages import Record

_LAST_WORDS_WITHIN = 1.0  # seconds to wait for the end of a process, and as long again for the last text that it wrote


class Deaths:
    """Tells the agent of workers whose process has ended, and gives up workers that the agent has lost."""

    def __init__(
        self, team: Team, thread: KernelThread, agent: Agent, signal_worker: Callable[[str, int], object]
    ) -> None:
        self._team, self._thread, self._agent, self._signal = team, thread, agent, signal_worker
        agent.explain_end = self._explain
        agent.on_lost(self._on_lost)

    def on_end(self, worker: Worker, why: str) -> None:
        """Tell this process's agent that the process of a member has ended, and how. In the kernel thread."""
        if worker.host:  # the agent would notice only its silence; of this host's processes, it notices the end itself
            assert worker.incarnation is not None  # it was a member
            self._agent.lose(worker.incarnation, why)

    def _on_lost(self, record: Record, why: str) -> None:
        """Give up a worker on another host that the agent has lost, although its process may live. In any thread."""
        worker = self._team.with_record(record)
        if worker is None or not worker.host:
            return

        def give_up() -> None:
            if worker.alive and worker.incarnation == record.incarnation:
                worker.lose(why)
                self._signal(worker.name, signal.SIGKILL)  # once its host can be reached: it may be frozen, or cut off

        self._thread.soon(give_up)

    def _explain(self, record: Record) -> str:
        """Return in words how the worker with this record died; "" for other members, and while the worker lives."""
        if (worker := self._team.with_record(record)) is None:
            return ""
        worker.exited.wait(_LAST_WORDS_WITHIN)
        if worker.lost is None:  # else SIGKILL has ended it, which leaves no last words to wait for
            worker.ended.wait(_LAST_WORDS_WITHIN)
        return worker.lost or ""
