"""Ctrl-C at any moment of what a test does, many times over."""

from __future__ import annotations

import random
import signal
import time


class Interrupts:
    """Real signals, each of which raises KeyboardInterrupt in the main thread a few microseconds later."""

    def __init__(self) -> None:
        self.came = 0
        self._chance = random.Random(0)
        self._before = signal.signal(signal.SIGALRM, self._raise)

    def _raise(self, *_: object) -> None:
        self.came += 1
        raise KeyboardInterrupt

    def during(self, send, seconds: float) -> None:
        """Send, and be interrupted at some moment of that, or just before or after it."""
        try:
            signal.setitimer(signal.ITIMER_REAL, self._chance.uniform(1e-6, seconds))
            send()
            time.sleep(seconds)
        except KeyboardInterrupt:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def during_many(self, send, times: int) -> None:
        """Be interrupted in most of ``times`` sends."""
        for _ in range(50):
            send()  # at first it takes longer
        begun = time.monotonic()
        for _ in range(50):
            send()
        seconds = 1.5 * (time.monotonic() - begun) / 50
        for _ in range(times):
            self.during(send, seconds)
        assert self.came > times / 2

    def close(self) -> None:
        signal.signal(signal.SIGALRM, self._before)
