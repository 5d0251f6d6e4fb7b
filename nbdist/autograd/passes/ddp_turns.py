"""Lets only one pass at a time average gradients over workers in DistributedDataParallel (DDP) modules.

The workers of a DDP module have to begin their collectives in the same order. But the messages of two passes may reach
them in different orders; then averages would be made of gradients of different passes. So a SMART pass in which several
workers reduce needs its *turn*. The one of these workers with the lowest incarnation, the leader, gives it to one pass
after another::

    worker that reduces              root of the pass                 leader
      |---- Report (waits, reduces) ---->|
      |                                  |  the marking is over
      |                                  |---- Turn ------------------->|  Turns.ask: queue the pass
      |                                  |                              |  it is first in the queue
      |<--- Marked ----------------------|<--- Granted -----------------|
      | reduces                          |
                                         |  the pass is over
                                         |---- Turn(over) ------------->|  Turns.end: the next pass has its turn

`Turns` is pure: passes go in, the pass whose turn it is comes out. `TurnTaking` sends the messages.
"""

from __future__ import annotations

import threading

from nbdist.autograd.graph import messages
from nbdist.autograd.graph.messages import PassId
from nbdist.autograd.graph.transport import Transport
from nbdist.autograd.passes.context import Run
from nbdist.autograd.passes.ledger import Ledger


class Turns:
    """The queue of passes that want to average gradients of DDP modules. The first one has its *turn*: it may."""

    def __init__(self) -> None:
        self._queue: list[PassId] = []

    def ask(self, id: PassId) -> PassId | None:
        """Queue a pass; return it if it has its turn at once, which it keeps until `end` or `lose`; else None."""
        self._queue.append(id)
        return id if len(self._queue) == 1 else None

    def end(self, id: PassId) -> PassId | None:
        """Remove a pass that needs no turn any more; return the pass that gets the turn instead, if one does."""
        first = self._queue[:1]
        self._queue = [other for other in self._queue if other != id]
        return self._queue[0] if self._queue and self._queue[:1] != first else None

    def lose(self, root: int) -> PassId | None:
        """Remove the passes that began on the lost worker ``root``; return the pass that gets the turn instead."""
        first = self._queue[:1]
        self._queue = [other for other in self._queue if other.root != root]
        return self._queue[0] if self._queue and self._queue[:1] != first else None


class TurnTaking:
    """Gives passes their turn to average gradients of DDP modules, one at a time; one object on each worker."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._turns = Turns()
        self._lock = threading.Lock()

    # -- as the root of a pass ----------------------------------------------------------------

    def wait(self, run: Run, ledger: Ledger, workers: set[int]) -> set[int]:
        """On the root: return the workers among ``workers`` that may continue now, because marking is over."""
        if len(ledger.reducing) < 2:
            return workers
        # Several workers average gradients of DDP modules: these must wait for the pass's turn, for which the first
        # call asks the leader. `granted` later returns them.
        with run.lock:
            if run.its_turn:
                return workers
            run.waiting_for_turn |= workers & ledger.reducing  # a later report may bring more of them
            ask = bool(run.waiting_for_turn) and run.leader is None
            if ask:
                run.leader = min(ledger.reducing)
        if ask and run.leader is not None:
            self._transport.tell(run.leader, messages.Turn(run.head.id, False))
        return workers - ledger.reducing

    def granted(self, run: Run) -> set[int]:
        """On the root: note that a pass has its turn; return the workers that have waited for it."""
        with run.lock:
            run.its_turn = True
            waiting, run.waiting_for_turn = run.waiting_for_turn, set()
        return waiting

    def end(self, run: Run) -> None:
        """On the root: tell the leader, if it was asked, that a pass no longer has or wants its turn."""
        with run.lock:
            leader, run.leader = run.leader, None  # the leader is told once, though `Passes` may end a run twice
        if leader is not None:
            self._transport.tell(leader, messages.Turn(run.head.id, True))

    # -- as the leader ------------------------------------------------------------------------

    def on_turn(self, message: messages.Turn) -> None:
        """On the leader: queue a pass that asks for its turn, or end the turn of one that is over."""
        with self._lock:
            self._grant(self._turns.end(message.id) if message.over else self._turns.ask(message.id))

    def on_lost(self, worker: int) -> None:
        """On the leader: drop the passes that began on a lost worker, and give their turn to the next pass."""
        with self._lock:
            self._grant(self._turns.lose(worker))

    def _grant(self, turn: PassId | None) -> None:
        while turn is not None and not self._transport.is_there(turn.root):  # its end would never be told
            turn = self._turns.end(turn)
        if turn is not None:
            self._transport.tell(turn.root, messages.Granted(turn))
