"""Lets the thread that waits for an answer read it, when that answer is likely to be the next message.

Otherwise each answer needs two threads: one reads it and wakes the other, which costs a switch of threads in the middle
of a call.

The waiting thread becomes a *guest* among the threads of the pool that read:

- While there is a guest, a message wakes the guest rather than a thread of the pool.
- A guest runs no requests: they may take long, or need a lock that the guest's thread holds. It passes them to the
  pool.
- There is one guest at a time. Other waiting threads sleep on a lock.
- Threads are guests only while that saves time. If another thread had to settle the call after all, or the guest read a
  request, the agent's next 1, 2, 4, … 64 waits sleep on a lock.
- A thread inside ``no_grad`` or another mode of torch is no guest: it would decode other threads' messages in its mode.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from nbdist.channel.contract import Channel
from nbdist.channel.local import WAITING_CODE
from nbdist.rpc.latch import Latch
from nbdist.rpc.links import Links
from nbdist.rpc.pool import Job
from nbdist.signals import DeferredSignals
from nbdist.torch_private import is_in_a_mode

_MOST_SKIPS = 64  # the most waits that sleep on a lock before a thread becomes a guest again

_log = logging.getLogger("nbdist.rpc")


class WaitingReader:
    """Lets one thread at a time, the guest, read messages itself until the answer for which it waits has come."""

    def __init__(
        self, channel: Channel, links: Links, read: Callable[[float | None], Job | None], submit: Callable[[Job], None]
    ) -> None:
        self._channel, self._links = channel, links
        self._read, self._submit = read, submit
        self.skips = 0
        """The number of next waits that must sleep on a lock."""
        self._next_skips = 1  # after the next failure
        self._free = threading.Lock()  # held by the guest
        self._thread = 0  # the ident of the guest's thread; 0 without a guest
        # True while another thread wakes the guest from `Channel.receive`, and the guest has not noted it.
        self._is_called = False
        self._calling = threading.Lock()  # guards `_thread` and `_is_called`

    def read(self, outcome: Latch) -> None:
        """Read messages in the calling thread until ``outcome`` is settled, or only until reading saves no time."""
        try:
            if self.skips:
                self.skips -= 1
            elif not (self._free.locked() or is_in_a_mode()):
                self._read_until(outcome)
        finally:  # also if this thread has read nothing: another thread must read now
            self._channel.expect_no_more()

    def _read_until(self, outcome: Latch) -> None:
        """Be the guest until ``outcome`` is settled, a signal handler is due, or reading did not save time."""
        # A handler that raises would lose the message in hand (test_signals_at_any_time_lose_no_message). Handlers run
        # while this thread sleeps in the channel.
        with DeferredSignals(WAITING_CODE) as deferral:
            if not self._free.acquire(blocking=False):
                return
            self._thread = threading.get_ident()
            try:
                outcome.on_settle = self.dismiss
                while not (outcome.is_settled or deferral.is_due or self.skips):
                    self._read_one()
            finally:
                outcome.on_settle = None
                with self._calling:  # else another thread might still wake this guest, and nothing would end the waking
                    self._thread = 0
                if self._is_called:
                    self._note_heard()
                # This time reading was of use: half of the earlier failures are forgotten.
                if not self.skips and self._next_skips > 1:
                    self._next_skips >>= 1
                self._free.release()
                if self._channel.has_more() or self._links.closed:
                    self._channel.wake()  # a sleeping reader is not woken for messages that came together

    def _read_one(self) -> None:
        try:
            job = self._read(None)
        except Exception:  # nbdist's own fault: the waiting call did not cause it, and has to have its answer
            _log.exception("reading failed")
            job = None
        if self._is_called:
            self._note_heard()
        if job is not None:
            self._submit(job)  # a job may take long, or need a lock that this thread holds
        if job is not None or self._links.closed:
            self._read_less_often()

    def _read_less_often(self) -> None:
        """Make the next waits sleep on a lock instead of reading: first 1 wait, then 2, 4 and so on."""
        self.skips = self._next_skips
        self._next_skips = min(2 * self._next_skips, _MOST_SKIPS)

    def dismiss(self) -> None:
        """Let the guest, if there is one, sleep on its outcome instead of reading. Any thread may call this.

        The thread that has settled the outcome for which the guest waits comes here, too. `_note_heard` must follow.
        """
        with self._calling:
            if self._thread not in (0, threading.get_ident()):
                self._is_called = True
                self._channel.call()

    def _note_heard(self) -> None:
        """Let the channel stop waking the guest. The guest calls this."""
        with self._calling:
            self._is_called = False
            self._read_less_often()  # another thread has read the answer, so reading here was of no use
            self._channel.called()
