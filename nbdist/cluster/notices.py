"""What a cell says of the workers that have failed in it, or were stopped: pure, errors in, a text out."""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.cluster.arrange import label_of, say_names
from nbdist.cluster.errors import WorkerError, grouped

__all__ = ["say_failed", "say_stopped"]

_INTERRUPTS = ("KeyboardInterrupt", "CancelledError")
_LONGEST = 200
"""Letters of an error's text that are shown; the whole comes with the traceback, at the cell's end."""


def say_failed(errors: Sequence[WorkerError], running: Sequence[str], ends: str) -> str:
    """Return a line for each error, and which workers still run; equal errors share a line.

    ``ends`` says what ends those that run, such as ``Stop ends them``.
    """
    one = len(running) == 1
    still = f"{say_names(running)} still run{'s' if one else ''}; {ends} {'it' if one else 'them'}"
    groups = grouped(errors, lambda error: (error.name, error.text))
    return "".join(
        f"{label_of(tuple(error.worker for error in group))} {_say(group[0])} ({still})\n" for group in groups
    )


def say_stopped(errors: Sequence[WorkerError]) -> list[str]:
    """Return where an interrupt has stopped workers, in one text for all that were stopped at the same line."""
    stopped = [error for error in errors if error.name in _INTERRUPTS and error.text]
    groups = grouped(stopped, lambda error: error.text)
    return [f"{say_names([error.worker for error in group])} {group[0].text}" for group in groups]


def _say(error: WorkerError) -> str:
    text = error.text.strip().partition("\n")[0]
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return f"{error.name}: {text}" if text else error.name
