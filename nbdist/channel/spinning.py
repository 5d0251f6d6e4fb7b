"""Decides whether a thread that waits for a message first polls for it, instead of sleeping at once.

Waking a sleeping thread takes 5 to 50 µs, most of all in virtual machines, and also costs time in the process that
wakes it. And a core that was idle runs slower at first. If messages follow each other as quickly as calls and their
answers, polling costs less than sleeping, even in CPU time. So a wait may begin with a *look*: the thread polls for up
to 1 ms (`POLL_SECONDS`), and yields its core between two polls (``sched_yield``). Only then does it sleep.

===============================================  ===================================================
the wait that just ended                         the next waits
===============================================  ===================================================
was short (`_SHORT_WAIT`), without a look        begin with a look
began with a look; the message came in time      begin with a look
began with a look in vain, three times in a row  sleep at once: the next wait, then the next 2, 4 …
                                                 (`_MOST_SLEEPS_AFTER_VAIN_LOOKS`)
began with a look of more than `_STALLED_LOOK`   sleep at once: the next `_SLEEPS_AFTER_STALLED_LOOK`
took longer than `_SHORT_WAIT`                   sleep at once, until one is short
===============================================  ===================================================

A thread whose look takes much longer than `POLL_SECONDS` shares its core with a thread that computes. Then sleeping is
better: the kernel prefers a thread that wakes up to one that yields. Pure: no function here waits or reads the clock.
"""

from __future__ import annotations

POLL_SECONDS = 1e-3  # for which a thread polls before it sleeps: a quick function or a small backward pass takes less
# After a shorter wait, the next one may begin with a look: without sleep it may be shorter still.
_SHORT_WAIT = 2 * POLL_SECONDS
_STALLED_LOOK = 2 * POLL_SECONDS  # a look that took longer shared its core with a thread that computes
_VAIN_LOOKS_TOLERATED = 2  # in a row: the machine may have been busy by chance
_MOST_SLEEPS_AFTER_VAIN_LOOKS = 8  # the most waits that begin with sleep before the next look
_SLEEPS_AFTER_STALLED_LOOK = 64  # the number of waits that begin with sleep


class Spinning:
    """Decides, from earlier waits, whether the next one begins with a look: polling for a message without sleeping."""

    def __init__(self) -> None:
        self.is_worth_while = False
        """True if the next wait should begin with a look of `POLL_SECONDS`."""
        self._in_vain = 0  # the number of looks in vain in a row
        self._rest = 0  # the number of next waits that must begin with sleep

    def waited(self, seconds: float, looked: float = 0.0) -> None:
        """Record that a wait took ``seconds``, of which the first ``looked`` seconds were a look (0 for none)."""
        if looked:
            if seconds < POLL_SECONDS:
                self._in_vain = 0
                return  # and leave `is_worth_while` True: the thread would not have looked otherwise
            self._in_vain += 1
            if looked > _STALLED_LOOK:
                self._rest = _SLEEPS_AFTER_STALLED_LOOK
            elif self._in_vain > _VAIN_LOOKS_TOLERATED:
                self._rest = min(1 << (self._in_vain - _VAIN_LOOKS_TOLERATED - 1), _MOST_SLEEPS_AFTER_VAIN_LOOKS)
        elif self._rest:
            self._rest -= 1
        self.is_worth_while = not self._rest and seconds < _SHORT_WAIT
