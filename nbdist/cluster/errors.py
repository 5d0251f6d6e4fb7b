"""How a cell fails when workers do: with their own errors, as the cell itself would have.

One worker's error, or the same one of several, has its own class name and text, and can be caught as its own class
where that is Python's or nbdist's. Several errors come together, at most four tracebacks of them.
"""

from __future__ import annotations

import builtins
import functools
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import nbdist.errors
from nbdist.cluster.arrange import say_names
from nbdist.errors import NbdistError

__all__ = ["CellError", "CellInterrupted", "CellTimeout", "WorkerError", "grouped", "make_error"]

_SHOWN = 4
_NOT_AS_THEMSELVES = (
    StopIteration,  # becomes another error where it leaves a coroutine, such as the one that awaits a cell
    StopAsyncIteration,
    SyntaxError,  # is shown by IPython in a way of its own
)
_NUMBER = re.compile(r"\b(?:0x[0-9a-fA-F]+|\d+(?:\.\d+)*)\b")
_SHORT = 80
"""Letters of a text in which every number may matter."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def _on(worker: str) -> re.Pattern[str]:
    """Where a traceback names the worker of a frame: not worker10, where it is worker1."""
    return re.compile(rf" on {re.escape(worker)}(?!\w)")


@dataclass(frozen=True)
class WorkerError:
    """What one worker's kernel said of its error."""

    worker: str
    name: str
    text: str
    traceback: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        """The same for errors that differ in nothing but the worker, and in numbers within long lines."""
        text = _shared(self.text)
        shown = _COLOUR.sub("", "\n".join(self.traceback))
        if self.text:
            shown = shown.replace(self.text, text)
        shown = "\n".join(map(_shared, shown.split("\n")))  # notes and causes, too, are long texts with numbers
        return self.name, text, _on(self.worker).sub("", shown)

    def lines(self, workers: str) -> list[str]:
        """Its traceback, as that of all who had the same one."""
        if not self.traceback:
            return [f"{self.name}: {self.text}" if self.text else self.name]
        return [_on(self.worker).sub(f" on {workers}", line) for line in self.traceback]


class CellError(NbdistError):
    """A cell failed on one or more workers; ``errors`` has each one's."""

    errors: Sequence[WorkerError] = ()
    traceback: Sequence[str] = ()

    def __init__(self, text: str = "", errors: Sequence[WorkerError] = ()) -> None:
        super().__init__(text)
        self.errors = errors

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # a KeyError would show the text's repr, a SyntaxError None

    def _render_traceback_(self) -> list[str]:
        """What IPython shows for it: the workers' tracebacks, not the way through this package."""
        return list(self.traceback)


class CellInterrupted(KeyboardInterrupt):
    """The user's interrupt ended a cell on its workers."""

    traceback: Sequence[str] = ()

    def _render_traceback_(self) -> list[str]:
        return list(self.traceback)


CellInterrupted.__name__ = "KeyboardInterrupt"  # which it is, and by which a front end shall know it


class CellTimeout(CellError, TimeoutError):
    """A cell ran for longer than its ``-t`` allows."""


def make_error(errors: Sequence[WorkerError], targets: int) -> CellError:
    """The error with which a cell fails whose workers failed like this."""
    traceback: list[str] = []
    alike = grouped(errors, lambda error: error.key)
    for group in alike[:_SHOWN]:
        whose = _whose(group)
        if targets > 1:
            traceback.append(f"[{whose}]")
        traceback += group[0].lines(whose)
    if left := [error for group in alike[_SHOWN:] for error in group]:
        traceback.append(f"... and other errors on {_whose(left)}")
    names = {error.name for error in errors}
    texts = grouped(errors, lambda error: (error.name, _shared(error.text)))
    name = names.pop() if len(names) == 1 else "CellError"
    if len(texts) == 1:
        text = errors[0].text
    else:
        said = [f"{_whose(group)}: {_say(group[0], with_name=name == 'CellError')}" for group in texts[:_SHOWN]]
        if left := [error for group in texts[_SHOWN:] for error in group]:
            said.append(f"and others on {_whose(left)}")
        text = "; ".join(said)
    made = _class_for(name)(text)
    made.errors = tuple(errors)
    made.traceback = traceback
    return made


def grouped(errors: Sequence[WorkerError], key: Callable[[WorkerError], Hashable]) -> list[list[WorkerError]]:
    """Return errors that have the same key together, in the order of the first ones."""
    groups: dict[Hashable, list[WorkerError]] = {}
    for error in errors:
        groups.setdefault(key(error), []).append(error)
    return list(groups.values())


def _shared(text: str) -> str:
    """Return the same for texts that are one to a reader: a long one's numbers are ports, addresses and the like."""
    return text if len(text) <= _SHORT else _NUMBER.sub("0", text)


def _whose(errors: Sequence[WorkerError]) -> str:
    return say_names([error.worker for error in errors])


def _say(error: WorkerError, *, with_name: bool) -> str:
    return ": ".join(part for part in (error.name if with_name else "", error.text) if part)


@functools.lru_cache(maxsize=128)
def _class_for(name: str) -> type[CellError]:
    """A CellError with the name of the workers' error, which is one of that class as well where it can be."""
    if name == "CellError":
        return CellError
    own = getattr(nbdist.errors, name, None) or getattr(builtins, name, None)
    if isinstance(own, type) and issubclass(own, Exception) and not issubclass(own, _NOT_AS_THEMSELVES):
        try:
            made = type(name, (CellError, own), {})
            made("")
        except TypeError:  # their instances are laid out differently, or are not made from a text
            pass
        else:
            return made
    return type(name, (CellError,), {})
