"""One cell that runs on workers: `Cell` is the handle that users wait for, `CellPart` one worker's share of it.

Each part moves through these states; ``began`` and ``done`` are fields of `CellPart`::

    sent ── execute_input ──> began ── reply and idle, in either order ──────────> done
      │                         ├───── idle, but no reply within _REPLY_WITHIN ─────> done, failed
      │                         └───── reply, but no idle within _IDLE_WITHIN ──────> done
      └───── the worker dies, at any time ────────────────────────────────────────> done, WorkerLost

While an interrupt breaks off a collective on the worker (``breaks_off``), only the worker's death ends its part at
once. The other steps to *done* wait until the worker has answered the interrupt.

A `Cell` is done when all its parts are. The kernel thread calls the ``on_...`` methods. The thread that waits, usually
the notebook's main thread, sleeps on a queue. The queue also brings a worker's request for input, because only the
main thread may ask the user.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from getpass import getpass
from typing import Any

from nbdist import durations
from nbdist.cluster.errors import CellInterrupted, CellTimeout, WorkerError, make_error
from nbdist.cluster.jupyter import labels
from nbdist.cluster.jupyter.jupyter_wire import new_id
from nbdist.cluster.jupyter.kernel_connection import KernelThread, Message
from nbdist.cluster.jupyter.page_lines import moved_down
from nbdist.cluster.kernels.notices import say_failed, say_stopped
from nbdist.cluster.kernels.output_widgets import own_request
from nbdist.cluster.output.arranger import LEFT_OUT, Published, say_left_out, say_names, stream_text
from nbdist.cluster.output.outlet import Outlet, make_arranger
from nbdist.cluster.output.sinks import Sink

_log = logging.getLogger("nbdist.cluster")
# Seconds after a reply within which the kernel must report idle. A flood of output can drop that report.
_IDLE_WITHIN = 10.0

# Seconds after a kernel reports idle within which its reply must arrive. An interrupt can drop the reply.
_REPLY_WITHIN = 1.0

# Seconds for which an error message is held back, because it may be the error that ends the cell. The reply that ends a
# failed cell arrives sooner; after this time the error is shown as ordinary output.
_ERROR_HELD_FOR = 3.0

# Seconds after a worker's failure until a notice says that others still run; no notice if they end sooner.
_NOTICE_AFTER = 0.3

# Seconds until that notice with ``fail_fast``, which ends the others, some only by breaking their collective off.
_FAST_NOTICE_AFTER = 1.0

_END_OF_INPUT = "\x04"  # for this answer ipykernel raises EOFError in the function that asked for input

LEAVES_NO_FRAME = {
    "Aborted",
    "DebuggerQuit",
    "IndentationError",
    "KeyboardInterrupt",
    "SyntaxError",
    "SystemExit",
    "UsageError",
    "WorkerLost",
}
"""Errors after which there is nothing to debug: they leave no frame of the user's code on the worker, or no worker."""

_MISSING = re.compile(r"name '(\w+)' is not defined")  # a NameError
_OUTPUTS = ("stream", "display_data", "execute_result", "error")  # the message types that `Cell.outputs` keeps


@dataclass
class CellPart:
    """One worker's share of a cell."""

    worker: str
    id: str  # of the execute request that was sent to this worker
    incarnation: int | None = None  # of the agent that was sent the cell; None before
    began: float | None = None  # by `time.monotonic`
    when_begun: list[Callable[[], None]] = field(default_factory=list)  # called once, in the kernel thread
    idle: bool = False  # True once the kernel has said so, or that report counts as lost
    reply: Mapping[str, Any] | None = None  # the content of the kernel's ``execute_reply``
    error: WorkerError | None = None
    done: bool = False
    signalled: bool = False  # True once an interrupt has signalled the worker although the cell had not begun
    # A line for the traceback: an interrupt has broken this worker's process group; "" if it has not.
    note: str = ""
    # The number of interrupts that break a collective off on the worker now. The cell ends there after them.
    breaks_off: int = 0
    outputs: list[dict[str, Any]] = field(default_factory=list)  # so far, in the format of a notebook file
    # An error that may be the one that ends the cell, and all output that followed it; not shown yet.
    held: list[Published] = field(default_factory=list)

    def begin(self) -> None:
        """Note that the code of the cell starts on the worker. From now on its kernel reacts to SIGINT."""
        self.began = time.monotonic()
        # Such as an interrupt that came before the cell began.
        actions, self.when_begun = self.when_begun, []
        for action in actions:
            action()


@dataclass(frozen=True)
class CellOptions:
    """The options of `Cluster.execute` for one cell, but for its time limit."""

    block: bool = True
    group_outputs: bool = False
    keep: bool = False
    sink: Sink | None = None
    quiet: bool = False
    fail_fast: bool = False
    progress_after: float = 10.0
    above: int = 0


@dataclass(eq=False, repr=False)
class Cell:
    """Handle of a cell that runs on workers, which ``Cluster.execute(..., block=False)`` and ``%%remote -a`` return.

    ``wait()`` or ``await`` waits for the end and raises the workers' errors; `cancel` interrupts the cell. `done`,
    `running`, `outputs` and `errors` may be read at any time, in any thread.

    Example, with a running cluster::

        cell = cluster.execute("train()", block=False)
        cell.running       # ["worker0", "worker1"]
        cell.wait(60)      # interrupts the workers after 60 s, and raises CellTimeout
    """

    code: str
    workers: InitVar[Sequence[str]]
    number: int  # of the cell in tracebacks and print logs
    sink: Sink
    _options: CellOptions
    _thread: KernelThread
    _interrupt: Callable[[Cell], Sequence[str]]  # returns a text for each worker that does not stop
    _answer: Callable[[str, str, Message], None]  # sends the user's input for a request to a worker

    def __post_init__(self, workers: Sequence[str]) -> None:
        # Below as many empty lines as stand above the code in the page's cell, so that line numbers agree.
        self.source = moved_down(self.code, self._options.above)
        self.parts = {worker: CellPart(worker, new_id()) for worker in workers}
        arranger = make_arranger(workers, self.sink, grouped=self._options.group_outputs)
        self._outlet = Outlet(self._thread, arranger, self.sink, self.number)
        self._events: queue.SimpleQueue[tuple[str, Message] | None] = queue.SimpleQueue()
        self._when_done: list[Callable[[], object]] = []
        self._finished = False
        self.interrupted = False
        """True once the user, `cancel`, a time limit or ``fail_fast`` has interrupted the cell."""
        # Runs once: when it is called, or when nobody has this handle any more. The router has the last 2,000.
        self.kept: weakref.finalize[..., Cell] | None = None
        """Makes the workers drop the values that they keep for `Cluster.references`; None without any."""
        self.at_part_end: Callable[[Cell, str], None] = lambda cell, worker: None
        """Called when the cell has ended on a worker, in the kernel thread."""
        self.before_end: Callable[[Cell, Callable[[], None]], None] = lambda cell, end: end()
        """Called when the last worker has ended the cell; it calls ``end`` once, at once or later."""
        self.waits_for = ""
        """The line below the running cell, which `Lookout` shows; "" while there is none."""
        self._waited_for = ""  # when the cell was interrupted
        self.held_for: Callable[[], float] = float
        """Returns for how many seconds workers have stood in a debugger, in all: the time limit is longer by that."""
        self.owners_of: Callable[[str], Sequence[str]] = lambda name: ()
        """Returns the names of the workers that have a variable of this name."""
        self.why_late: Callable[[], Sequence[str]] = tuple
        """Returns texts that say what keeps the workers; for the error of a time limit."""
        # True once `wait` or ``await`` has raised the cell's error, so that nothing publishes it again.
        self._error_shown = False
        # A token for each `wait` and ``await`` at the moment: these will raise the cell's error.
        self._waiting: set[object] = set()
        self.last_output = time.monotonic()
        """When a worker last sent output or asked for input, by `time.monotonic`; at first, when the cell was made."""
        self._told: set[str] = set()  # the workers whose errors a notice has reported

    def __repr__(self) -> str:
        state = "done" if self.done else f"running on {say_names(self.running) or 'nothing'}"
        if self.done and any(part.error for part in self.parts.values()):
            state = f"failed on {say_names([part.worker for part in self.parts.values() if part.error])}"
        first = self.code.strip().partition("\n")[0]
        return f"<Cell {first[:40]!r}: {state}>"

    # -- looking ------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """True once the cell has ended on all its workers."""
        return self._finished

    @property
    def running(self) -> list[str]:
        """The names of the workers on which the cell has not ended."""
        return [part.worker for part in self.parts.values() if not part.done]

    @property
    def outputs(self) -> dict[str, list[dict[str, Any]]]:
        """The outputs of each worker so far, by the worker's name, as dicts in the format of a notebook file.

        Read it again for later outputs.
        """
        return {worker: list(part.outputs) for worker, part in self.parts.items()}

    @property
    def errors(self) -> list[WorkerError]:
        """The errors of the workers that have failed so far.

        They are in the order of the cell's workers; reading them raises nothing.
        """
        return [part.error for part in self.parts.values() if part.error is not None]

    def error(self) -> BaseException | None:
        """Return the error with which the cell has failed, or None if no worker has failed so far.

        Returns:
            A `CellError` that carries the errors of all failed workers in ``errors``. If all have the same class, the
            result has that class's name, and is an instance of it where the class is Python's or nbdist's
            (`nbdist.cluster.errors` has the exceptions). A KeyboardInterrupt if the user, `cancel` or a time limit has
            interrupted the cell and no worker failed with another error.
        """
        errors = self.errors
        if not errors:
            return None
        if self.interrupted and all(error.name == "KeyboardInterrupt" for error in errors):
            return self._interruption([])
        made = make_error(self._own_errors(), len(self.parts))
        made.errors = tuple(errors)
        made.traceback = [*self._where_interrupted(), *self._how_to_debug()]
        return made

    def _how_to_debug(self) -> list[str]:
        """Return the line that says how to debug a failed worker; nothing if no user is there to type it."""
        if not self._options.block or self._options.quiet or not self.sink.interactive:
            return []
        found = next((error.worker for error in self._own_errors() if error.name not in LEAVES_NO_FRAME), None)
        return [f"To look around where it failed: `%dist_debug {found}`"] if found else []

    def _own_errors(self) -> list[WorkerError]:
        """Return the errors of the workers, without those that explain nothing."""
        errors = self.errors
        # With ``fail_fast``, the first error interrupts the other workers: these KeyboardInterrupts are no causes.
        causes = [error for error in errors if error.name != "KeyboardInterrupt"]
        return causes if self._options.fail_fast and causes else errors

    def move_to(self, sink: Sink) -> None:
        """Show further output at another place, because the user has run the same notebook cell again.

        What was shown before is not shown again.
        """
        self.sink = sink
        self._outlet.move_to(sink)

    # -- waiting ------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None, *, begin: Callable[[], object] = lambda: None) -> None:
        """Wait until the cell has ended on all workers, and raise their errors.

        Ctrl-C, the notebook's stop button and the end of ``timeout`` interrupt the workers. A worker's request for
        input is put to the user in the calling thread. A second call returns, or raises the same errors again.

        Args:
            timeout: Seconds to wait before the workers are interrupted; None waits without limit.
            begin: Called first, inside the part that Ctrl-C interrupts. `Cluster.execute` sends the cell here: sent
                earlier, the cell would run on if Ctrl-C came between the sending and the wait. ``%%remote --local``
                runs the notebook's part here.

        Raises:
            CellError: One or more workers failed; see `error`. The death of a worker is a WorkerLost.
            CellTimeout: The time was up. The message names the workers that did not stop.
            KeyboardInterrupt: The user interrupted the cell.
            UsageError: ``timeout`` is not a number of seconds above 0.
        """
        deadline = None if timeout is None else time.monotonic() + durations.positive(timeout)
        held = self.held_for()
        token = object()
        try:
            self._waiting.add(token)
            begin()
            while not self._finished:
                try:
                    spared = self.held_for() - held
                    left = None if deadline is None else max(0.0, deadline + spared - time.monotonic())
                    event = self._events.get(timeout=left)
                except queue.Empty:
                    if self.held_for() - held > spared:
                        continue
                    if late := self.running:  # else the cell has ended just now
                        self._time_out(timeout or 0.0, late)
                else:
                    if event is not None:
                        self._ask(*event)
        except KeyboardInterrupt:
            if self._finished and not self.running:  # the cell has ended: there is nothing to interrupt
                raise
            raise self._interruption(self._stop()) from None
        finally:
            self._waiting.discard(token)
        self._events.put(None)  # wakes the next thread that waits
        self._hand_on_payload()
        if (error := self.error()) is not None:
            self._error_shown = True
            raise error

    def __await__(self) -> Generator[Any, None, None]:
        """Wait for the end without blocking the event loop; raises the workers' errors as `wait` does.

        A cancelled ``await`` does not interrupt the cell, which runs on; `cancel` does.
        """
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def end() -> None:
            if not ended.done():  # a cancelled ``await`` has ended already
                ended.set_result(None)

        token = object()
        try:
            self._waiting.add(token)
            self.when_done(lambda: loop.call_soon_threadsafe(end))
            yield from ended
        finally:
            self._waiting.discard(token)
        if (error := self.error()) is not None:
            self._error_shown = True
            raise error

    def when_done(self, action: Callable[[], object]) -> None:
        """Call ``action()`` in the kernel thread when the cell ends, or at once if it has ended.

        If the cluster has been shut down, the calling thread calls ``action`` before this method returns.
        """

        def add() -> None:
            if self._finished:
                action()
            else:
                self._when_done.append(action)

        if not self._thread.soon(add):  # the cluster has been shut down, so all cells have ended
            action()

    def cancel(self) -> None:
        """Interrupt the cell on the workers that still run it; it then fails with KeyboardInterrupt.

        Waits until the workers have stopped, for about 2 s at most, or 30 s if one is formatting its traceback. Does
        nothing once the cell has ended.
        """
        if not self._finished:
            self._stop()

    def _stop(self) -> Sequence[str]:
        """Interrupt the workers; return a text for each that does not stop. Does not wait in the kernel thread."""
        self.interrupted = True  # first: the errors that now come are no failures
        self._waited_for = self._waited_for or self.waits_for
        return self._interrupt(self)

    def _time_out(self, timeout: float, late: Sequence[str]) -> None:
        """Interrupt the workers that still run, and raise CellTimeout, which names them. Never returns."""
        reasons = self.why_late()  # before the interrupt, after which no worker waits
        stuck = self._stop()
        text = f"{say_names(late)} did not end the cell within {timeout:g} s"
        error = CellTimeout("; ".join([text, *reasons, *say_stopped(self.errors), *stuck]))
        error.errors = tuple(self.errors)
        error.traceback = [*self._where_interrupted(), f"CellTimeout: {error}"]
        raise error

    def _interruption(self, stuck: Sequence[str]) -> CellInterrupted:
        """Return the KeyboardInterrupt that says where the workers stopped, and which did not stop."""
        error = CellInterrupted("; ".join([*say_stopped(self.errors), *stuck]))
        # The line disappears with the end of the cell, and a saved notebook would not say who was missing.
        waited = [f"before it was stopped: {self._waited_for}"] if self._waited_for else []
        error.traceback = [*self._where_interrupted(), *waited, *stuck] or ["KeyboardInterrupt"]
        return error

    def _where_interrupted(self) -> list[str]:
        """Return the workers' tracebacks, and the notes on process groups that the interrupt broke."""
        errors = self._own_errors()
        notes = [f"{part.worker}: {part.note}" for part in self.parts.values() if part.note]
        return [*make_error(errors, len(self.parts)).traceback, *notes] if errors else notes

    def _hand_on_payload(self) -> None:
        """Pass on the requests to the front end in the workers' replies, such as to show a help page."""
        found: dict[str, Mapping[str, Any]] = {}
        for part in self.parts.values():
            for payload in (part.reply or {}).get("payload", ()):
                found.setdefault(payload.get("source", ""), payload)  # one of each kind: the first worker's
        found.pop("ask_exit", None)  # ends the worker's kernel, not the notebook's
        if self._options.block and not self._options.quiet:
            for payload in found.values():
                self.sink.hand_on(payload)

    def _ask(self, worker: str, request: Message) -> None:
        """Ask the user for the input that a worker wants (``input()`` on the worker), wait, and send the answer."""
        # In the thread of `wait`, which in a notebook must be the main thread.
        content = request["content"]
        prompt = content["prompt"] if len(self.parts) == 1 else f"[{worker}] {content['prompt']}"
        try:
            text = getpass(prompt) if content.get("password") else input(prompt)
        except EOFError:  # standard input is at its end here
            text = _END_OF_INPUT
        except Exception:
            self._stop()  # else the worker would wait for ever
            raise
        self._answer(worker, text, request)

    # -- events, in the kernel thread ---------------------------------------------------------

    def on_output(self, worker: str, message: Message) -> None:
        """Handle a message of a worker's output channel that belongs to this cell."""
        kind, content = message["msg_type"], message["content"]
        part = self.parts[worker]
        if kind == "status":
            if content["execution_state"] == "idle":
                self._on_idle(part)
        elif kind == "execute_input":
            part.begin()
        elif kind != "iopub_welcome" and not (self._options.quiet and kind == "execute_result"):
            self.last_output = time.monotonic()
            if kind.startswith("comm_"):
                content = own_request(content, part.id, self.sink.id)
            published = Published(kind, content, message.get("metadata") or {}, message.get("buffers") or ())
            self._show_or_hold(part, published)

    def on_reply(self, worker: str, content: Mapping[str, Any]) -> None:
        """Handle a worker's reply to the execute request."""
        part = self.parts[worker]
        part.reply = content
        if content["status"] in ("aborted", "abort"):
            text = "the kernel dropped the cell and did not run it; run it again"
            part.error = WorkerError(worker, "Aborted", text, ())
        self._maybe_end(part)
        if not part.done:
            # The cell ends here once the kernel is idle as well, or without that report.
            self._thread.loop.call_later(_IDLE_WITHIN, self._on_idle, part)

    def on_input(self, worker: str, request: Message) -> None:
        """Show the worker's output so far, and pass its request for input to the thread that waits."""
        self.last_output = time.monotonic()
        self._remember(self.parts[worker], self._outlet.release(worker))  # the text that the user has to answer
        self._events.put((worker, request))  # kept until a thread is in `wait`

    def on_lost(self, worker: str, why: str) -> None:
        """Fail the part of a worker that has died; ``why`` follows the worker's name in the error's text."""
        part = self.parts[worker]
        if part.done:
            return
        text = f"{worker} {why}"
        part.error = WorkerError(worker, "WorkerLost", text, (f"WorkerLost: {text}",))
        self._end_part(part)

    def _on_idle(self, part: CellPart) -> None:
        """Note that the kernel is idle, or that its report of that counts as lost."""
        part.idle = True
        self._maybe_end(part)
        if not part.done:
            self._thread.loop.call_later(_REPLY_WITHIN, self._reply_is_lost, part)

    def _reply_is_lost(self, part: CellPart) -> None:
        """End the cell on a worker whose kernel is idle, without a reply."""
        if part.done or part.reply is not None:
            return
        if part.breaks_off:
            self._thread.loop.call_later(_REPLY_WITHIN, self._reply_is_lost, part)
        else:
            # Without a reply, the last error message is the error; without any, an interrupt has ended the cell.
            if not self._take_error(part, None):
                part.error = WorkerError(part.worker, "KeyboardInterrupt", "", ("KeyboardInterrupt",))
            self._end_part(part)

    def _fail_part(self, part: CellPart, content: Mapping[str, Any]) -> None:
        """Set the error of the cell on a worker from an ``error`` message or a reply."""
        # The text may have a traceback in it, such as that of a DataLoader's process.
        text, *lines = (
            labels.rename_cell_frames(each, part.worker) for each in (content["evalue"], *content.get("traceback", ()))
        )
        traceback = tuple(lines)
        if content["ename"] == "NameError" and (found := _MISSING.match(text)):
            name = found[1]
            if labels.has_variable(name):
                traceback += (f"`{name}` is a variable of the notebook: `%dist_push {name}` sends it to the workers",)
            elif owners := self.owners_of(name):
                where = f"is defined on {say_names(owners)}, but not on {part.worker}"
                traceback += (f"`{name}` {where}: run the cell that defines it there, too",)
        part.error = WorkerError(part.worker, content["ename"], text, traceback)

    def on_broken_off(self, part: CellPart, note: str) -> None:
        """End the wait for a collective that an interrupt breaks off; ``note`` is for `CellPart.note`."""
        part.breaks_off -= 1
        part.note = part.note or note
        self._maybe_end(part)

    def _take_error(self, part: CellPart, name: str | None) -> bool:
        """Make the last error message in `CellPart.held` the part's error, if its class is ``name``; None for any."""
        errors = [message for message in part.held if message.kind == "error"]
        # A kernel replies "NoneType" if the ``repr`` of the error fails.
        if not errors or name not in (None, "NoneType", errors[-1].content["ename"]):
            return False
        part.held = [message for message in part.held if message is not errors[-1]]
        self._fail_part(part, errors[-1].content)
        return True

    def _maybe_end(self, part: CellPart) -> None:
        """End the cell on a worker once its kernel has replied and is idle, and no collective is broken off."""
        if not part.idle or part.reply is None or part.breaks_off or part.done:
            return
        if part.reply["status"] == "error" and not self._take_error(part, part.reply["ename"]):
            self._fail_part(part, part.reply)
        self._end_part(part)

    def _end_part(self, part: CellPart) -> None:
        """End the cell on a worker; end the whole cell if this was its last worker. Once for each worker."""
        part.done = True
        self.at_part_end(self, part.worker)
        try:
            self._show_held(part)
            self._remember(part, self._outlet.ended(part.worker))
            if not self.running:
                self._outlet.finish()
            elif part.error is not None and not self.interrupted:
                after = _FAST_NOTICE_AFTER if self._options.fail_fast else _NOTICE_AFTER
                self._thread.loop.call_later(after, self._tell_failed)
                if self._options.fail_fast:
                    self._stop()
        finally:  # even if showing the output fails, the waiting threads must wake
            if not self.running:
                self.before_end(self, self._tell_end)

    def _tell_failed(self) -> None:
        """Show a notice below the cell that names the workers that have failed, while others still run."""
        interrupted = self.interrupted and not self._options.fail_fast
        if self._finished or interrupted or self._options.quiet or not self.sink.interactive:
            return
        errors = [error for error in self._own_errors() if error.worker not in self._told]
        self._told.update(error.worker for error in errors)  # each failure is told once
        if errors:
            ends = self.sink.stop_says if self._options.block else "its cancel() ends"
            text = say_failed(errors, self.running, ends)
            self.sink.page.publish(stream_text("stderr", text))

    def _tell_end(self) -> None:
        """Mark the cell as done, wake the waiting threads, and call the callbacks of `when_done`. Called once."""
        is_awaited = bool(self._waiting)  # before the waiting threads wake, and leave `_waiting`
        self._finished = True
        self._events.put(None)
        actions, self._when_done = self._when_done, []
        for action in actions:
            try:
                action()
            except Exception:  # such as an event loop that has closed; the other callbacks must still run
                _log.exception("a callback for the end of a cell failed")
        # A background cell, whose error nobody has seen or will see.
        if not (self._options.block or self._error_shown or is_awaited) and (error := self.error()) is not None:
            self.sink.publish(Published("error", error_content(error)))

    def _show_or_hold(self, part: CellPart, message: Published) -> None:
        """Show a message of a worker now, or keep it in `CellPart.held`."""
        if message.kind in _OUTPUTS and message.kind != "stream":
            self._show_held(part)  # an error that is followed by more than text did not end the cell
        # It may be the error that ends the cell, which `wait` then raises: so it is held, with the text that follows,
        # until the cell ends here, output other than text follows, or `_ERROR_HELD_FOR` seconds have passed.
        if message.kind == "error" and not part.done:
            part.held.append(message)
            self._thread.loop.call_later(_ERROR_HELD_FOR, self._show_held, part, message)
        elif part.held:
            part.held.append(message)
        else:
            self._remember(part, self._outlet.feed(part.worker, message))

    def _show_held(self, part: CellPart, error: Published | None = None) -> None:
        """Show the messages in `CellPart.held`, and empty it; with ``error``, only if that one is still the first."""
        if error is not None and (not part.held or part.held[0] is not error):
            return
        if error is not None and part.breaks_off:  # the cell ends soon, with this error
            self._thread.loop.call_later(_ERROR_HELD_FOR, self._show_held, part, error)
            return
        held, part.held = part.held, []
        for message in held:
            self._remember(part, self._outlet.feed(part.worker, message))

    @staticmethod
    def _remember(part: CellPart, shown: Sequence[Published]) -> None:
        """Add messages to `CellPart.outputs`, and merge neighbouring text of a stream. ``clear_output`` empties it."""
        for message in shown:
            if message.kind == LEFT_OUT:
                message = say_left_out(message, [part.worker])
            kind, content = message.kind, message.content
            last = part.outputs[-1] if part.outputs else {}
            if kind == "clear_output":
                part.outputs.clear()
            elif kind == "stream" and last.get("output_type") == "stream" and last["name"] == content["name"]:
                last["text"] += content["text"]
            elif kind in _OUTPUTS:
                kept = {key: value for key, value in content.items() if key != "transient"}
                part.outputs.append({"output_type": kind, **kept})


def error_content(error: BaseException) -> dict[str, Any]:
    """Return the content of the Jupyter ``error`` message for a cell that failed with this error."""
    traceback = list(getattr(error, "traceback", ()))
    return {"ename": type(error).__name__, "evalue": str(error), "traceback": traceback}
