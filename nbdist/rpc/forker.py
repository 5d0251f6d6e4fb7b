"""The references that go with one message."""

from __future__ import annotations

from typing import Any

from nbdist.rpc.references import References
from nbdist.rpc.rref import RRef
from nbdist.wire.messages import Fork

__all__ = ["MessageForker"]


class MessageForker:
    """Forks the references inside one message, and remembers them in case it is never sent."""

    def __init__(self, references: References, to: int) -> None:
        self._references = references
        self._to = to
        self.handed: list[Fork] = []
        self.kept: list[object] = []

    def fork(self, reference: RRef[Any]) -> Fork:
        """Describe a new fork of ``reference``."""
        self.kept.append(reference._hold)  # before it is let go of by another thread
        fork = reference.hand_over(self._to, self._references)
        self.handed.append(fork)
        return fork

    def take_back(self) -> None:
        """The message is not going to be sent."""
        self._references.take_back(self.handed, self._to)
        self.handed = []
