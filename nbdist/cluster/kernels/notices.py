"""Words the notices of a cell on workers that failed or were stopped. Pure: errors in, a text out."""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.amounts import plural
from nbdist.cluster.errors import WorkerError
from nbdist.cluster.output.arranger import grouped, label_of, say_names

# Errors that an interrupt raises, in a plain cell and in a cell with ``await``.
_INTERRUPTS = ("KeyboardInterrupt", "CancelledError")
_TEXT_SHOWN = 200  # characters of an error's text; the traceback at the cell's end has all


def say_failed(errors: Sequence[WorkerError], running: Sequence[str], ends: str) -> str:
    """Return a line for each error, and which workers still run; equal errors share a line."""
    runs, them = plural(len(running), "runs", "run"), plural(len(running), "it", "them")
    # ``ends`` says what ends these, such as "Stop ends".
    still = f"{say_names(running)} still {runs}; {ends} {them}"
    groups = grouped(errors, lambda error: (error.name, error.text)).values()
    return "".join(
        f"{label_of(tuple(error.worker for error in group))} {_in_one_line(group[0])} ({still})\n" for group in groups
    )


def say_stopped(errors: Sequence[WorkerError]) -> list[str]:
    """Return where an interrupt has stopped workers, in words; workers that were stopped in one line share a text."""
    stopped = [error for error in errors if error.name in _INTERRUPTS and error.text]
    groups = grouped(stopped, lambda error: error.text)
    return [f"{say_names([error.worker for error in group])} {text}" for text, group in groups.items()]


def _in_one_line(error: WorkerError) -> str:
    text = error.text.strip().partition("\n")[0]
    text = text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}…"
    return f"{error.name}: {text}" if text else error.name
