"""The hooks that a wait for an outcome calls: around the time in which its thread is blocked, and after Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext


class _PerThread(threading.local):
    blocking_hook: Callable[[], AbstractContextManager[None]] | None = None


this_wait = _PerThread()
"""The hook of the calling thread's waits. A `Latch` reads it here, which saves a call in each `rpc_sync`."""


def set_blocking_hook(hook: Callable[[], AbstractContextManager[None]] | None) -> None:
    """Enter the context manager ``hook()`` around every wait of the calling thread; None removes the hook."""
    this_wait.blocking_hook = hook


def blocking_wait() -> AbstractContextManager[None]:
    """Return a context manager to enter around code in which the calling thread waits for another call."""
    hook = this_wait.blocking_hook
    return hook() if hook is not None else nullcontext()


_interrupt_hook: Callable[[Sequence[object], BaseException], None] | None = None


def set_interrupt_hook(hook: Callable[[Sequence[object], BaseException], None] | None) -> None:
    """Set ``hook(outcomes, error)``, called in a thread whose wait Ctrl-C has ended; None removes it."""
    # Each outcome is a `Latch` or a `Promise`, and the error is the KeyboardInterrupt, which is raised afterwards.
    global _interrupt_hook
    _interrupt_hook = hook


def call_interrupt_hook(outcomes: Sequence[object], error: BaseException) -> None:
    """Call the function of `set_interrupt_hook`, if there is one."""
    if _interrupt_hook is not None:
        _interrupt_hook(outcomes, error)
