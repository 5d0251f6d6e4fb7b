"""Finds torch's type of each message of nbdist: torch's suites say by these types which messages fail or arrive late.

torch has a type for each message, nbdist has a kind. `MessageNames` finds torch's type when a message is sent. It must
decode the message, because torch has different types for calls of its own operators (``SCRIPT_…``) and of
Python functions (``PYTHON_…``).
"""

import pickle

from nbdist.channel.faulty import Faults
from nbdist.wire.messages import Mode, decode_envelope
from nbdist.wire.pickling import names

CALLS = {
    "call": "CALL",
    "method": "CALL",
    "remote": "REMOTE_CALL",
    "method_remote": "REMOTE_CALL",
    "fetch": "RREF_FETCH_CALL",
}
"""The second part of torch's type, by the kind of call. The first part is SCRIPT or PYTHON."""
OTHERS = {
    "reply": "RET",
    "fork_request": "RREF_FORK_REQUEST",
    "fork_confirm": "RREF_ACK",
    "child_accept": "RREF_CHILD_ACCEPT",
    "user_delete": "RREF_USER_DELETE",
    "autograd.release": "CLEANUP_AUTOGRAD_CONTEXT_REQ",
}
"""torch's type, by the kind of any other message."""


class MessageNames:
    """Finds torch's type of each message that one agent sends. Used as `Faults.match`."""

    def __init__(self):
        self.operators_results = set()  # the ids of the references to results of torch's operators

    def __call__(self, kind, frames):
        """Return torch's type of a message, such as "PYTHON_CALL"; its ``kind`` if torch has no such message.

        ``frames`` are the message's frames; the first one is the envelope.
        """
        what = CALLS.get(kind)
        if what is None:
            return OTHERS.get(kind, kind)
        call = decode_envelope(bytes(frames[0])).message
        return f"{'SCRIPT' if self.is_script(call, frames[1:]) else 'PYTHON'}_{what}"

    def is_script(self, call, frames):
        """Return whether a message calls an operator of torch, or fetches the result of one."""
        if call.mode not in (Mode.CALL, Mode.REMOTE):
            return call.target in self.operators_results
        # The body of a call by name begins with the name, unless its arguments need `Unpickler`.
        function = (
            pickle.loads(frames[0])[0]
            if call.payload.plain and (call.payload.form or not call.payload.tensors)
            else None
        )
        is_operator = isinstance(function, str) and names.is_builtin(names.resolve(function))
        if is_operator and call.result is not None:
            self.operators_results.add(call.result.rref)
        return is_operator


def faults(fail, times, delay):
    """Return the faults that a suite has asked for.

    The first ``times`` messages of each type in ``fail`` to each receiver are not sent: sending one raises
    ChannelError. ``delay`` has the seconds by which messages arrive late, by type. The types are torch's, such as
    "PYTHON_CALL".
    """
    return Faults(fail=dict.fromkeys(fail, times), delay=dict(delay), match=MessageNames())
