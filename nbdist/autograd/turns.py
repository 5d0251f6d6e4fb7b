"""One order, on all workers, for the passes that average gradients over the same ones.

DistributedDataParallel's workers have to begin their collectives in the same order. But passes come to each worker as
messages do: one may come to the module of this pass first, another to that of another; and then averages would be made
of gradients that have nothing to do with each other. So a pass in which several workers reduce asks one of them, the
same for every pass over the same workers, for its turn, and has it until its end.

`Turns` is pure: passes in, the one whose turn it is out.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from nbdist.autograd import messages
from nbdist.autograd.messages import PassId

if TYPE_CHECKING:
    from typing import Protocol

    from nbdist.autograd.ledger import Ledger
    from nbdist.autograd.run import Run

    class Transport(Protocol):
        """What taking turns needs of an agent."""

        def tell(self, to: int, message: messages.Message) -> None:
            """Send, if it is there."""

        def is_there(self, worker: int) -> bool:
            """Whether it is still a member."""


__all__ = ["TurnTaking", "Turns"]


class Turns:
    """The passes that have asked one worker for their turn; it is the first one's."""

    def __init__(self) -> None:
        self._queue: list[PassId] = []

    def ask(self, id: PassId) -> PassId | None:
        """One more; the pass to be told that it is its turn, if any is now."""
        self._queue.append(id)
        return id if len(self._queue) == 1 else None

    def end(self, id: PassId) -> PassId | None:
        """A pass is over, or does not want its turn any more; the one whose turn it becomes."""
        first = self._queue[:1]
        self._queue = [other for other in self._queue if other != id]
        return self._queue[0] if self._queue and self._queue[:1] != first else None

    def lose(self, root: int) -> PassId | None:
        """A worker is gone, and with it the passes that began there; the one whose turn it becomes."""
        first = self._queue[:1]
        self._queue = [other for other in self._queue if other.root != root]
        return self._queue[0] if self._queue and self._queue[:1] != first else None


class TurnTaking:
    """One worker's share in it: as the root of passes, and as one that is asked."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._turns = Turns()
        self._lock = threading.Lock()

    # -- as the root of a pass ----------------------------------------------------------------

    def wait(self, run: Run, ledger: Ledger, workers: set[int]) -> set[int]:
        """Of workers that want to go on, those that need not wait for the pass's turn; `granted` tells the others."""
        if len(ledger.reducing) < 2:
            return workers
        with run.lock:
            if run.its_turn:
                return workers
            run.waiting_for_turn |= workers & ledger.reducing
            ask = bool(run.waiting_for_turn) and run.leader is None
            if ask:
                run.leader = min(ledger.reducing)
        if ask and run.leader is not None:
            self._transport.tell(run.leader, messages.Turn(run.head.id, False))
        return workers - ledger.reducing

    def granted(self, run: Run) -> set[int]:
        """It is a pass's turn; who has waited for that."""
        with run.lock:
            run.its_turn = True
            waiting, run.waiting_for_turn = run.waiting_for_turn, set()
        return waiting

    def end(self, run: Run) -> None:
        """A pass that began here needs no turn any more."""
        with run.lock:
            leader, run.leader = run.leader, None
        if leader is not None:
            self._transport.tell(leader, messages.Turn(run.head.id, True))

    # -- as the one that is asked -------------------------------------------------------------

    def on_turn(self, message: messages.Turn) -> None:
        """A pass asks for its turn, or is over."""
        with self._lock:
            self._grant(self._turns.end(message.id) if message.over else self._turns.ask(message.id))

    def on_lost(self, worker: int) -> None:
        """A worker is gone."""
        with self._lock:
            self._grant(self._turns.lose(worker))

    def _grant(self, turn: PassId | None) -> None:
        while turn is not None and not self._transport.is_there(turn.root):
            turn = self._turns.end(turn)
        if turn is not None:
            self._transport.tell(turn.root, messages.Granted(turn))
