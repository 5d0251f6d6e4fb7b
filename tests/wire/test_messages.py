"""What goes over the wire: every message there and back, and garbage."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.ids import GlobalId
from nbdist.wire import messages as m

ID, OTHER = GlobalId(1, 2, 3), GlobalId(4, 5, 6)
STATE = m.State("torch", "Tensor", [2, 3], "float32", "cpu", True, "AddBackward0", 24, ["shape"], "why")
FORK = m.Fork(ID, OTHER, 7, 8, STATE)
TENSOR = m.TensorMeta(0, 1, [2], None, 0, 1, "cuda:0")
PLACE = m.Place(3, 17, 1 << 24, 65536, 8)
PAYLOAD = m.Payload([(0, 0, 8)], [TENSOR], [FORK], False, [("f", "digest")], [0, -1], [PLACE], 2, [(1, 2, 0)])
LYING = m.Payload([(-1, 0, 8)], [TENSOR], places=[PLACE])
RECORDING = m.Recording(1, 2, 3, True, True, True)
RECORD = m.Record(
    *("worker0", 0, 9, ["ipc://x"], "host", 10, 11, None, m.VERSION + 1, {"a": {"cuda:0": "cuda:1"}}, 12, "cuda:0"),
    *(["cuda:0"], 1, ["uuid"]),
)

EVERY = [
    m.Nothing(),
    m.Hello(RECORD, True),
    m.Welcome(RECORD, True),
    m.Ready(),
    m.Refused(5, "why", m.VERSION + 1),
    m.Goodbye("why", True),
    m.Ping(1, True),
    m.Pong(1, "f", True),
    m.Call(1, m.Mode.CALL, "f", PAYLOAD),
    m.Call(1, m.Mode.METHOD_REMOTE, "f", PAYLOAD, FORK, ID, "a cell", RECORDING),
    m.Reply(1, True, PAYLOAD, STATE, [("f", "digest")], RECORDING),
    m.ForkRequest(ID, OTHER),
    m.ForkConfirm(ID, OTHER, STATE, True),
    m.ChildAccept(ID),
    m.UserDelete(ID, OTHER),
    m.RRefState(ID, STATE),
    m.AskShutdown(1, ("worker1", "to call shutdown"), 7),
    m.ShutdownState(1, 2, 3, 4),
    m.Silence(1 << 61, 5.0, 6),
    m.Cast("topic", b"data", PAYLOAD),
    m.Cast("another topic", b"data", LYING),
    m.Stop(1),
    m.GiveBack([(1, 65536)]),
]
"""Every message. Each of its fields has a value that is not its default, here or in another one of the same class."""


def enveloped(message):
    return m.Envelope(1, 2, 3, 4, 5, [7, 9], message, [(1, 0), (2, 65536)], [m.UserDelete(ID, OTHER)], True)


def sealed(message):
    return m.encode_envelope(enveloped(message))


def structs(value):
    """Every message, or part of a message, that a value is or holds."""
    if isinstance(value, msgspec.Struct):
        yield value
        value = [getattr(value, name) for name in value.__struct_fields__]
    if isinstance(value, list):
        for each in value:
            yield from structs(each)


def left_at_default(found):
    """The fields, as "Class.field", that have their default in all the messages and parts of messages ``found``."""
    at_default, other = set(), set()
    for struct in found:
        for field in msgspec.structs.fields(struct):
            factory = field.default_factory
            default = field.default if factory is msgspec.NODEFAULT else factory()
            fields = at_default if getattr(struct, field.name) == default else other
            fields.add(f"{type(struct).__name__}.{field.name}")
    return sorted(at_default - other)


def test_every_message_is_tried():
    assert {type(message) for message in EVERY} == set(m.AnyMessage.__args__)


def test_every_field_is_tried():
    found = list(structs([enveloped(message) for message in EVERY]))
    every = {each for each in vars(m).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)}
    assert {type(each) for each in found} == every - {m.Message, m.Numbered, m.Carrier}
    left = ", ".join(left_at_default(found))
    assert not left, f"in EVERY, or in a part that it uses, give these fields another value than their default: {left}"


def test_a_field_that_is_not_tried_is_found():
    assert left_at_default([m.Hello(RECORD)]) == ["Hello.reads"]
    assert left_at_default([m.Hello(RECORD), m.Hello(RECORD, True)]) == []


@pytest.mark.parametrize("message", EVERY, ids=lambda message: message.kind)
def test_a_message_comes_out_as_it_went_in(message):
    envelope = m.decode_envelope(sealed(message))
    assert envelope == enveloped(message)
    assert type(envelope.message) is type(message)


def test_kinds_are_words_of_their_own():
    kinds = [message.kind for message in EVERY]
    assert len(set(kinds)) == len(kinds)
    calls = [m.Call(1, mode, "f", m.Payload()).kind for mode in m.Mode]
    assert calls == ["call", "remote", "fetch", "method", "method_remote"]


def test_an_empty_call_is_small():
    big = 1 << 62
    call = m.Call(1000, m.Mode.CALL, "module:function", m.Payload())
    assert len(m.encode_envelope(m.Envelope(big, big, 1000, 1000, 1000, [], call))) < 80


# --- garbage --------------------------------------------------------------------------------------


def envelope_or_none(frame):
    try:
        envelope = m.decode_envelope(frame)
    except m.NOT_A_MESSAGE:
        return None
    assert isinstance(envelope, m.Envelope)
    return envelope


@settings(max_examples=500)
@given(st.binary(max_size=300))
def test_garbage_is_not_a_message(frame):
    envelope_or_none(frame)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(-9, 9), inner),
    max_leaves=30,
)


@settings(max_examples=500)
@given(st.tuples(*[st.integers(-1, 1 << 63)] * 5, st.lists(st.integers(), max_size=3), st.lists(JSON, max_size=9)))
def test_well_formed_garbage_is_not_a_message(fields):
    try:
        frame = msgspec.msgpack.encode(fields)
    except OverflowError:
        return
    envelope_or_none(frame)


@settings(max_examples=500)
@given(st.sampled_from(EVERY), st.data())
def test_a_damaged_message_is_not_a_message_or_another_message(message, data):
    frame = bytearray(sealed(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    envelope_or_none(bytes(frame))


@pytest.mark.parametrize("message", EVERY, ids=lambda message: message.kind)
def test_a_message_cut_short_is_not_a_message(message):
    whole = sealed(message)
    for length in range(len(whole)):
        with pytest.raises(m.NOT_A_MESSAGE):
            m.decode_envelope(whole[:length])
    with pytest.raises(m.NOT_A_MESSAGE):
        m.decode_envelope(whole + b"\0")


@pytest.mark.parametrize("depth", [10, 10_000, 1_000_000])
def test_deep_nesting_is_not_a_message(depth):
    with pytest.raises(m.NOT_A_MESSAGE):
        m.decode_envelope(b"\x91" * depth)


def test_an_unknown_message_is_not_a_message():
    with pytest.raises(m.NOT_A_MESSAGE):
        m.decode_envelope(msgspec.msgpack.encode([1, 2, 3, 4, 5, [], [99]]))
