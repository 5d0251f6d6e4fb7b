"""A call that has come to its callee, and how far it is."""

from __future__ import annotations

import time
from enum import Enum

from nbdist.ids import GlobalId
from nbdist.wire.messages import Call

__all__ = ["Arrival", "Stage"]


class Stage(Enum):
    """What a call that has come waits for."""

    CONFIRMING = "the owners of the references in its arguments, who have to count them"
    SEEKING = "the call that makes the value which it works on"
    AWAITING = "the value which it works on"
    READY = "nothing"


class Arrival:
    """One call that has come and is not answered. Only `nbdist.rpc.exchange.Exchange` changes how far it is."""

    number = -1
    """Its number here, given when it came."""
    stage = Stage.READY
    unconfirmed: frozenset[GlobalId] = frozenset()
    """The forks that it brought and that their owners have not confirmed."""
    holds_target = False
    """Whether it holds a handle on the value that it works on, which keeps that value alive."""
    makes_result = True
    """Whether it holds a handle on the value that it is to make. A call that was refused holds none."""
    is_heard = True
    """False once its caller was lost while it waited: it then ends without having begun."""

    def __init__(self, call: Call, sender: int) -> None:
        self.call = call
        self.sender = sender
        """The caller's incarnation."""
        self.since = time.monotonic()
        """When it came."""

    def run(self) -> None:
        """Run the function and answer."""
        raise NotImplementedError

    def end_unheard(self) -> None:
        """Fail the call, whose caller is lost."""
        raise NotImplementedError
