"""torch's names for nbdist's messages."""

import pickle

from conformance.private_names.message_names import MessageNames, faults

from nbdist.ids import GlobalId
from nbdist.wire.messages import (
    Call,
    ChildAccept,
    Envelope,
    Fork,
    ForkRequest,
    Mode,
    Payload,
    Reply,
    UserDelete,
    encode_envelope,
)

A, B, C = (GlobalId(0, number, 1) for number in range(3))


def name(names, message, function="os:getcwd"):
    body = pickle.dumps((function, (), {}))
    return names(message.kind, [encode_envelope(Envelope(1, 2, 1, 1, 0, [], message)), body])


def call(mode, *, result=None, target=None):
    return Call(1, mode, "f", Payload(), Fork(result, B, 2, 1) if result else None, target)


def test_calls_of_operators_and_of_python_are_told_apart():
    names = MessageNames()
    assert name(names, call(Mode.CALL)) == "PYTHON_CALL"
    assert name(names, call(Mode.CALL), "torch:add") == "SCRIPT_CALL"
    assert name(names, call(Mode.METHOD, target=A)) == "PYTHON_CALL"
    assert name(names, call(Mode.METHOD_REMOTE, result=B, target=A)) == "PYTHON_REMOTE_CALL"


def test_so_is_the_fetching_of_their_results():
    names = MessageNames()
    assert name(names, call(Mode.REMOTE, result=A), "torch:add") == "SCRIPT_REMOTE_CALL"
    assert name(names, call(Mode.REMOTE, result=C)) == "PYTHON_REMOTE_CALL"
    assert name(names, call(Mode.FETCH, target=A)) == "SCRIPT_RREF_FETCH_CALL"
    assert name(names, call(Mode.FETCH, target=C)) == "PYTHON_RREF_FETCH_CALL"


def test_messages_about_references():
    names = MessageNames()
    assert name(names, ForkRequest(A, B)) == "RREF_FORK_REQUEST"
    assert name(names, ChildAccept(B)) == "RREF_CHILD_ACCEPT"
    assert name(names, UserDelete(A, B)) == "RREF_USER_DELETE"


def test_what_torch_has_no_name_for_keeps_ours():
    assert MessageNames()("ping", [b""]) == "ping"
    assert name(MessageNames(), Reply(1, True, Payload())) == "RET"


def test_the_rules():
    rules = faults(["RREF_USER_DELETE"], 3, {"SCRIPT_CALL": 1.5})
    assert rules.fail == {"RREF_USER_DELETE": 3}
    assert rules.delay == {"SCRIPT_CALL": 1.5}
