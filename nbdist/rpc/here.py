"""The agent for which the calling thread runs, because several agents may share a process."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any


class _PerThread(threading.local):
    agent: Any = None


here = _PerThread()
"""``here.agent`` is the `nbdist.rpc.agent.Agent` for which the calling thread runs; None if it runs for none."""


class Active:
    """A context manager: inside of it, the calling thread runs for ``agent``."""

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
