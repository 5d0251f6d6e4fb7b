"""One cell on its workers: what was sent, what has come back, and the handle by which it is awaited.

Events come in the kernel thread. Whoever waits, mostly the notebook's main thread, sleeps on a queue, from which it
also learns that a worker asks for input, because only the main thread may ask the user.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from getpass import getpass
from typing import Any

from nbdist import durations
from nbdist.cluster import labels
from nbdist.cluster.arrange import LEFT_OUT, Arranger, Published, say_left_out, say_names
from nbdist.cluster.comms import own_request
from nbdist.cluster.errors import CellInterrupted, CellTimeout, WorkerError, make_error
from nbdist.cluster.jupyter_wire import new_id
from nbdist.cluster.kernels import KernelThread, Message
from nbdist.cluster.notices import say_failed, say_stopped
from nbdist.cluster.outlet import Outlet
from nbdist.cluster.page_lines import moved_down
from nbdist.cluster.sinks import Sink

__all__ = ["Cell", "Part"]

_log = logging.getLogger("nbdist.cluster")
_IDLE_LOST = 10.0
"""Seconds after its reply within which a kernel must say that it is idle: much output may have crowded that out."""

_REPLY_LOST = 1.0
"""Seconds after a kernel is idle again within which its reply must come: an interrupt may have eaten it."""

_ERROR_STANDS = 3.0
"""Seconds after which an error that a cell has shown is not the one with which it ends."""

_TELL_AFTER = 0.3
"""Seconds after a worker has failed within which the others may fail as well, and the cell ends without a notice."""

_NOT_TO_DEBUG = {
    "Aborted",
    "IndentationError",
    "KeyboardInterrupt",
    "SyntaxError",
    "SystemExit",
    "UsageError",
    "WorkerLost",
}
"""Errors that leave no frame of the user's on the worker, or no worker."""

_OUTPUTS = ("stream", "display_data", "execute_result", "error")


@dataclass
class Part:
    """One worker's share in a cell."""

    worker: str
    id: str
    """Of the request."""
    began: float | None = None
    when_begun: list[Callable[[], None]] = field(default_factory=list)
    idle: bool = False
    reply: Mapping[str, Any] | None = None
    error: WorkerError | None = None
    done: bool = False
    note: str = ""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    held: list[Published] = field(default_factory=list)
    """An error, which may be the cell's end or something that it only shows, and what came after it."""


class Cell:
    """The handle of a cell that runs on workers.

    ``wait()`` or ``await`` for its end, ``cancel()`` it, look at ``done`` and ``outputs``.
    """

    def __init__(
        self,
        code: str,
        workers: Sequence[str],
        sink: Sink,
        arranger: Arranger,
        thread: KernelThread,
        interrupt: Callable[[Cell], Sequence[str]],
        answer: Callable[[str, str, Message], None],
        *,
        number: int,
        above: int = 0,
        foreground: bool,
        quiet: bool = False,
        fail_fast: bool = False,
    ) -> None:
        self.code = code
        self.source = moved_down(code, above)
        """The code, with its lines where they are in the page's cell, and empty lines above it."""
        self.sink = sink
        self.parts = {worker: Part(worker, new_id()) for worker in workers}
        self._outlet = Outlet(thread, arranger, sink, number)
        self._thread = thread
        self._interrupt = interrupt
        self._answer = answer
        self.number = number
        self._foreground = foreground
        self._quiet = quiet
        self._fail_fast = fail_fast
        self._events: queue.SimpleQueue[tuple[str, Message] | None] = queue.SimpleQueue()
        self._when_done: list[Callable[[], object]] = []
        self._finished = False
        self.interrupted = False
        self._part_ended: Callable[[Cell, str], None] = lambda cell, worker: None
        self._error_shown = False
        self.last_output = time.monotonic()
        """When a worker of it last put something out, or asked for input; at first, when it was sent."""
        self._told: set[str] = set()
        """The workers of whose errors a notice has told."""

    def __repr__(self) -> str:
        state = "done" if self.done else f"running on {say_names(self.running) or 'nothing'}"
        if self.done and any(part.error for part in self.parts.values()):
            state = f"failed on {say_names([part.worker for part in self.parts.values() if part.error])}"
        first = self.code.strip().partition("\n")[0]
        return f"<Cell {first[:40]!r}: {state}>"

    # -- looking ------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether it has ended on all its workers."""
        return self._finished

    @property
    def running(self) -> list[str]:
        """The workers on which it has not ended."""
        return [part.worker for part in self.parts.values() if not part.done]

    @property
    def outputs(self) -> dict[str, list[dict[str, Any]]]:
        """What each worker has put out so far, as a notebook keeps it."""
        return {worker: list(part.outputs) for worker, part in self.parts.items()}

    @property
    def errors(self) -> list[WorkerError]:
        """The errors that there are."""
        return [part.error for part in self.parts.values() if part.error is not None]

    def error(self) -> BaseException | None:
        """The error with which it has failed, if it has."""
        errors = self.errors
        if not errors:
            return None
        if self.interrupted and all(error.name == "KeyboardInterrupt" for error in errors):
            return self._interruption([])
        made = make_error(self._causes(), len(self.parts))
        made.errors = tuple(errors)
        made.traceback = [*self._where_interrupted(), *self._how_to_debug()]
        return made

    def _how_to_debug(self) -> list[str]:
        """Return the line that says how to debug a worker that has failed, where somebody could type there."""
        if not self._foreground or self._quiet or not self.sink.interactive:
            return []
        found = next((error.worker for error in self._causes() if error.name not in _NOT_TO_DEBUG), None)
        return [f"To look around where it failed: `%debug` in a cell of `%%remote {found}`"] if found else []

    def _causes(self) -> list[WorkerError]:
        """The errors, without those of workers that were interrupted because another had failed."""
        errors = self.errors
        causes = [error for error in errors if error.name != "KeyboardInterrupt"]
        return causes if self._fail_fast and causes else errors

    def move_to(self, sink: Sink) -> None:
        """Show what it puts out from now on at another place: its page cell was run again."""
        self.sink = sink
        self._outlet.move_to(sink)

    # -- waiting ------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None, *, begin: Callable[[], object] = lambda: None) -> None:
        """Wait until it has ended on all workers; raises their errors.

        Ctrl-C, or the stop button, interrupts the workers, and so does the end of ``timeout`` (seconds). What sends it
        is to ``begin`` here: an interrupt that comes just then would else leave it running.
        """
        deadline = None if timeout is None else time.monotonic() + durations.positive(timeout)
        try:
            begin()
            while not self._finished:
                try:
                    left = None if deadline is None else max(0.0, deadline - time.monotonic())
                    event = self._events.get(timeout=left)
                except queue.Empty:
                    self._time_out(timeout or 0.0)
                else:
                    if event is not None:
                        self._ask(*event)
        except KeyboardInterrupt:
            if self._finished and not self.running:
                raise
            raise self._interruption(self._stop()) from None
        self._events.put(None)  # somebody else may wait too
        self._hand_on_payload()
        error = self.error()
        if error is not None:
            self._error_shown = True
            raise error

    def __await__(self) -> Generator[Any, None, None]:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        self.when_done(lambda: loop.call_soon_threadsafe(end))
        yield from ended
        error = self.error()
        if error is not None:
            self._error_shown = True
            raise error

    def when_done(self, action: Callable[[], object]) -> None:
        """Call ``action``, in the kernel thread, once it has ended."""

        def add() -> None:
            if self._finished:
                action()
            else:
                self._when_done.append(action)

        if not self._thread.soon(add):  # the cluster has been shut down, and all cells have ended
            action()

    def cancel(self) -> None:
        """Interrupt it where it runs; it then fails with KeyboardInterrupt."""
        if not self._finished:
            self._stop()

    def _stop(self) -> Sequence[str]:
        """Interrupt the workers; what is to be said of those that did not give way."""
        self.interrupted = True
        return self._interrupt(self)

    def _time_out(self, timeout: float) -> None:
        late = self.running
        stuck = self._stop()
        text = f"{say_names(late)} had not ended after {timeout:g} s"
        error = CellTimeout("; ".join([text, *say_stopped(self.errors), *stuck]))
        error.errors = tuple(self.errors)
        error.traceback = [*self._where_interrupted(), f"CellTimeout: {error}"]
        raise error

    def _interruption(self, stuck: Sequence[str]) -> CellInterrupted:
        error = CellInterrupted("; ".join([*say_stopped(self.errors), *stuck]))
        error.traceback = [*self._where_interrupted(), *stuck] or ["KeyboardInterrupt"]
        return error

    def _where_interrupted(self) -> list[str]:
        errors = self._causes()
        notes = [f"{part.worker}: {part.note}" for part in self.parts.values() if part.note]
        return [*make_error(errors, len(self.parts)).traceback, *notes] if errors else notes

    def _hand_on_payload(self) -> None:
        """What the cell wants of the front end besides output: a page of help, a next cell; each from one worker."""
        found: dict[str, Mapping[str, Any]] = {}
        for part in self.parts.values():
            for payload in (part.reply or {}).get("payload", ()):
                found.setdefault(payload.get("source", ""), payload)
        found.pop("ask_exit", None)  # means the worker
        if self._foreground and not self._quiet:
            for payload in found.values():
                self.sink.hand_on(payload)

    def _ask(self, worker: str, request: Message) -> None:
        """A worker asks for input; only the main thread may ask the user."""
        content = request["content"]
        prompt = content["prompt"] if len(self.parts) == 1 else f"[{worker}] {content['prompt']}"
        text = getpass(prompt) if content.get("password") else input(prompt)
        self._answer(worker, text, request)

    # -- events, in the kernel thread ---------------------------------------------------------

    def when_part_ends(self, action: Callable[[Cell, str], None]) -> None:
        """Call ``action(cell, worker)``, in the kernel thread, as soon as it has ended on a worker."""
        self._part_ended = action

    def on_output(self, worker: str, message: Message) -> None:
        """A message on the output channel of a worker whose parent is this cell."""
        kind, content = message["msg_type"], message["content"]
        part = self.parts[worker]
        if kind == "status":
            self._on_status(part, content["execution_state"])
        elif kind == "execute_input":
            self._on_begin(part)
        elif kind != "iopub_welcome" and not (self._quiet and kind == "execute_result"):
            self.last_output = time.monotonic()
            if kind.startswith("comm_"):
                content = own_request(content, part.id, self.sink.id)
            published = Published(kind, content, message.get("metadata") or {}, message.get("buffers") or ())
            self._show_or_hold(part, published)

    def on_reply(self, worker: str, content: Mapping[str, Any]) -> None:
        """The reply to this cell has come from a worker."""
        part = self.parts[worker]
        part.reply = content
        if content["status"] in ("aborted", "abort"):
            part.error = WorkerError(worker, "Aborted", "the kernel gave the cell up", ())
        self._maybe_end(part)
        if not part.done:
            self._thread.loop.call_later(_IDLE_LOST, self._idle_is_lost, part)

    def _idle_is_lost(self, part: Part) -> None:
        part.idle = True
        self._maybe_end(part)

    def on_input(self, worker: str, request: Message) -> None:
        """A worker asks for input."""
        self.last_output = time.monotonic()
        self._remember(self.parts[worker], self._outlet.release(worker))  # what it printed says for what
        self._events.put((worker, request))

    def on_lost(self, worker: str, why: str) -> None:
        """A worker has died."""
        part = self.parts[worker]
        if part.done:
            return
        text = f"{worker} {why}"
        part.error = WorkerError(worker, "WorkerLost", text, (f"WorkerLost: {text}",))
        self._end(part)

    @staticmethod
    def _on_begin(part: Part) -> None:
        """Its code is about to run; from now on an interrupt is heard."""
        part.began = time.monotonic()
        actions, part.when_begun = part.when_begun, []
        for action in actions:
            action()

    def _on_status(self, part: Part, state: str) -> None:
        if state == "idle":
            part.idle = True
            self._maybe_end(part)
            if not part.done:
                self._thread.loop.call_later(_REPLY_LOST, self._reply_is_lost, part)

    def _reply_is_lost(self, part: Part) -> None:
        if not part.done:
            if not self._take_error(part, None):
                part.error = WorkerError(part.worker, "KeyboardInterrupt", "", ("KeyboardInterrupt",))
            self._end(part)

    def _fail(self, part: Part, content: Mapping[str, Any]) -> None:
        traceback = tuple(content.get("traceback", ()))
        if content["ename"] == "NameError" and (name := labels.missing_here(content["evalue"])):
            traceback = (
                *traceback,
                f"`{name}` is a variable of the notebook: `%dist_push {name}` sends it to the workers",
            )
        part.error = WorkerError(part.worker, content["ename"], content["evalue"], traceback)

    def _take_error(self, part: Part, name: str | None) -> bool:
        """Have it fail with the last error that it has shown, if that is called so."""
        errors = [message for message in part.held if message.kind == "error"]
        if not errors or name not in (None, "NoneType", errors[-1].content["ename"]):  # NoneType: of a bad repr
            return False
        part.held = [message for message in part.held if message is not errors[-1]]
        self._fail(part, errors[-1].content)
        return True

    def _maybe_end(self, part: Part) -> None:
        if not part.idle or part.reply is None or part.done:
            return
        if part.reply["status"] == "error" and not self._take_error(part, part.reply["ename"]):
            self._fail(part, part.reply)
        self._end(part)

    def _end(self, part: Part) -> None:
        part.done = True
        self._part_ended(self, part.worker)
        try:
            self._show_held(part)
            self._remember(part, self._outlet.ended(part.worker))
            if not self.running:
                self._outlet.finish()
            elif part.error is not None and not self.interrupted:
                self._thread.loop.call_later(_TELL_AFTER, self._tell_failed)
                if self._fail_fast:
                    self._stop()
        finally:  # whatever cannot be shown, who waits must learn of the end
            if not self.running:
                self._tell_end()

    def _tell_failed(self) -> None:
        """Say which workers have failed, if others still run."""
        if self._finished or self.interrupted or self._quiet or not self.sink.interactive:
            return
        errors = [error for error in self.errors if error.worker not in self._told]
        self._told.update(error.worker for error in errors)
        if errors:
            ends = self.sink.stop_says if self._foreground else "its cancel() ends"
            text = say_failed(errors, self.running, ends)
            self.sink.page.publish("stream", {"name": "stderr", "text": text})

    def _tell_end(self) -> None:
        self._finished = True
        self._events.put(None)
        actions, self._when_done = self._when_done, []
        for action in actions:
            try:
                action()
            except Exception:  # such as of an event loop that is gone; the others wait as well
                _log.exception("what was to follow a cell's end has failed")
        if not self._foreground and not self._error_shown:
            error = self.error()
            if error is not None:
                self.sink.publish("error", error_content(error))

    def _show_or_hold(self, part: Part, message: Published) -> None:
        if message.kind in _OUTPUTS and message.kind != "stream":
            self._show_held(part)  # an error behind which more than text comes was not the cell's end
        if message.kind == "error" and not part.done:
            part.held.append(message)
            self._thread.loop.call_later(_ERROR_STANDS, self._show_held, part, message)
        elif part.held:
            part.held.append(message)
        else:
            self._show(part, message)

    def _show(self, part: Part, message: Published) -> None:
        self._remember(part, self._outlet.feed(part.worker, message))

    def _show_held(self, part: Part, error: Published | None = None) -> None:
        """Show what is held back; or do nothing if that is no longer for that error."""
        if error is not None and (not part.held or part.held[0] is not error):
            return
        held, part.held = part.held, []
        for message in held:
            self._show(part, message)

    @staticmethod
    def _remember(part: Part, shown: Sequence[Published]) -> None:
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
    """The content of a Jupyter message that says that a cell failed."""
    traceback = list(getattr(error, "traceback", ()))
    return {"ename": type(error).__name__, "evalue": str(error), "traceback": traceback}
