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
        self.reports = 0
        self.busy = False
        self.again = False
        # On the root only:
        self.ledger: Ledger | None = None
        self.outcome: Future[None] | Latch | None = None
        self.error: BaseException | None = None
        self.leader: int | None = None
        """Who was asked for the pass's turn to reduce."""
        self.its_turn = False
        self.waiting_for_turn: set[int] = set()
