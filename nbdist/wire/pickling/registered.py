"""The types and reducers that higher layers register with the codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nbdist.wire.messages import Fork

reference_types: set[type] = set()  # the types whose instances travel as forks

reducers: dict[type, Callable[[Any], Any]] = {}  # the function that pickles instances of a class, by class


class Forker(Protocol):
    """Makes the forks of the references in one message (a fork is counted by the value's owner)."""

    def fork(self, reference: Any) -> Fork:
        """Return a new fork of ``reference``, for the receiver. The encoder calls this for each reference."""

    def take_back(self) -> None:
        """Undo the forks made so far, because the message is certainly not sent."""


def register_reference(cls: type) -> None:
    """Let instances of ``cls``, a class of remote references, travel as forks, which a `Forker` makes."""
    reference_types.add(cls)


def register_reducer(cls: type, reducer: Callable[[Any], Any]) -> None:
    """Pickle instances of ``cls`` with ``reducer``, which returns for an instance what ``__reduce__`` would return.

    If there is a reducer for ``cls`` already, that one stays.
    """
    reducers.setdefault(cls, reducer)
