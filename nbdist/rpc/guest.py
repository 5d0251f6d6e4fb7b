"""The thread that waits for an answer reads it itself, where it is likely to be the next thing that comes.

Else two threads have part in each answer: the one that reads it, and the one that it wakes, which is a change of
threads in the midst of a call. Of all that wait for messages the kernel wakes the one that came last; that is the one
which has just made the call.

It is a guest among the threads that read: it runs nothing that others ask for, which may take long, or need what the
guest holds; that it leaves to the pool. And it comes only while that pays: where others were needed after all, the
next waits are on a lock, the more of them the more often that was so; as they are for everybody while there is a
guest already.
"""

from __future__ import annotations

import _signal as signals  # type: ignore[import-not-found]  # `signal` itself makes enums, twice a call
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from nbdist.channel.local import SLEEPS
from nbdist.rpc.futures import Latch

if TYPE_CHECKING:
    from nbdist.rpc.agent import Agent

__all__ = ["Guest"]

_REST_MOST = 64
"""So many waits are on a lock, at most, before another one is tried."""


class Guest:
    """One agent's place for a guest."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._rest = 0
        self._rest_next = 1
        self._free = threading.Lock()
        self._thread = 0
        self._is_called = False
        self._calling = threading.Lock()

    def read(self, outcome: Latch) -> None:
        """Read, for as long as it pays, until ``outcome`` is there."""
        if self._rest:
            self._rest -= 1
            return
        if not self._free.acquire(blocking=False):
            return
        self._thread = threading.get_ident()
        try:
            with self._agent.activate(), _Deferral() as deferral:
                outcome.on_settle = self._call
                while not (outcome.is_settled or deferral.is_due or self._rest):
                    self._read_one()
        finally:
            outcome.on_settle = None
            self._thread = 0
            self._come()
            if not self._rest and self._rest_next > 1:
                self._rest_next >>= 1
            self._free.release()

    def _read_one(self) -> None:
        job = self._agent.read(None)
        self._come()
        if job is not None:
            self._agent.pool.submit(job)
        if job is not None or self._agent.closed:
            self._tire()

    def _tire(self) -> None:
        self._rest = self._rest_next
        self._rest_next = min(2 * self._rest_next, _REST_MOST)

    def _call(self) -> None:
        """What the guest waits for is settled: if by somebody else, the guest has to know."""
        with self._calling:
            if self._thread not in (0, threading.get_ident()):
                self._is_called = True
                self._agent.channel.call()

    def _come(self) -> None:
        if self._is_called:
            with self._calling:
                self._is_called = False
                self._tire()
                self._agent.channel.called()


class _Deferral:
    """The time in which Ctrl-C, in the main thread, must not come between taking a message and acting upon it.

    While that thread sleeps until there is one, it may.
    """

    __slots__ = ("_before", "_frame", "is_due")

    def __init__(self) -> None:
        self.is_due = False

    def __enter__(self) -> _Deferral:
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            before = signals.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signals.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is SLEEPS:
            self._before(number, frame)
        else:
            self.is_due, self._frame = True, frame

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signals.signal(signal.SIGINT, self._before)
            if self.is_due:
                self._before(signal.SIGINT, self._frame)
