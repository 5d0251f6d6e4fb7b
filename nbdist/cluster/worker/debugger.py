"""Python's `pdb` on a worker: ``breakpoint()`` in any of its threads, and the last error, driven from the notebook.

::

    breakpoint(), pdb.set_trace() ──> `stop_at(frame)` ── freezes the clocks of all members
                                         │
                    `_Pdb`, whose standard input and output are a `_Conversation` ── ask ──> `Stops` of the notebook
                                         │
                    c, n, s: the clocks run on      q: DebuggerQuit      nobody can answer: prints, and goes on

A debugger that steps (`n`, `s`) traces its thread until the outermost function of the user's, or the cell, ends.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import linecache
import os
import pdb
import sys
import threading
from bdb import BdbQuit
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, NoReturn

import torch

from nbdist.autograd.api import recorder
from nbdist.cluster.processes.setup import WorkerSetup
from nbdist.cluster.worker.flight_recorder import limits_left
from nbdist.code_lines import CodeLine
from nbdist.code_places import CELLS, is_users, shown_name
from nbdist.errors import DebuggerQuit, NbdistError
from nbdist.finalisers import may_wait
from nbdist.rpc.agent import Agent
from nbdist.rpc.asking import ask_each
from nbdist.rpc.references.describing import dtype_name, error_line
from nbdist.thread_frames import line_number, outwards

STOPS_ASK = "stops.ask"
"""The name of the call by which a debugger waits for the user."""

STOPPED = "\x03"
"""The user's answer that ends the debugger as Ctrl-C does."""

_LIMITS_TOLD_WITHIN = 0.5  # seconds for the other workers to say which of their waits will end
_VARIABLES_SHOWN = 30
_TEXT_SHOWN = 60  # characters of a value
# Stepping passes over the modules that run the user's code.
_SKIPPED = ("nbdist.*", "IPython.*", "ipykernel.*", "threading", "concurrent.futures.*", "asyncio.*", "tornado.*")


class _NobodyAnswers(BaseException):
    """Ends a debugger's conversation where no user can be asked."""


class Debugger:
    """The debuggers of this worker. There is one object, `DEBUGGER`, since hooks of Python's own call it."""

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._driver = self.name = ""
        self._pid = 0
        self.hidden: Mapping[str, Any] = {}
        """Variables of cells that are not the user's."""
        self._standing: dict[int, int] = {}  # the threads that stand, by ident, and the number of the stop
        self._numbers = itertools.count(1)
        self.talking = set[int]()
        """The idents of the threads that carry out the user's commands, or wait for one."""
        self.passed: dict[tuple[CodeType, int], int] = {}
        """By line, the calls of `torch.distributed.breakpoint` that did not stop there."""
        self.on_end: Callable[[FrameType], object] = lambda frame: None
        """Called in a thread in which a debugger traces nothing any more, with the thread's innermost frame."""
        self.last_error: BaseException | None = None
        """The last error of a cell or of a call, for post-mortem; None if `%dist_free` has dropped it."""

    def install(self, shell: Any, told: WorkerSetup) -> None:
        """Take over ``breakpoint()`` and ``pdb.set_trace()`` in this process, and keep the errors of cells."""
        self.name, self._driver, self.hidden = told.name, told.driver, shell.user_ns_hidden
        sys.breakpointhook = _on_breakpoint
        pdb.set_trace = _set_trace
        if torch.distributed.is_available():
            torch.distributed.breakpoint = _stop_at_rank  # torch's own reads /dev/stdin, which is nobody's here
        shell.events.register("post_run_cell", self._after_cell)

    def follow(self, agent: Agent) -> None:
        """Ask by this agent, from now on. Called once, when it has started."""
        self._agent, self._pid = agent, os.getpid()
        self._stops = agent.at(self._driver, "stops")
        agent.executor.on_error = self.keep
        agent.named.publish("debugger", self, "say_error", "post_mortem")

    def keep(self, error: BaseException) -> None:
        """Keep an error, in place of the last one."""
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            self.last_error = None  # the frames hold what a second attempt with less needs
        # An error of nbdist's own arises where the user's code waits, as when a worker dies or Ctrl-C ends a step.
        elif isinstance(error, Exception) and not isinstance(error, NbdistError):
            self.last_error = error

    def _after_cell(self, result: Any) -> None:
        if isinstance(getattr(sys.gettrace(), "__self__", None), _Pdb):  # the user steps
            sys.settrace(None)
            self.leave()
        if result.error_in_exec is not None:
            self.keep(result.error_in_exec)

    def can_ask(self) -> bool:
        """Return whether the calling thread may wait for the notebook; not in a forked child, or in some finalisers."""
        return self._agent is not None and os.getpid() == self._pid and may_wait()

    def ask(self, place: str, text: str) -> str:
        """Return the user's next line. Raises KeyboardInterrupt after Stop, _NobodyAnswers if nobody can answer."""
        said, number = None, self._standing[threading.get_ident()]
        with contextlib.suppress(NbdistError), recorder().contexts.outside():  # the notebook may be gone
            said = self._stops.later("ask", self.name, number, place, text, timeout=0).wait()
        if said == STOPPED:
            raise KeyboardInterrupt
        if said is None:
            raise _NobodyAnswers
        return str(said)

    def learn_source(self, file: str) -> None:
        """Get the lines of a cell of the notebook's, with a function that was sent here, so that pdb can show them."""
        with recorder().contexts.outside(), contextlib.suppress(NbdistError):
            lines = self._stops.ask("source", file)
            linecache.cache[file] = sum(map(len, lines)), None, lines, file

    def stand(self) -> None:
        """Stop the clocks of all members, until `leave` in this thread. A second call changes nothing."""
        ident = threading.get_ident()
        if ident not in self._standing:
            self._standing[ident] = next(self._numbers)
            recorder().freeze(-ident, True)

    def leave(self) -> None:
        """Let the clocks run that the calling thread has stopped, if it has."""
        ident = threading.get_ident()
        if number := self._standing.pop(ident, 0):
            recorder().freeze(-ident, False)
            self._stops.cast("left", self.name, number)

    def say_limits(self) -> str:
        """Return a line about the waits of other workers in process groups that end although this thread stands."""
        assert self._agent is not None
        others = [each.name for each in self._agent.membership.others() if each.name != self._driver]
        with recorder().contexts.outside():
            told = ask_each(self._agent, limits_left, dict.fromkeys(others, ()), timeout=_LIMITS_TOLD_WITHIN).values
        limits = sorted((limit for each in told.values() for limit in each.items()), reverse=True)
        # The last limit of a group, its shortest, stays.
        return "; ".join(f"{group} gives up in {seconds:.0f} s" for group, seconds in dict(limits).items())

    def say_error(self) -> str:
        """Return the last error in a line; "" if none is kept."""
        error = self.last_error
        return error_line(type(error).__name__, str(error))[: 2 * _TEXT_SHOWN] if error is not None else ""

    def post_mortem(self) -> None:
        """Look around where the last error arose, in a conversation with the notebook, which calls this."""
        if self.last_error is not None:
            debugger = _Pdb()
            debugger.reset()
            debugger.message(f"{type(self.last_error).__name__}: {self.last_error}")
            debugger.interaction(None, self.last_error.__traceback__)
            self.leave()


DEBUGGER = Debugger()


def stop_at(frame: FrameType) -> None:
    """Stop the calling thread, whose user's code is in ``frame``, and let the user look around from the notebook.

    Returns when the user lets the thread run on; a command such as ``n`` has set a trace function then. Where nobody
    can answer, prints the variables of the frame, and returns. Raises DebuggerQuit after ``q``, and KeyboardInterrupt
    after Stop.
    """
    debugger = _Pdb()
    if not DEBUGGER.can_ask():
        debugger.say_passed(frame)
        return
    debugger.reset()
    for each in outwards(frame):
        debugger.botframe = each
        if each is frame or is_users(each.f_code.co_filename):
            each.f_trace = debugger.trace_dispatch
    debugger.set_step()
    sys.settrace(None)  # of an earlier debugger, which steps
    if limits := DEBUGGER.say_limits():
        debugger.message(limits)
    debugger.interaction(frame, None)
    if debugger.quitting:
        debugger.quit(frame)
    if not debugger.is_done:
        sys.settrace(debugger.trace_dispatch)


def _on_breakpoint(*args: Any, **kwargs: Any) -> Any:
    if os.environ.get("PYTHONBREAKPOINT"):  # the user's own choice, "0" for none
        return sys.__breakpointhook__(*args, **kwargs)
    return stop_at(sys._getframe(1))


def _set_trace(*_: Any, **__: Any) -> None:
    stop_at(sys._getframe(1))


def _stop_at_rank(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:
    # As torch's, but for `timeout_s`: the limits of groups are lifted while a thread stands.
    frame = sys._getframe(1)
    place = frame.f_code, frame.f_lineno
    if DEBUGGER.passed.setdefault(place, 0) < skip:
        DEBUGGER.passed[place] += 1
        return
    if torch.distributed.get_rank() == rank:
        stop_at(frame)
    torch.distributed.barrier()


class _Conversation(io.StringIO):
    """The standard input and output of a debugger. Keeps what is written for the next question."""

    def __init__(self, debugger: _Pdb) -> None:
        super().__init__()
        self._debugger = debugger

    def take(self) -> str:
        """Return what was written since the last call."""
        text = self.getvalue()
        self.truncate(self.seek(0))
        return text

    def readline(self, _: int | None = -1) -> str:  # type: ignore[override]
        """Send what was written, whose last line is the prompt, to the notebook; return the user's line."""
        return DEBUGGER.ask(self._debugger.place, self.take()) + "\n"


class _Pdb(pdb.Pdb):
    """Python's debugger, which talks with the notebook's user."""

    def __init__(self) -> None:
        self._conversation = _Conversation(self)
        super().__init__(stdin=self._conversation, stdout=self._conversation, skip=_SKIPPED, nosigint=True)
        self.prompt = "(pdb) "
        self.is_done = False
        """True once the debugger traces nothing any more."""
        self._goes_on = False  # False while the user steps: the worker counts as standing then

    @property
    def place(self) -> str:
        """The place of the frame that the user looks at, such as ``In[7]:12``."""
        frame, number = self.stack[self.curindex]
        return CodeLine(frame.f_code.co_filename, number, frame.f_code.co_name).place

    # -- the conversation -----------------------------------------------------------------------

    def interaction(self, frame: FrameType | None, tb: Any) -> None:
        """Stop here, and carry out the user's commands until one lets the thread run."""
        self.is_done = self._goes_on = False
        ident = threading.get_ident()
        is_inner = ident in DEBUGGER.talking  # a command of another debugger has come here
        DEBUGGER.talking.add(ident)
        DEBUGGER.stand()
        try:
            super().interaction(frame, tb)
        except _NobodyAnswers:
            self._conversation.take()
            self.set_continue()
            if frame is not None:
                self.say_passed(frame)
        except BaseException:
            self._goes_on = True
            raise
        finally:
            if not is_inner:
                DEBUGGER.talking.discard(ident)
                if self._goes_on:
                    DEBUGGER.leave()

    def _cmdloop(self) -> None:
        self.cmdloop()  # pdb's own goes on after Ctrl-C, which here ends the debugger

    def say_passed(self, frame: FrameType) -> None:
        """Print where the thread would have stopped, and its variables."""
        place = CodeLine(frame.f_code.co_filename, line_number(frame), frame.f_code.co_name)
        hidden = DEBUGGER.hidden if frame.f_locals is frame.f_globals else {}
        own = {name: value for name, value in frame.f_locals.items() if name[:1] != "_" and name not in hidden}
        own = {name: value for name, value in own.items() if not isinstance(value, type | FunctionType | ModuleType)}
        lines = [f"  {name} = {_say_value(value)}" for name, value in list(own.items())[:_VARIABLES_SHOWN]]
        print(f"nobody can answer here, so this did not stop at {place}", *lines, sep="\n")

    # -- stepping -------------------------------------------------------------------------------

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Handle an event of a traced thread."""
        try:
            following = super().trace_dispatch(frame, event, arg)
        except BdbQuit:
            self.quit(frame)
        if self.is_done:
            DEBUGGER.on_end(frame)
            return frame.f_trace  # what this returns would replace the function that `on_end` has set
        # The thread of a call goes on to other calls. In the main thread, the cell may have more statements.
        if event == "return" and threading.current_thread() is not threading.main_thread() and _is_outermost(frame):
            sys.settrace(None)
            DEBUGGER.leave()
            return None
        return following

    def quit(self, frame: FrameType) -> NoReturn:
        """Raise the error of the command ``q``."""
        sys.settrace(None)
        place = CodeLine(frame.f_code.co_filename, line_number(frame), frame.f_code.co_name).place
        ended = "the cell" if frame.f_code.co_name == "<module>" else frame.f_code.co_name
        raise DebuggerQuit(f"`q` in the debugger of {DEBUGGER.name} ended {ended} at {place}") from None

    def set_continue(self) -> None:
        """Run on, without tracing if no breakpoint of pdb's is set."""
        super().set_continue()
        self.is_done, self._goes_on = not self.breaks, True

    def set_quit(self) -> None:
        """End the code that stands here."""
        super().set_quit()
        self._goes_on = True

    # -- what is shown --------------------------------------------------------------------------

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the stack without the frames that run the user's code."""
        stack, index = super().get_stack(f, t)
        for file in {frame.f_code.co_filename for frame, _ in stack}:
            if file in CELLS and not linecache.getlines(file):
                DEBUGGER.learn_source(file)
        first = next((at for at, (frame, _) in enumerate(stack) if is_users(frame.f_code.co_filename)), 0)
        return stack[first:], max(0, index - first)

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        """Return a line of the stack, with ``In[7]`` in place of the file of a cell."""
        file = frame_lineno[0].f_code.co_filename
        text = super().format_stack_entry(frame_lineno, lprefix)
        return text.replace(self.canonic(file), shown_name(file), 1) if file in CELLS else text

    def do_interact(self, _: str) -> None:
        """Refuse: the interactive interpreter reads standard input, which calls do not have."""
        self.error("interact is not there on a worker: write a statement after !")


def _is_outermost(frame: FrameType) -> bool:
    return not any(is_users(each.f_code.co_filename) for each in outwards(frame.f_back))


def _say_value(value: Any) -> str:
    kind = type(value)
    with contextlib.suppress(Exception):  # meta, lazy and functorch's tensors have no value, or no shape
        if isinstance(value, torch.Tensor):
            # The value of another kind of tensor may take a collective.
            is_plain = value.numel() == 1 and kind in (torch.Tensor, torch.nn.Parameter)
            number = f" {value.item():.9g}" if is_plain else ""
            return f"Tensor {dtype_name(value.dtype)}{tuple(value.shape)}{number}"
        # Another object's text may have an address, which differs in each run.
        if value is None or isinstance(value, int | float | complex | str | bytes):
            text = repr(value)
            return text if len(text) <= 2 * _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}…{text[-_TEXT_SHOWN:]}"
        if isinstance(value, list | tuple | dict | set | frozenset):
            return f"{kind.__qualname__} of {len(value)}"
    return kind.__qualname__
