"""Tells all members of a cluster's RPC world at once when one of them is lost.

A member notices the end of a process of its own host at once, but of another host only after 12 seconds of silence. The
notebook learns earlier from the worker's keeper; and a worker that starts again under the same name can join only when
all members have given its predecessor up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from nbdist.errors import NbdistError
from nbdist.rpc.agent import Agent, active_agent
from nbdist.rpc.futures import Future
from nbdist.wire.messages import Record

_TOLD_WITHIN = 5.0  # seconds for a member to confirm that it has given up another one


class Losses:
    """Passes each loss that the notebook's agent notices on to the other members. Any thread may use it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._asked: list[Future[Any]] = []
        agent.on_lost(self._on_lost)

    def _on_lost(self, record: Record, why: str) -> None:
        # The agent calls this, so it must not wait.
        with self._lock:
            self._asked = [each for each in self._asked if not each.done()]
        for other in self._agent.membership.others():
            with contextlib.suppress(NbdistError):
                asked = self._agent.call(other.name, _give_up, record.incarnation, why, timeout=_TOLD_WITHIN)
                with self._lock:
                    self._asked.append(asked)

    def wait(self) -> None:
        """Wait until each member has given up the lost members, or does not answer; for `_TOLD_WITHIN` s at most."""
        deadline = time.monotonic() + _TOLD_WITHIN
        with self._lock:
            asked = list(self._asked)
        while time.monotonic() < deadline and not all(each.done() for each in asked):
            time.sleep(0.002)


def _give_up(incarnation: int, why: str) -> None:
    """Give up a lost member of this agent's world. The notebook calls this on the other members."""
    if (agent := active_agent()) is not None:
        agent.lose(incarnation, why)
