"""torch's fault-injecting backend in terms of nbdist's.

torch names its messages by their type, nbdist by their kind; `MessageNames` translates while a message is
sent. It looks into the envelope, because torch distinguishes what calls one of its operators from what calls
somebody's Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nbdist.channel.contract import Buffer
from nbdist.channel.faulty import Faults
from nbdist.ids import GlobalId
from nbdist.wire.messages import Call, decode_envelope

__all__ = ["MessageNames", "faults"]

_CALLS = {
    "call": "CALL",
    "method": "CALL",
    "remote": "REMOTE_CALL",
    "method_remote": "REMOTE_CALL",
    "fetch": "RREF_FETCH_CALL",
}
_OTHERS = {
    "reply": "RET",
    "fork_request": "RREF_FORK_REQUEST",
    "fork_confirm": "RREF_ACK",
    "child_accept": "RREF_CHILD_ACCEPT",
    "user_delete": "RREF_USER_DELETE",
    "autograd.release": "CLEANUP_AUTOGRAD_CONTEXT_REQ",
}


class MessageNames:
    """torch's name for each message that one agent sends; what torch has no name for keeps ours."""

    def __init__(self) -> None:
        self._operators_results: set[GlobalId] = set()

    def __call__(self, kind: str, frames: Sequence[Buffer]) -> str:
        what = _CALLS.get(kind)
        if what is None:
            return _OTHERS.get(kind, kind)
        message = decode_envelope(bytes(frames[0])).message
        return f"{'SCRIPT' if isinstance(message, Call) and self._is_script(message) else 'PYTHON'}_{what}"

    def _is_script(self, call: Call) -> bool:
        """Whether an operator of torch is called, or the result of one is fetched."""
        if call.builtin and call.result is not None:
            self._operators_results.add(call.result.rref)
        return call.builtin or call.target in self._operators_results


def faults(fail: Iterable[str], times: int, delay: Mapping[str, float]) -> Faults:
    """The first ``times`` messages of each type in ``fail`` are not sent to a receiver; others come late."""
    return Faults(fail=dict.fromkeys(fail, times), delay=dict(delay), match=MessageNames())
