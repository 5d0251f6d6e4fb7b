"""Ends calls where they run, once the user has given up on them.

In a cluster, Ctrl-C in the notebook means the work, not the wait for it. The caller says which call; the callee
raises KeyboardInterrupt in the thread that runs it, or, where that thread waits for a nested call, fails that call
and has it stopped in turn. A thread inside C code does not notice before it comes back; it is named.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nbdist.errors import Interrupted, NbdistError
from nbdist.rpc.calls import Pending
from nbdist.rpc.dispatch import Job
from nbdist.rpc.exchange import Exchange
from nbdist.rpc.executor import Request
from nbdist.rpc.here import here
from nbdist.rpc.links import Links
from nbdist.wire.messages import Record, Stop

__all__ = ["BREAK_AFTER", "PATIENCE", "Stopping"]

PATIENCE = 2.0
"""Seconds after which what has not given way is named."""

BREAK_AFTER = 0.4
"""Seconds after which what has not given way may be in a collective, which only `Stopping.break_off` ends."""

_POLL = 0.005
_OURS = os.path.dirname(os.path.dirname(__file__))
_ASK = 0.5
_REMEMBERED = 1000

_RUNS_USER_CODE = Request.invoke.__code__
"""Frames inside of this one's are the user's."""
_CALLS_USER_CODE = os.path.join(_OURS, "nn")
"""Code of ours that calls users' modules, and puts everything back whatever they raise."""
_RUNS_TASKS = {
    os.path.join(_OURS, *place) for place in (("cluster", "worker_tasks.py"), ("compat", "ipyparallel", "tasks.py"))
}
"""Code of ours that only calls a user's function: KeyboardInterrupt may be raised in it as in the function."""
_TORCHS = os.path.dirname(torch.__file__)
_PYTHONS = os.path.dirname(threading.__file__)

_Key = tuple[int, int]
"""A running call: its caller's incarnation, and the caller's number for the call."""


class Stopping:
    """One agent's part in stopping calls, as caller and as callee."""

    def __init__(
        self,
        me: Record,
        exchange: Exchange,
        links: Links,
        *,
        call: Callable[..., Any],
        give_up: Callable[[Sequence[Pending], BaseException], None],
        submit: Callable[[Job], None],
    ) -> None:
        """Stop nothing yet.

        ``call`` is `nbdist.rpc.caller.Caller.sync`; ``give_up(calls, error)`` ends the waits for calls.
        """
        self.patience = PATIENCE
        self.break_off: Callable[[int], object] | None = None
        """Ends the collective in which a thread waits, where somebody knows how; takes the thread's ident."""
        self._me = me.incarnation
        self._pending = exchange.calls
        self._links = links
        self._call = call
        self._end_waits = give_up
        self._submit = submit
        self._lock = exchange.lock
        self._threads: dict[_Key, int] = {}
        self._stopped: dict[_Key, None] = {}

    # -- the callee's side --------------------------------------------------------------------

    def begin(self, key: _Key) -> None:
        """Let a call be stopped in this thread until `end`, which must follow whatever this raises."""
        with self._lock:
            if self._stopped and key in self._stopped:
                raise KeyboardInterrupt
            self._threads[key] = threading.get_ident()

    def end(self, key: _Key) -> None:
        """Let a call no longer be stopped."""
        with self._lock:
            self._threads.pop(key, None)
            if self._stopped and self._stopped.pop(key, 0) is None:
                _raise_in(threading.get_ident(), None)  # what has not been raised must not hit the thread's next call

    def on_stop(self, message: Stop, sender: int, _: list[bytes]) -> None:
        """Stop a call whose caller has given up on it, or keep it from beginning."""
        key = sender, message.id
        with self._lock:
            self._stopped[key] = None  # it may not have begun
            if len(self._stopped) > _REMEMBERED:
                del self._stopped[next(iter(self._stopped))]
            thread = self._threads.get(key)
        if thread is None:
            return
        nested = [call for call in self._pending.all() if call.thread == thread]
        self.stop(nested)
        if nested:
            self._submit(lambda: self._give_up(nested))
            return
        raised = self._try_to_raise(key)
        if not raised or self.break_off is not None:
            threading.Thread(target=self._insist, args=(key, raised), name="nbdist-stopping", daemon=True).start()

    def stop_served(self) -> None:
        """Stop every call that runs here for another member, but the one in the calling thread."""
        with self._lock:
            keys = [key for key, thread in self._threads.items() if thread != threading.get_ident()]
        for caller, id in keys:
            self.on_stop(Stop(id), caller, [])

    def _give_up(self, nested: Sequence[Pending]) -> None:
        """End the waits of a function that is to stop; it finds that it was interrupted."""
        for call in nested:
            stopped = Interrupted("stopped: its caller was interrupted")
            self._end_waits([call], stopped if call.result is not None else KeyboardInterrupt())

    def _insist(self, key: _Key, raised: bool) -> None:
        """Raise KeyboardInterrupt in a call's thread as soon as that may be; end a collective that is deaf to it."""
        deadline = time.monotonic() + PATIENCE
        while not raised and time.monotonic() < deadline:
            time.sleep(_POLL)
            raised = self._try_to_raise(key)
        deadline = time.monotonic() + BREAK_AFTER
        while (thread := self._threads.get(key)) is not None and self.break_off is not None:
            if time.monotonic() > deadline:
                self.break_off(thread)
                return
            time.sleep(_POLL)

    def _try_to_raise(self, key: _Key) -> bool:
        """Raise KeyboardInterrupt in the thread of a call; not while it is in our code, which may hold a lock."""
        with self._lock:
            thread = self._threads.get(key)
            if thread is None:
                return True  # it has ended
            frame = sys._current_frames().get(thread)
            users = False
            while frame is not None and frame.f_code is not _RUNS_USER_CODE:
                file = frame.f_code.co_filename
                if file in _RUNS_TASKS:
                    users = True
                elif file.startswith(_OURS):
                    if not users or not file.startswith(_CALLS_USER_CODE):
                        return False
                elif not _is_called_by_both(file):
                    users = True
                frame = frame.f_back
            _raise_in(thread, KeyboardInterrupt)
            return True

    def where(self, caller: int, id: int) -> str:
        """Where a running call is, in a few words."""
        thread = self._threads.get((caller, id))
        frame = sys._current_frames().get(thread) if thread is not None else None
        if frame is None:
            return ""
        stack = [entry for entry in traceback.extract_stack(frame) if not entry.filename.startswith(_OURS)]
        if not stack or stack[-1].filename == threading.__file__:
            return "C code"  # nothing of Python's is between it and us
        return f"{stack[-1].name}, line {stack[-1].lineno} of {stack[-1].filename}"

    # -- the caller's side --------------------------------------------------------------------

    def stop(self, calls: Sequence[Pending]) -> None:
        """Have these calls stopped where they run."""
        for call in calls:
            with contextlib.suppress(NbdistError):
                self._links.post(call.to, Stop(call.id))

    def on_interrupt(self, outcome: object, error: BaseException) -> None:
        """Ctrl-C has ended a wait of this thread: stop what it waited for, and name what goes on all the same."""
        pending, me = self._pending, threading.get_ident()
        calls = [call for call in pending.all() if call.outcome is outcome]
        values = {call.target for call in calls if call.target is not None}
        calls += [call for call in pending.all() if call.result is not None and call.result.rref in values]
        calls = calls or [call for call in pending.all() if call.thread == me]  # a future made of others
        self.stop(calls)
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline and any(pending.get(call.id) for call in calls):
            time.sleep(_POLL)
        for call in calls:
            if pending.get(call.id) is not None:
                error.add_note(
                    f"{call.worker} has not stopped running {call.function} within {self.patience:g} s"
                    f"{self._ask_where(call)}; `%dist_restart {call.worker}` ends it"
                )

    def _ask_where(self, call: Pending) -> str:
        try:
            found = self._call(call.worker, _where, (self._me, call.id), None, _ASK)
        except NbdistError:
            return " and does not say where it is"
        return f" (it is in {found})" if found else ""


def _where(caller: int, id: int) -> str:
    return here.agent.stopping.where(caller, id) if here.agent is not None else ""


def _is_called_by_both(file: str) -> bool:
    """Whether this is torch's code or Python's own, which we call as users do; models of other packages are theirs."""
    return file.startswith(_TORCHS) or (file.startswith(_PYTHONS) and "-packages" not in file)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    what: Any = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
