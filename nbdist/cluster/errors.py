"""How a cell fails when workers do: with their own errors, as the cell itself would have.

One worker's error, or the same one of several, has its own class name and text, and can be caught as its own class
where that is a builtin. Several errors come together, at most four tracebacks of them.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.cluster.arrange import say_names
from nbdist.errors import NbdistError

__all__ = ["CellError", "CellInterrupted", "CellTimeout", "WorkerError", "make_error"]

_SHOWN = 4
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class WorkerError:
    """What one worker's kernel said of its error."""

    worker: str
    name: str
    text: str
    traceback: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        """The same for errors that differ in nothing but the worker."""
        lines = _COLOUR.sub("", "\n".join(self.traceback)).replace(f" on {self.worker}", "")
        return self.name, self.text, lines


class CellError(NbdistError):
    """A cell failed on one or more workers; ``errors`` has each one's."""

    errors: Sequence[WorkerError] = ()
    traceback: Sequence[str] = ()

    def __init__(self, text: str = "", errors: Sequence[WorkerError] = ()) -> None:
        super().__init__(text)
        self.errors = errors

    def _render_traceback_(self) -> list[str]:
        """What IPython shows for it: the workers' tracebacks, not the way through this package."""
        return list(self.traceback)


class CellInterrupted(KeyboardInterrupt):
    """The user's interrupt ended a cell on its workers."""

    traceback: Sequence[str] = ()

    def _render_traceback_(self) -> list[str]:
        return list(self.traceback)


class CellTimeout(CellError, TimeoutError):
    """A cell ran for longer than its ``-t`` allows."""


def make_error(errors: Sequence[WorkerError], targets: int) -> CellError:
    """The error with which a cell fails whose workers failed like this."""
    groups: dict[tuple[str, str, str], list[WorkerError]] = {}
    for error in errors:
        groups.setdefault(error.key, []).append(error)
    traceback: list[str] = []
    for group in list(groups.values())[:_SHOWN]:
        if targets > 1:
            traceback.append(f"[{say_names([error.worker for error in group])}]")
        whose = say_names([error.worker for error in group])
        traceback += [line.replace(f" on {group[0].worker}", f" on {whose}") for line in group[0].traceback]
    if len(groups) > _SHOWN:
        left = [error.worker for group in list(groups.values())[_SHOWN:] for error in group]
        traceback.append(f"... and other errors on {say_names(left)}")
    names = {error.name for error in errors}
    texts = {error.text for error in errors}
    if len(names) == len(texts) == 1:
        name, text = names.pop(), texts.pop()
    elif len(names) == 1:
        name = names.pop()
        text = "; ".join(f"{error.worker}: {error.text}" for error in errors[:_SHOWN])
    else:
        name = "CellError"
        text = "; ".join(f"{error.worker}: {error.name}: {error.text}" for error in errors[:_SHOWN])
    made = _class_for(name)(text)
    made.errors = tuple(errors)
    made.traceback = traceback
    return made


def _class_for(name: str) -> type[CellError]:
    """A CellError with the name of the workers' error, which is one of that class as well where it can be."""
    if name == "CellError":
        return CellError
    own = getattr(builtins, name, None)
    if isinstance(own, type) and issubclass(own, Exception):
        try:
            return type(name, (CellError, own), {})
        except TypeError:  # their instances are laid out differently
            pass
    return type(name, (CellError,), {})
