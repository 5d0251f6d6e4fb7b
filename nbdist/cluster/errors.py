"""The errors with which a cell fails when workers fail: the workers' own errors, as if the cell had raised them itself.

If all errors have one class, the cell's error has the name of that class, and their texts. If that class is nbdist's or
Python's, ``except`` with that class catches the cell's error, too; `_class_for` lists the exceptions. Errors of
different classes become one plain `CellError`. The cell's error shows at most four different tracebacks.
"""

from __future__ import annotations

import builtins
import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import nbdist.errors
from nbdist.cluster.output.arranger import grouped, say_names
from nbdist.errors import DecodeError, EncodeError, NbdistError

_TRACEBACKS_SHOWN = 4  # the most tracebacks, or texts, of different errors that one error shows
_NEVER_SUBCLASSED = (
    StopIteration,  # Python turns it into a RuntimeError when it leaves a coroutine, such as one that awaits a cell
    StopAsyncIteration,
    SyntaxError,  # IPython shows it in its own way
)
_NUMBER = re.compile(r"\b(?:0x[0-9a-fA-F]+|\d+(?:\.\d+)*)\b")
_SHORT_TEXT = 80  # the most characters of a short text, where every number may matter to the reader

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def _name_pattern(worker: str) -> re.Pattern[str]:
    # For worker1, not for worker10.
    return re.compile(rf" on {re.escape(worker)}(?!\w)")


@dataclass(frozen=True)
class WorkerError:
    """An error as one worker's kernel reported it: the class name, the text and the formatted traceback."""

    worker: str
    name: str
    text: str
    traceback: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        """A key that is equal for errors that differ only in the worker, and in numbers within long lines."""
        text = _comparable(_name_pattern(self.worker).sub("", self.text))
        shown = _COLOUR.sub("", "\n".join(self.traceback))
        if self.text:
            shown = shown.replace(self.text, _comparable(self.text))
        shown = "\n".join(map(_comparable, shown.split("\n")))  # notes and causes are long texts with numbers, too
        return self.name, text, _name_pattern(self.worker).sub("", shown)

    def lines(self, workers: str) -> list[str]:
        """Return the lines of the traceback, labelled with ``workers``: the names of all workers with this error."""
        if not self.traceback:
            return [f"{self.name}: {self.text}" if self.text else self.name]
        return [_name_pattern(self.worker).sub(f" on {workers}", line) for line in self.traceback]


class CellError(NbdistError):
    """A cell failed on one or more workers; ``errors`` has the error of each failed worker.

    Attributes:
        errors: A `WorkerError` for each failed worker: ``worker``, ``name``, ``text`` and ``traceback``.
        traceback: The lines that IPython shows.
    """

    errors: Sequence[WorkerError] = ()
    traceback: Sequence[str] = ()

    def __init__(self, text: str = "", errors: Sequence[WorkerError] = ()) -> None:
        super().__init__(text)
        self.errors = errors

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError's own `__str__` would show the repr

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the workers' tracebacks, without the frames of this package."""
        return list(self.traceback)


class CellInterrupted(KeyboardInterrupt):
    """The user interrupted a cell that ran on workers; shown as KeyboardInterrupt."""

    traceback: Sequence[str] = ()

    def _render_traceback_(self) -> list[str]:
        return list(self.traceback)


CellInterrupted.__name__ = "KeyboardInterrupt"  # the name that front ends know


class CellTimeout(CellError, TimeoutError):
    """A cell ran for longer than its time limit, which ``-t`` or ``timeout`` set; its workers were interrupted."""


def make_error(errors: Sequence[WorkerError], targets: int) -> CellError:
    """Return the one error that a cell on ``targets`` workers raises for these errors."""
    traceback: list[str] = []
    alike = list(grouped(errors, lambda error: error.key).values())
    # Each different traceback once, below the names of its workers if the cell has several.
    for group in alike[:_TRACEBACKS_SHOWN]:
        whose = _names_of(group)
        if targets > 1:
            traceback.append(f"[{whose}]")
        traceback += group[0].lines(whose)
    if left := [error for group in alike[_TRACEBACKS_SHOWN:] for error in group]:
        traceback.append(f"... and other errors on {_names_of(left)}")
    names = {error.name for error in errors}
    texts = list(grouped(errors, lambda error: (error.name, _comparable(error.text))).values())
    name = names.pop() if len(names) == 1 else "CellError"
    if len(texts) == 1:
        text = errors[0].text
    else:
        said = [
            f"{_names_of(group)}: {_in_one_line(group[0], with_name=name == 'CellError')}"
            for group in texts[:_TRACEBACKS_SHOWN]
        ]
        if left := [error for group in texts[_TRACEBACKS_SHOWN:] for error in group]:
            said.append(f"and others on {_names_of(left)}")
        text = "; ".join(said)
    made = _class_for(name)(text)
    made.errors = tuple(errors)
    made.traceback = traceback
    return made


def _comparable(text: str) -> str:
    """Return a text by which to compare errors: with more than `_SHORT_TEXT` characters, every number becomes 0."""
    # The numbers of long texts are ports, addresses and the like, which differ between workers.
    return text if len(text) <= _SHORT_TEXT else _NUMBER.sub("0", text)


def _names_of(errors: Sequence[WorkerError]) -> str:
    return say_names([error.worker for error in errors])


def _in_one_line(error: WorkerError, *, with_name: bool) -> str:
    return ": ".join(part for part in (error.name if with_name else "", error.text) if part)


@functools.lru_cache(maxsize=128)
def _class_for(name: str) -> type[CellError]:
    """Return a subclass of `CellError` with this name, and of Python's or nbdist's class of that name, if any."""
    if name == "CellError":
        return CellError
    own = getattr(nbdist.errors, name, None) or getattr(builtins, name, None)
    if isinstance(own, type) and issubclass(own, Exception) and not issubclass(own, _NEVER_SUBCLASSED):
        with suppress(TypeError):  # the two classes' instances differ in layout, or the class takes more than a text
            made = type(name, (CellError, own), {})
            made("")
            return made
    return type(name, (CellError,), {})


@contextmanager
def named_in_errors(expression: str) -> Iterator[None]:
    """Name the expression whose value cannot be sent, once for all workers, in place of nbdist's own function."""
    try:
        yield
    except (EncodeError, DecodeError) as error:
        _, cannot, why = str(error).partition("cannot be sent: ")
        if not cannot:
            raise
        raise type(error)(f"`{expression}` {cannot}{why}") from None
