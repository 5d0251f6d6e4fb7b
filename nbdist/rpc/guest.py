"""The thread that waits for an answer reads it itself, where it is likely to be the next thing that comes.

Else two threads have part in each answer: the one that reads it, and the one that it wakes, which is a change of
threads in the midst of a call. Of all that wait for messages the kernel wakes the one that came last; that is the one
which has just made the call.

It is a guest among the threads that read: it runs nothing that others ask for, which may take long, or need what the
guest holds; that it leaves to the pool. And it comes only while that pays: where others were needed after all, the
next waits are on a lock, the more of them the more often that was so; as they are for everybody while there is a
guest already.

Nor does it come from a thread that is in some mode of torch's, without grad or with another default device: what others
are sent is not to be read in that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from nbdist.channel.contract import Channel
from nbdist.channel.local import SLEEPS
from nbdist.rpc.dispatch import Job
from nbdist.rpc.futures import Latch
from nbdist.rpc.links import Links
from nbdist.signals import Deferral
from nbdist.torch_private import is_in_a_mode

__all__ = ["Guest"]

_REST_MOST = 64
"""So many waits are on a lock, at most, before another one is tried."""

_log = logging.getLogger("nbdist.rpc")


class Guest:
    """One agent's place for a guest."""

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
        self._rest_next = 1
        self._free = threading.Lock()
        self._thread = 0
        self._is_called = False
        self._calling = threading.Lock()

    def read(self, outcome: Latch) -> None:
        """Read, for as long as it pays, until ``outcome`` is there."""
        try:
            if self._rest:
                self._rest -= 1
            elif not (self._free.locked() or is_in_a_mode()):
                self._read_until(outcome)
        finally:  # also where it has read nothing: another thread has to
            self._channel.expect_no_more()

    def _read_until(self, outcome: Latch) -> None:
        with Deferral(SLEEPS) as deferral:
            if not self._free.acquire(blocking=False):
                return
            self._thread = threading.get_ident()
            try:
                outcome.on_settle = self._call
                while not (outcome.is_settled or deferral.is_due or self._rest):
                    self._read_one()
            finally:
                outcome.on_settle = None
                with self._calling:  # or who is about to call would call nobody, and all that read
                    self._thread = 0
                if self._is_called:
                    self._come()
                if not self._rest and self._rest_next > 1:
                    self._rest_next >>= 1
                self._free.release()
                if self._channel.has_more() or self._links.closed:
                    self._channel.wake()  # who sleeps there has not been told of what came together

    def _read_one(self) -> None:
        try:
            job = self._read(None)
        except Exception:  # not the waiting call's affair
            _log.exception("reading failed")
            job = None
        if self._is_called:
            self._come()
        if job is not None:
            self._submit(job)
        if job is not None or self._links.closed:
            self._tire()

    def _tire(self) -> None:
        self._rest = self._rest_next
        self._rest_next = min(2 * self._rest_next, _REST_MOST)

    def _call(self) -> None:
        """What the guest waits for is settled: if by somebody else, the guest has to know."""
        with self._calling:
            if self._thread not in (0, threading.get_ident()):
                self._is_called = True
                self._channel.call()

    def _come(self) -> None:
        """Note that the guest has heard that it was called."""
        with self._calling:
            self._is_called = False
            self._tire()
            self._channel.called()
