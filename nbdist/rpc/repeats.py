"""Sends calls once more, with definitions in them that the callee turned out to lack.

A call that names functions or classes of our ``__main__`` goes out without their definitions where the callee may have
them. If it has not, it runs nothing and says so, and `nbdist.rpc.outcomes` calls `Pending.again`, which sends it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from nbdist.channel.contract import Buffer
from nbdist.errors import NbdistError
from nbdist.rpc.calls import Pending, PendingCalls
from nbdist.rpc.forker import MessageForker
from nbdist.rpc.links import Links
from nbdist.rpc.outcomes import Outcomes
from nbdist.wire.messages import Call
from nbdist.wire.tensors import Slot

__all__ = ["Draft", "Repeats"]


class Draft(NamedTuple):
    """A call that is encoded, and can be sent."""

    message: Call
    frames: list[Buffer]
    forker: MessageForker
    slots: Sequence[Slot] = ()


class Repeats:
    """The calls of one agent that may have to be sent once more."""

    def __init__(self, pending: PendingCalls, links: Links, outcomes: Outcomes) -> None:
        self._pending = pending
        self._links = links
        self._outcomes = outcomes

    def prepare(self, call: Pending, encode: Callable[[], Draft]) -> None:
        """Be ready to send a call once more, which ``encode()`` encodes with its definitions.

        What is sent is the value at the call. So where the callee is not known to have the definitions, the call is
        encoded right away, before the caller can change an argument; it costs that once for each definition and callee.
        """
        peer = self._links.peer(call.to)
        if peer is not None and all(digest in peer.definitions for _, digest in call.definitions):
            if call.is_waited_for:  # the caller cannot touch its arguments meanwhile
                call.again = partial(self.send, call, encode)
            return
        names_only = call.definitions
        try:
            spare = encode()
        except NbdistError as error:
            call.again = partial(self._give_up, call, error)  # of no matter unless it is needed
        else:
            call.again = partial(self.send, call, lambda: spare)
            call.unsent = spare.forker.take_back
        call.definitions = names_only

    def send(self, call: Pending, encode: Callable[[], Draft]) -> None:
        """Send a call once more, and have its answer awaited again; where that cannot be done, the call fails."""
        call.again = call.unsent = None
        try:
            self._pending.add(call)
            message, frames, forker, slots = encode()
            call.seq = self._links.post(call.to, message, frames, forker, slots)
        except BaseException as error:
            if self._pending.pop(call.id) is not None:
                self._outcomes.unrepeated(call, error)
            return
        self._links.note_call(call)

    def _give_up(self, call: Pending, error: NbdistError) -> None:
        call.again = None
        self._outcomes.unrepeated(call, error)
