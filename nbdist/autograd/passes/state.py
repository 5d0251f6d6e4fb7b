"""The run of a pass: all that one worker keeps of one backward pass.

The way of the token of a mark or gradient message through the lists of a `Run`::

    on the receiver                                            on the sender
    Mark -------------------------------------> settled        sent
    Gradients --> arrived --> taken by a thread --> settled
                    ^              |
                    +-- waits for -+---------> marked          the next report empties settled, marked and sent
                        the end of the marking
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from nbdist.autograd import messages
from nbdist.autograd.messages import Head, Token

if TYPE_CHECKING:
    from nbdist.autograd.contexts import Context
    from nbdist.autograd.passes.ledger import Ledger
    from nbdist.autograd.passes.worker_part import Part
    from nbdist.autograd.watching.observer import Observer
    from nbdist.rpc.futures import Future, Latch

__all__ = ["Outgoing", "Run"]

Outgoing = tuple[messages.Gradients, list[torch.Tensor | None]]


class Run:
    """One pass on one worker. `Passes` holds `lock` while it changes the lists of tokens and counts threads."""

    def __init__(self, head: Head, context: Context) -> None:
        self.head = head
        self.context = context
        self.part: Part
        self.observer: Observer | None = None
        self.lock = threading.Lock()
        self.ended = False
        """True once the pass is over or given up on this worker: it sends no more messages of it."""
        self.told: set[int] = set()
        """The workers to which this one has sent messages of the pass."""
        self.settled: list[Token] = []
        """Tokens for the next report: all that follows from them has been done here."""
        self.marked: list[Token] = []
        """Tokens for the next report: they only wait for the end of the marking."""
        self.outbox: Outgoing | None = None
        """Gradients for the root that wait for the next report, to travel in one message."""
        self.sent: list[tuple[Token, int]] = []
        """Tokens for the next report: they were sent from here, each with its receiver."""
        self.arrived: list[Token] = []
        """Tokens of gradients that no thread has taken up."""
        self.taken: list[Token] = []
        """Tokens of gradients that a thread has taken up, until the last thread stops."""
        self.reports = 0
        """The number of reports sent."""
        self.threads = 0
        """The number of threads that run the pass now."""
        self.most_threads = 1
        self.entries = 0
        """The number of times that a thread has begun to run the pass."""
        self.again = False
        """True if something has arrived for which no thread was added: one of those that run looks once more."""
        # On the root only:
        self.ledger: Ledger | None = None
        self.outcome: Future[None] | Latch | None = None
        self.error: BaseException | None = None
        self.leader: int | None = None
        """The worker that was asked for the pass's turn to reduce."""
        self.its_turn = False
        self.waiting_for_turn: set[int] = set()
        """The workers that must not go on before the pass has its turn."""
