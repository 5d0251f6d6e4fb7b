"""The references in one message."""

from __future__ import annotations

from typing import Any

from nbdist.rpc.references.reference_table import References
from nbdist.rpc.references.rref import RRef
from nbdist.wire.messages import Fork


class MessageForker:
    """Makes forks of the references in one message, and undoes them if the message is never sent."""

    def __init__(self, references: References, to: int) -> None:
        self._references = references
        self._to = to
        self.is_sent = False
        """True once the message may reach its receiver, to which the forks belong then."""
        self.handed: list[Fork] = []  # the forks that were made
        # Holds on the values that the message refers to. They end with this object, when the message has arrived.
        self.kept: list[object] = []

    def fork(self, reference: RRef[Any]) -> Fork:
        """Make a fork of ``reference`` for the receiver. Raises RRefError or WorkerLost if it cannot be used."""
        self.kept.append(reference.hold)  # first, because another thread may release the reference
        references = self._references
        child = references.new_id()
        # Added to the list before the fork is made, so that `take_back` finds it even if Ctrl-C comes in between.
        self.handed.append(Fork(reference.id, child, reference.owner_incarnation, references.me))
        return reference.hand_over(self._to, references, child)

    def take_back(self) -> None:
        """Undo the forks, unless the message may go out. A second call does nothing."""
        if not self.is_sent:
            self._references.take_back(self.handed, self._to)
            self.handed = []
