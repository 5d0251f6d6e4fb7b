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
        self.is_sent = False
        """Whether the message may reach its receiver, to whom the forks then belong: `take_back` leaves them alone."""
        self.handed: list[Fork] = []
        self.kept: list[object] = []
        """Holds on the values that the message refers to. They live as long as this object, so until it has arrived."""

    def fork(self, reference: RRef[Any]) -> Fork:
        """Describe a new fork of ``reference``."""
        self.kept.append(reference._hold)  # before it is let go of by another thread
        references = self._references
        child = references.new_id()
        # Before it is made, so that `take_back` also knows one after whose making Ctrl-C came.
        self.handed.append(Fork(reference._id, child, reference._owner, references.me))
        return reference.hand_over(self._to, references, child)

    def take_back(self) -> None:
        """Take back the forks, unless the message may go out."""
        if not self.is_sent:
            self._references.take_back(self.handed, self._to)
            self.handed = []
