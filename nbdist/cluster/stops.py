"""`Stops`: asks the user what a debugger on a worker wants to know, in the notebook's input box.

::

    worker, any thread              notebook, a thread of the agent    kernel thread          main thread
    ──────────────────              ───────────────────────────────    ─────────────          ───────────
    ask(place, text) ─────────────> the question waits ──────────────> looks every 50 ms
                                                                       it waits: a signal ──> `_on_wake`: ``input()``
    the next command <──────────────────────────────────────────────────────────────────────┘ and waits on
    left ─────────────────────────> the next stop has its turn

Only the main thread can ask. It is asked in the middle of whatever it waits in: a signal's handler runs there, so no
wait needs to know of debuggers. While it computes, the question waits.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import linecache
import queue
import selectors
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from IPython import get_ipython

from nbdist.autograd.api import recorder
from nbdist.channel.local import WAITING_CODE
from nbdist.cluster.jupyter.kernel_connection import KernelThread
from nbdist.cluster.kernels.cells import Cell
from nbdist.cluster.output.arranger import grouped, say_names
from nbdist.cluster.output.sinks import current_sink
from nbdist.cluster.worker.debugger import STOPPED
from nbdist.code_places import is_of_cell
from nbdist.errors import UsageError
from nbdist.finalisers import hand_over
from nbdist.rpc.agent import Agent
from nbdist.rpc.asking import ask_each
from nbdist.rpc.calls.keyboard_interrupts import wake_main_thread, wakes
from nbdist.rpc.futures import Future
from nbdist.rpc.latch import Latch
from nbdist.rpc.named import call_method
from nbdist.rpc.promise import Promise
from nbdist.thread_frames import thread_frames
from nbdist.wire.messages import Record

_LOOK_EVERY = 0.05  # seconds between two looks at where the main thread is, while a question waits
# Seconds for which a stop keeps its turn while it runs a command. Then `n` may wait for a worker that stands, too.
_RUNS_WITHIN = 0.5
# A wait is in one of these files of Python's, or these functions of ours. The reader of `WAITING_CODE` must not ask.
_WAITING_FILES = (threading.__file__, queue.__file__, concurrent.futures.wait.__code__.co_filename)
_WAITING_CODES = (Latch.wait.__code__, Promise.wait.__code__, Cell.wait.__code__)

_Key = tuple[str, int]  # the worker's name and the number of the stop there


@dataclass(eq=False)
class StoppedThread:
    """A thread of a worker that stands in a debugger, or goes on by its commands, such as `n`."""

    place: str
    text: str = ""  # what the debugger has printed, which ends with its prompt
    answer: Future[str | None] | None = None  # gets the user's answer; None while the debugger carries one out
    answered: float = 0.0  # when, by `time.monotonic`
    over: Promise[None] = field(default_factory=Promise)


class Stops:
    """The debuggers that stand on the workers of one cluster. Workers call `METHODS`, by the name "stops"."""

    METHODS = ("ask", "left", "source")

    def __init__(self, agent: Agent, thread: KernelThread) -> None:
        """Begin, in the main thread. `close` ends it."""
        self._agent, self._thread = agent, thread
        self._stops: dict[_Key, StoppedThread] = {}  # in the order in which they have stopped
        self._left: set[_Key] = set()  # stops that are over: a question of one may come after the news of its end
        self._lock = threading.RLock()  # a handler may interrupt the main thread's own use
        self._turn: _Key = "", 0  # the stop that is asked about
        self._stood, self._stood_since = 0.0, 0.0  # seconds with a stop, until the present ones; and since when these
        self._is_looking = self._is_asking = False
        self._seen: tuple[int, int] | None = None  # where the main thread was at the last look
        self._shell: Any = get_ipython()
        self._running = 1  # the cells of the notebook that run, the present one included; a script is one
        self._interactive = self._can_ask()
        # The kernel finds in it below which cell to ask. The event loop, in which ``await`` waits, has another one.
        self._context = contextvars.copy_context()
        if self._shell is not None:
            self._shell.events.register("pre_run_cell", self._before_cell)
            self._shell.events.register("post_run_cell", self._after_cell)
        wakes.append(self._on_wake)
        agent.on_lost(self._on_lost)
        agent.named.publish("stops", self, *self.METHODS)

    def close(self) -> None:
        """Ask no more."""
        wakes.remove(self._on_wake)
        if self._shell is not None:
            with contextlib.suppress(ValueError):  # `%reset` or a user has removed them
                self._shell.events.unregister("pre_run_cell", self._before_cell)
                self._shell.events.unregister("post_run_cell", self._after_cell)

    def _can_ask(self) -> bool:
        if self._shell is None:
            return sys.stdin is not None and sys.stdin.isatty()
        return current_sink().interactive

    def _before_cell(self, _: object) -> None:
        self._running += 1
        self._interactive, self._context = self._can_ask(), contextvars.copy_context()

    def _after_cell(self, _: object) -> None:
        self._running = max(0, self._running - 1)

    # -- what workers call, in threads of the agent ---------------------------------------------

    def ask(self, worker: str, number: int, place: str, text: str) -> Future[str | None]:
        """Ask the user; return the future of a line, `STOPPED`, or None if nobody can answer.

        ``text`` is what the debugger has printed since the last answer; its last line is the prompt.
        """
        answer: Future[str | None] = Future()
        with self._lock:
            # Nobody looks at a page whose cell has ended: a stop there would hold the workers unnoticed.
            if not self._interactive or not self._running or (worker, number) in self._left:
                answer.set_result(None)
                return answer
            stop = self.hold(worker, place, number)
            stop.place, stop.text, stop.answer = place, text, answer
        self._thread.soon(self._begin_looking)
        return answer

    def hold(self, worker: str, place: str, number: int = 0) -> StoppedThread:
        """Note that a worker stands, until `left`; without a number in another debugger than these."""
        with self._lock:
            if not self._stops:
                self._stood_since = time.monotonic()
            return self._stops.setdefault((worker, number), StoppedThread(place))

    def left(self, worker: str, number: int = 0) -> None:
        """Forget a stop: its thread runs on."""
        with self._lock:
            if number:
                self._left.add((worker, number))
            stop = self._stops.pop((worker, number), None)
            if stop is not None and not self._stops:
                self._stood += time.monotonic() - self._stood_since
        if stop is not None:
            stop.over.try_settle(None, None)

    def source(self, file: str) -> list[str]:
        """Return the lines of a cell whose functions were sent to workers, which cannot read its file."""
        return linecache.getlines(file) if is_of_cell(file) else []

    def _on_lost(self, record: Record, _: str) -> None:
        with self._lock:
            for worker, number in list(self._stops):
                if worker == record.name:
                    self.left(worker, number)
            self._left = {each for each in self._left if each[0] != record.name}  # a worker of this name begins anew

    # -- looking --------------------------------------------------------------------------------

    def place(self, worker: str) -> str:
        """Return where a worker stands in a debugger, such as ``In[7]:12``; "" if it does not."""
        with self._lock:
            return next((stop.place for (name, _), stop in self._stops.items() if name == worker), "")

    def seconds(self) -> float:
        """Return for how long any worker has stood in a debugger, in all. Time limits are longer by that."""
        with self._lock:
            return self._stood + (time.monotonic() - self._stood_since if self._stops else 0.0)

    def open(self, workers: Sequence[str]) -> None:
        """Open the debugger in which one of these workers stands, else one at its last error; return when it has ended.

        In the main thread. If there are several such workers, asks the user for one.

        Raises:
            UsageError: No worker stands or keeps an error, or the user's answer names no such worker.
        """
        if not (worker := self._choose(workers)):
            return
        found = next((each for each in list(self._stops.items()) if each[0][0] == worker), None)
        if found is not None:
            self._turn = found[0]
            found[1].over.wait()
            return
        with recorder().contexts.outside():
            self._agent.at(worker, "debugger").ask("post_mortem", timeout=0)

    def _choose(self, workers: Sequence[str]) -> str:
        """Return the worker to debug, by the user's choice if there are several; "" if nobody can answer."""
        with recorder().contexts.outside():
            answers = ask_each(self._agent, call_method, dict.fromkeys(workers, ("debugger", "say_error")))
        errors = answers.values or answers.or_raise()
        places = {name: f"stands at {place}" for name in errors if (place := self.place(name))}
        if not (found := {name: text for name, text in {**errors, **places}.items() if text}):
            raise UsageError(
                f"no debugger stands on {say_names(workers)}, and no error is kept there: no cell and no call has "
                "failed there since the start, or since the last `%dist_free`"
            )
        lines = [f"{say_names(names)}: {text}" for text, names in grouped(found, found.__getitem__).items()]
        if not self._interactive:
            print("nobody can answer here, so no debugger opens on one of these:", *lines, sep="\n")
            return ""
        answer = first = next(iter(found))
        if len(found) > 1:
            print(*lines, sep="\n", flush=True)
            answer = input(f"which worker? (Enter for {first}) ").strip() or first
        if (worker := f"worker{answer}" if answer.isdecimal() else answer) not in found:
            raise UsageError(f"there is no {answer!r} to debug: run this again, and choose from {say_names([*found])}")
        return worker

    # -- asking ---------------------------------------------------------------------------------

    def _next(self) -> tuple[_Key, StoppedThread] | None:
        """Return the stop to ask about; None if there is none, or while the one whose turn it is runs a command."""
        with self._lock:
            stop = self._stops.get(self._turn)
            if stop is None or (stop.answer is None and time.monotonic() - stop.answered > _RUNS_WITHIN):
                self._turn = next((key for key, each in self._stops.items() if each.answer is not None), self._turn)
                stop = self._stops.get(self._turn)
            return (self._turn, stop) if stop is not None and stop.answer is not None else None

    def _begin_looking(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._look()

    def _look(self) -> None:
        """Look whether the main thread waits, and wake it then to ask. In the kernel thread, while workers stand."""
        if not self._stops:
            self._is_looking = False
            return
        frame = thread_frames().get(threading.main_thread().ident or 0)
        seen, self._seen = self._seen, (id(frame), frame.f_lasti) if frame is not None else None
        if frame is not None and not self._is_asking and self._next() is not None:
            if frame.f_code is WAITING_CODE:
                self._agent.dismiss_guest()  # it reads messages, which must go on while the user thinks
            elif self._seen == seen and self._waits(frame):
                wake_main_thread()
        self._thread.loop.call_later(_LOOK_EVERY, self._look)

    def _waits(self, frame: FrameType) -> bool:
        # A cell with ``await`` runs while the event loop waits.
        awaits = self._running > 0 and frame.f_code.co_filename == selectors.__file__
        return awaits or frame.f_code.co_filename in _WAITING_FILES or frame.f_code in _WAITING_CODES

    def _on_wake(self, frame: FrameType) -> None:
        """Ask, in the main thread, which a signal has interrupted in ``frame``. Ctrl-C at the box ends the wait."""
        if self._is_asking or not self._waits(frame) or (found := self._next()) is None:
            return
        key, stop = found
        answer, stop.answer = stop.answer, None
        assert answer is not None
        said: str | None = STOPPED
        self._is_asking = True
        try:
            text, _, prompt = stop.text.rpartition("\n")
            if text:
                self._context.run(print, text, flush=True)
            said = self._context.run(input, f"{key[0]} {stop.place} {prompt}")
        except EOFError:
            said = "EOF"  # pdb's command for it
        except Exception:  # the front end cannot ask
            said = None
        finally:
            self._is_asking, stop.answered = False, time.monotonic()
            # In another thread: this one may be anywhere in a wait of ours.
            hand_over(lambda: answer.set_result(said))
