"""A call that has arrived at its callee, and the stage in which it is."""

from __future__ import annotations

import time
from enum import Enum

from nbdist.ids import GlobalId
from nbdist.wire.messages import Call


class ArrivalStage(Enum):
    """Names what an arrived call waits for. `nbdist.rpc.core.exchange` draws the order of the stages."""

    CONFIRMING = "the owners of the references in its arguments, who have to count them"
    SEEKING = "the call that makes the value which it works on"
    AWAITING = "the value which it works on"
    READY = "nothing"


class Arrival:
    """A call that has arrived and is not answered. Only `nbdist.rpc.core.exchange.Exchange` changes its stage."""

    number = -1
    """The number that the exchange gave the call when it arrived; -1 before."""
    stage = ArrivalStage.READY
    unconfirmed: frozenset[GlobalId] = frozenset()
    """The forks that the call brought and that their owners have not confirmed."""
    holds_target = False
    """True while the call keeps the value that it works on alive, by a count in `Forks`."""
    makes_result = True
    """True while the call keeps the value that it is to make alive. False for a refused call."""
    is_heard = True
    """False if the caller was lost while the call waited. The call then ends without running."""

    def __init__(self, call: Call, sender: int) -> None:
        self.call = call
        self.sender = sender
        """The caller's incarnation."""
        self.since = time.monotonic()
        """The moment when the call arrived, as of `time.monotonic`."""

    def run(self) -> None:
        """Run the function and answer. A job of the pool calls this when the call need not wait any more."""
        raise NotImplementedError

    def end_unheard(self) -> None:
        """Fail the call, whose caller is lost, without running it. A job of the pool calls this in place of `run`."""
        raise NotImplementedError
