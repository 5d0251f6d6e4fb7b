"""One backward pass, on one worker: what is under way, and what its root has still to be told."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from nbdist.autograd import messages
from nbdist.autograd.messages import Head, Token

if TYPE_CHECKING:
    from nbdist.autograd.contexts import Context
    from nbdist.autograd.ledger import Ledger
    from nbdist.autograd.observer import Observer
    from nbdist.autograd.part import Part
    from nbdist.rpc.futures import Future, Latch

__all__ = ["Outgoing", "Run"]

Outgoing = tuple[messages.Gradients, list[torch.Tensor | None]]


class Run:
    """One pass, on one worker."""

    def __init__(self, head: Head, context: Context) -> None:
        self.head = head
        self.context = context
        self.part: Part
        self.observer: Observer | None = None
        self.lock = threading.Lock()
        self.ended = False
        self.told: set[int] = set()
        """Whom this worker has sent something of the pass."""
        self.settled: list[Token] = []
        self.marked: list[Token] = []
        self.outbox: Outgoing | None = None
        """A message to the root, which waits for the report that can go with it."""
        self.sent: list[tuple[Token, int]] = []
        self.arrived: list[Token] = []
        self.taken: list[Token] = []
        """Of what has arrived, that which some thread has looked at."""
        self.reports = 0
        self.threads = 0
        """So many run it now,"""
        self.most_threads = 1
        self.entries = 0
        """and so many times one has begun to."""
        self.again = False
        """Whether something has come that was left to them."""
        # On the root only:
        self.ledger: Ledger | None = None
        self.outcome: Future[None] | Latch | None = None
        self.error: BaseException | None = None
        self.leader: int | None = None
        """Who was asked for the pass's turn to reduce."""
        self.its_turn = False
        self.waiting_for_turn: set[int] = set()
