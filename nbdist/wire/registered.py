"""What the layers above teach the codec: types that travel as references, and reducers for classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nbdist.wire.messages import Fork

__all__ = ["Forker", "reducers", "reference_types", "register_reducer", "register_reference"]

reference_types: set[type] = set()
"""The types whose instances travel as forks."""

reducers: dict[type, Callable[[Any], Any]] = {}
"""How to pickle instances of a class, by class."""


class Forker(Protocol):
    """Hands a reference over: what the layer above does when one is met inside a message."""

    def fork(self, reference: Any) -> Fork:
        """Describe a new fork of ``reference`` for the receiver."""
        ...

    def take_back(self) -> None:
        """Forget the forks described so far: the receiver will not see them."""
        ...


def register_reference(cls: type) -> None:
    """Make instances of ``cls`` travel as forks; they are handed to the encoder's `Forker`."""
    reference_types.add(cls)


def register_reducer(cls: type, reducer: Callable[[Any], Any]) -> None:
    """Have instances of ``cls`` pickled as ``reducer`` says; the first one registered stays."""
    reducers.setdefault(cls, reducer)
