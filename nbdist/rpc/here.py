"""For which agent the calling thread runs, where several share a process."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

__all__ = ["Active", "here"]


class _PerThread(threading.local):
    agent: Any = None


here = _PerThread()
"""Has the agent for which the calling thread runs, an `nbdist.rpc.agent.Agent`; None if it runs for none."""


class Active:
    """The time in which an agent is the calling thread's."""

    __slots__ = ("_agent", "_before")

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __enter__(self) -> Any:
        self._before, here.agent = here.agent, self._agent
        return self._agent

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        here.agent = self._before
