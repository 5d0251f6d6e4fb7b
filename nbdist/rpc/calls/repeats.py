"""Sends a call again, with the definitions that the callee lacked the first time.

A call that refers to functions or classes of our ``__main__`` is sent without their definitions, unless the callee has
said before that it lacks one. If the callee lacks one now, it does not run the call, and says so.
`nbdist.rpc.calls.outcomes` then calls `Pending.again`, which sends the call with the definitions in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from nbdist.errors import NbdistError
from nbdist.rpc.calls.outcomes import Outcomes
from nbdist.rpc.core.pending import Pending, PendingCalls
from nbdist.rpc.links import Links
from nbdist.rpc.references.forker import MessageForker
from nbdist.wire.codec import Encoded
from nbdist.wire.messages import Call

# The function and arguments of a call, ready to be sent, and the forks in them.
Draft = tuple[Encoded, MessageForker]


class Repeats:
    """Sends calls again with definitions of this ``__main__`` that the callees lack: functions and classes."""

    def __init__(self, pending: PendingCalls, links: Links, outcomes: Outcomes) -> None:
        self._pending = pending
        self._links = links
        self._outcomes = outcomes

    def prepare(self, call: Pending, message: Call, encode: Callable[[], Draft]) -> None:
        """Make ``call.again`` send ``message`` once more, with the definitions in it; ``encode()`` encodes them."""
        peer = self._links.peer(call.to)
        if peer is not None and all(digest in peer.definitions for _, digest in call.definitions):
            # Whoever waits cannot change an argument before the repeat is encoded. Any other such call fails if the
            # callee has lost a definition (test_a_call_that_nobody_waits_for_says_when_the_definition_is_gone).
            if call.is_waited_for:
                call.again = partial(self.send, call, message, encode)
            return
        names_only = call.definitions
        try:
            # Now, because the repeat must send the values that the arguments had at the time of the call
            # (test_what_is_repeated_is_the_value_at_the_call). It costs time once per definition and callee.
            spare = encode()
        except NbdistError as error:
            call.again = partial(self._give_up, call, error)  # raised only if the repeat is needed
        else:
            call.again = partial(self.send, call, message, lambda: spare)
            call.unsent = spare[1].take_back
        call.definitions = names_only

    def send(self, call: Pending, message: Call, encode: Callable[[], Draft]) -> None:
        """Send ``message``, which the callee refused, with definitions in it; on an error, end the call with it."""
        call.again = call.unsent = None
        try:
            self._pending.add(call)
            encoded, forker = encode()
            message = replace(message, payload=encoded.payload)
            call.seq = self._links.post(call.to, message, encoded.frames, forker, encoded.slots)
        except BaseException as error:  # a user's class, while it is pickled: it must end the call
            if self._pending.pop(call.id) is not None:
                self._outcomes.unrepeated(call, error)
            return
        self._links.note_call(call)

    def _give_up(self, call: Pending, error: NbdistError) -> None:
        call.again = None
        self._outcomes.unrepeated(call, error)
