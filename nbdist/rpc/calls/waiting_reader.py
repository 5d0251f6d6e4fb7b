"""Reads an answer in the thread that waits for it, where that answer is likely to be the next message.

Otherwise each answer needs two threads: one reads it and wakes the other, which costs a switch of threads in the middle
of a call. While there is a guest, a message wakes the guest rather than a thread of the pool.

The waiting thread is a *guest* among the threads of the pool that read:

- A guest runs no requests, which may take long, or need a lock that the guest's thread holds. It leaves them to the
  pool.
- There is one guest at a time. Other threads wait on their locks.
- Threads are guests only while that pays. When another thread had to settle the call after all, or the guest read a
  request, the agent's next 1, 2, 4, … 64 waits are on a lock.
- A thread inside ``no_grad`` or another mode of torch is no guest: it would decode other threads' messages in its mode.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from nbdist.channel.contract import Channel
from nbdist.channel.local import WAITING_CODE
from nbdist.rpc.dispatch import Job
from nbdist.rpc.futures import Latch
from nbdist.rpc.links import Links
from nbdist.signals import Deferral
from nbdist.torch_private import is_in_a_mode

__all__ = ["Guest"]

_MOST_SKIPS = 64
"""The most waits that are on a lock before a thread is a guest again."""

_log = logging.getLogger("nbdist.rpc")


class Guest:
    """Lets one thread at a time, the guest, read the answer for which it waits by itself, in place of the pool."""

    def __init__(
        self,
        channel: Channel,
        links: Links,
        read: Callable[[float | None], Job | None],
        submit: Callable[[Job], None],
    ) -> None:
        self._channel, self._links = channel, links
        self._read, self._submit = read, submit
        self._rest = 0
        """The number of waits that are still to be on a lock."""
        self._rest_next = 1
        """The number of waits on a lock after the next failure."""
        self._free = threading.Lock()
        """Held by the guest."""
        self._thread = 0
        """The ident of the guest's thread; 0 without a guest."""
        self._is_called = False
        """True while the guest is called out of `Channel.receive` and has not noted it."""
        self._calling = threading.Lock()
        """Guards `_thread` and `_is_called`."""

    def read(self, outcome: Latch) -> None:
        """Read messages in the calling thread, as long as that pays, until ``outcome`` is settled.

        It may return before: at once if another thread is the guest or this thread is in a mode of torch, and if
        reading did not pay (`_read_less_often`). Then the caller sleeps on ``outcome``.
        """
        try:
            if self._rest:
                self._rest -= 1
            elif not (self._free.locked() or is_in_a_mode()):
                self._read_until(outcome)
        finally:  # also if it has read nothing: another thread must read now
            self._channel.expect_no_more()

    def _read_until(self, outcome: Latch) -> None:
        """Act as the guest until ``outcome`` is settled, a signal handler is due, or reading did not pay.

        Returns at once if another thread is the guest. `_read_less_often` says when reading did not pay.
        """
        with Deferral(WAITING_CODE) as deferral:
            if not self._free.acquire(blocking=False):
                return
            self._thread = threading.get_ident()
            try:
                outcome.on_settle = self._call
                while not (outcome.is_settled or deferral.is_due or self._rest):
                    self._read_one()
            finally:
                outcome.on_settle = None
                with self._calling:  # else another thread might still call this guest, and nobody would end the call
                    self._thread = 0
                if self._is_called:
                    self._note_heard()
                if not self._rest and self._rest_next > 1:
                    self._rest_next >>= 1
                self._free.release()
                if self._channel.has_more() or self._links.closed:
                    self._channel.wake()  # a sleeping reader is not woken for messages that came together

    def _read_one(self) -> None:
        """Read one message. If it needs a job, the pool runs the job.

        An error of reading is logged: it is not the waiting call's.
        """
        try:
            job = self._read(None)
        except Exception:  # not an error of the waiting call
            _log.exception("reading failed")
            job = None
        if self._is_called:
            self._note_heard()
        if job is not None:
            self._submit(job)
        if job is not None or self._links.closed:
            self._read_less_often()

    def _read_less_often(self) -> None:
        """Make the next waits sleep on a lock instead of reading: first 1 wait, then 2, 4 and so on, 64 at most.

        Called when reading did not pay: another thread settled the call, or the guest read a request.
        """
        self._rest = self._rest_next
        self._rest_next = min(2 * self._rest_next, _MOST_SKIPS)

    def _call(self) -> None:
        """Wake the guest, because another thread has settled the outcome that it waits for. That thread calls this.

        The guest then returns from `Channel.receive`; `_note_heard` must follow.
        """
        with self._calling:
            if self._thread not in (0, threading.get_ident()):
                self._is_called = True
                self._channel.call()

    def _note_heard(self) -> None:
        """Note that the guest has been woken, so that the channel stops waking it. The guest calls this.

        `_call` woke it, as another thread has read the answer. So the guest's reading was of no use, and the next waits
        sleep on a lock (`_read_less_often` says how many).
        """
        with self._calling:
            self._is_called = False
            self._read_less_often()
            self._channel.called()
