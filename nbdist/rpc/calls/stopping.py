"""Stops calls on the workers that run them, once the user has given up on them.

In a cluster, Ctrl-C in the notebook ends the work, not only the wait for it::

    notebook                        worker1                              worker2
    ────────                        ───────                              ───────
    Ctrl-C in a wait
    on_interrupt ── Stop ────────▶  on_stop: the call's thread ...
                                      runs the function: KeyboardInterrupt is raised in it
                                      waits for a nested call ── Stop ─▶ on_stop, and so on;
                                        the wait for it fails
                                      has made calls, does not wait ── Stop ─▶ on_stop, and so on
                                      is in a collective: break_off ends the collective
    2 s later: name what still runs

A thread inside C code does not see a KeyboardInterrupt before it returns to Python; after 2 s the notebook names it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import FrameType
from typing import Any

from nbdist.code_places import NBDIST, is_nbdists, is_pythons, is_torchs
from nbdist.errors import Interrupted, NbdistError
from nbdist.rpc.calls.executor import Request
from nbdist.rpc.core.exchange import Exchange
from nbdist.rpc.core.pending import Pending
from nbdist.rpc.here import here
from nbdist.rpc.links import Links, try_post
from nbdist.rpc.pool import Job
from nbdist.thread_frames import lines_of, thread_frames
from nbdist.wire.messages import Record, Stop

NAME_AFTER = 2.0
"""Seconds after which the caller names a call that has not stopped, and the callee no longer tries to raise."""

BREAK_OFF_AFTER = 0.4
"""Seconds after which a call that has not stopped may be in a collective, which only `Stopping.break_off` ends."""

_POLL = 0.005  # seconds between two checks whether a call has ended
_ASK_TIMEOUT = 0.5  # seconds to wait for a callee that is asked where its call is
_STOPS_REMEMBERED = 1000  # a Stop may arrive before its call has begun

_RUNS_USER_CODE = Request.invoke.__code__  # its frame separates the user's frames, inside of it, from the agent's
_CALLS_MODULES = "nn"  # calls users' modules, and restores everything whatever they raise
# A global of modules that only call a user's function: KeyboardInterrupt may be raised in them as in the function.
_RUNS_TASKS = "__nbdist_runs_tasks__"

_Key = tuple[int, int]  # a running call: the caller's incarnation, and the caller's number for the call


@dataclass(eq=False, repr=False)
class Stopping:
    """The part of an agent that stops calls, as caller and as callee."""

    _me: Record
    _exchange: Exchange
    _links: Links
    _: KW_ONLY
    call: Callable[..., Any]  # `Caller.sync`
    give_up: Callable[[Sequence[Pending], BaseException], None]  # fails calls, which ends the waits for them
    submit: Callable[[Job], None]  # this and the next are those of the agent's `Pool`
    is_blocked: Callable[[int], bool]
    patience: float = NAME_AFTER
    """Seconds that `on_interrupt` waits before it names the calls that still run."""
    break_off: Callable[[int], object] | None = None
    """Ends the collective in which a thread waits, by the thread's ident; None if no layer can do this."""
    # The idents of the threads that run the calls which can be stopped.
    _threads: dict[_Key, int] = field(default_factory=dict)
    # The calls to stop, the oldest first; some may not have begun.
    _stopped: dict[_Key, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pending, self._lock = self._exchange.calls, self._exchange.lock

    # -- the callee's side --------------------------------------------------------------------

    def begin(self, key: _Key) -> None:
        """Let a call be stopped in this thread, until `end`. Raises KeyboardInterrupt if it was stopped already."""
        with self._lock:
            if self._stopped and key in self._stopped:
                raise KeyboardInterrupt
            self._threads[key] = threading.get_ident()

    def end(self, key: _Key) -> None:
        """No longer let a call be stopped. The thread that ran the call comes here before it may run another one."""
        with self._lock:
            self._threads.pop(key, None)
            if self._stopped and self._stopped.pop(key, 0) is None:
                _raise_in(threading.get_ident(), None)  # else the error could hit the next call in this thread

    def on_stop(self, message: Stop, sender: int, _: list[bytes]) -> None:
        """Stop a call whose caller has given up on it, or prevent its start; stop the calls that it has made, too."""
        key = sender, message.id
        with self._lock:
            self._stopped[key] = None  # even if the call has not begun
            if len(self._stopped) > _STOPS_REMEMBERED:
                del self._stopped[next(iter(self._stopped))]
            if key not in self._threads:
                return
        ended = self._try_to_end(key)
        if not ended or self.break_off is not None:
            # The calling thread reads messages, so it must not wait.
            threading.Thread(target=self._end_call, args=(key, ended), name="nbdist-stopping", daemon=True).start()

    def stop_served(self) -> None:
        """Stop every call that runs here, as a Stop of its caller would, except the call in the calling thread."""
        with self._lock:
            keys = [key for key, thread in self._threads.items() if thread != threading.get_ident()]
        for caller, id in keys:
            self.on_stop(Stop(id), caller, [])

    def threads(self) -> dict[tuple[int, int], int]:
        """Return the idents of the threads that run calls for other agents, by call (`_Key`)."""
        with self._lock:
            return dict(self._threads)

    def raise_in(self, error: type[BaseException], calls: Mapping[tuple[int, int], int]) -> None:
        """Raise an error in the threads of these calls, as `threads` returned them, once they run Python code again.

        The caller has seen that the threads wait in C code that a user's function has called. A call that has ended, or
        was stopped, gets no error.
        """
        with self._lock:
            for key, thread in calls.items():
                if self._threads.get(key) == thread and key not in self._stopped:
                    self._stopped[key] = None  # so that `end` takes the error back
                    _raise_in(thread, error)

    def _end_waits(self, nested: Sequence[Pending]) -> None:
        """Fail the calls that a stopped call has made, which ends its waits. This does not tell their callees."""
        for call in nested:
            stopped = Interrupted("stopped: its caller was interrupted")
            self.give_up([call], stopped if call.result is not None else KeyboardInterrupt())

    def _end_call(self, key: _Key, ended: bool) -> None:
        """Try for 2 s to end a call. If it still runs 0.4 s later, break off the collective in which it may wait."""
        deadline = time.monotonic() + NAME_AFTER
        while not ended and time.monotonic() < deadline:
            time.sleep(_POLL)
            ended = self._try_to_end(key)
        if not ended:
            self._try_to_end(key, at_last=True)
        deadline = time.monotonic() + BREAK_OFF_AFTER
        while (thread := self._threads.get(key)) is not None and self.break_off is not None:
            if time.monotonic() > deadline:
                self.break_off(thread)
                return
            time.sleep(_POLL)

    def _try_to_end(self, key: _Key, *, at_last: bool = False) -> bool:
        """End the wait of a call that waits for calls of its own; raise KeyboardInterrupt in any other's thread."""
        with self._lock:
            thread = self._threads.get(key)
            if thread is None:
                return True
            nested = [call for call in self._pending.all() if call.thread == thread]
            # A function that computes may have calls without an answer, too: only the pool knows what it waits for.
            # With ``at_last``, any call without an answer counts.
            waits = bool(nested) and (at_last or self.is_blocked(thread))
            if not waits:
                if _runs_nbdist(thread_frames().get(thread)):
                    return False  # it may hold a lock
                _raise_in(thread, KeyboardInterrupt)
        self.stop(nested)
        if waits:
            self.submit(lambda: self._end_waits(nested))
        return True

    def where(self, caller: int, id: int) -> str:
        """Return where a running call is, such as "train, line 3 of a.py" or "C code"; "" if it does not run."""
        thread = self._threads.get((caller, id))
        frame = thread_frames().get(thread) if thread is not None else None
        if frame is None:
            return ""
        line = next((line for line in lines_of(frame) if not line.file.startswith(NBDIST)), None)
        if line is None or line.file == threading.__file__:
            return "C code"  # no Python frame of the user's lies between nbdist and the C function
        return line.function_and_line

    # -- the caller's side --------------------------------------------------------------------

    def stop(self, calls: Sequence[Pending]) -> None:
        """Tell the callees of these calls to stop them. Does not wait until they have."""
        for call in calls:
            try_post(self._links, call.to, Stop(call.id))

    def on_interrupt(self, outcomes: Sequence[object], error: BaseException) -> None:
        """Stop the calls for whose outcomes this thread waited when Ctrl-C came; wait up to `patience` seconds."""
        pending, me = self._pending, threading.get_ident()
        calls = [call for call in pending.all() if call.outcome in outcomes]
        # Whoever waits for a value that is being made stops its making, too
        # (test_who_waits_for_a_value_that_is_being_made_stops_its_making).
        values = {call.target for call in calls if call.target is not None}
        calls += [call for call in pending.all() if call.result is not None and call.result.rref in values]
        calls = calls or [call for call in pending.all() if call.thread == me]  # it waited for a `then` future
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
        """Ask a callee where a call is; return the answer as the end of a sentence, "" if the call has ended."""
        try:
            found = self.call(call.worker, _place_here, (self._me.incarnation, call.id), None, _ASK_TIMEOUT)
        except NbdistError:
            return " and does not say where it is"
        return f" (it is in {found})" if found else ""


def _place_here(caller: int, id: int) -> str:
    """Return where a call runs on the current agent, as `Stopping.where` does; the caller's agent calls this."""
    return here.agent.stopping.where(caller, id) if here.agent is not None else ""


def _runs_nbdist(frame: FrameType | None) -> bool:
    """Return whether a call with this innermost frame runs nbdist's code rather than the user's function."""
    users = False
    while frame is not None and frame.f_code is not _RUNS_USER_CODE:
        file = frame.f_code.co_filename
        if _RUNS_TASKS in frame.f_globals:
            users = True
        elif is_nbdists(file):
            if not users or not is_nbdists(file, _CALLS_MODULES):
                return True
        elif not is_torchs(file) and not is_pythons(file):  # a package, such as models, runs for the user's function
            users = True
        frame = frame.f_back
    return False


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an error in a thread as soon as it runs Python code again; None withdraws an error not raised yet."""
    what: Any = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
