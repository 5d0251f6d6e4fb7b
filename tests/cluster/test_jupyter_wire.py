"""Our reading and writing of Jupyter's messages agrees with jupyter_client's own; the thread that does it ends."""

import datetime
import warnings

import pytest
from jupyter_client.session import Session

from nbdist.cluster.jupyter.jupyter_wire import decode, encode, new_header, pack, unpack
from nbdist.cluster.jupyter.kernel_connection import KernelThread
from nbdist.errors import ProtocolError

KEY = b"a key of this test"

CONTENTS = [
    {},
    {"code": "print('ä€😀')", "silent": False, "n": 1, "x": 1.5, "none": None, "list": [1, {"a": []}]},
    {"data": {"text/plain": "x" * 100_000}},
]


def theirs():
    return Session(key=KEY, signature_scheme="hmac-sha256")


@pytest.mark.parametrize("content", CONTENTS)
def test_what_we_write_the_library_reads(content):
    header = new_header("execute_request", "session")
    frames = encode(KEY, header, pack(content), metadata=pack({"m": 1}), buffers=[b"\0\1"])
    _, parts = theirs().feed_identities([b"identity", *frames])
    message = theirs().deserialize(parts)
    assert message["content"] == content
    assert message["metadata"] == {"m": 1}
    assert message["msg_id"] == header["msg_id"]
    assert message["msg_type"] == "execute_request"
    assert message["header"]["session"] == "session"
    assert isinstance(message["header"]["date"], datetime.datetime)
    assert [bytes(buffer) for buffer in message["buffers"]] == [b"\0\1"]


@pytest.mark.parametrize("content", CONTENTS)
def test_what_the_library_writes_we_read(content):
    session = theirs()
    parent = session.msg("execute_request", {})
    sent = session.msg("stream", content, parent=parent, metadata={"m": 1})
    frames = [bytes(frame) for frame in session.serialize(sent, ident=b"stream.stdout")]
    message = decode(KEY, [*frames, b"\0\1"])
    assert message["content"] == content
    assert message["metadata"] == {"m": 1}
    assert message["msg_type"] == "stream"
    assert message["msg_id"] == sent["header"]["msg_id"]
    assert message["parent_header"]["msg_id"] == parent["header"]["msg_id"]
    assert message["buffers"] == [b"\0\1"]


def test_an_answer_names_the_message_that_it_answers():
    session = theirs()
    request = decode(KEY, session.serialize(session.msg("input_request", {"prompt": "?"})))
    frames = encode(KEY, new_header("input_reply", "s"), pack({"value": "x"}), parent=request["header"])
    _, parts = session.feed_identities(frames)
    assert session.deserialize(parts)["parent_header"]["msg_id"] == request["msg_id"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda frames: [],
        lambda frames: frames[1:],
        lambda frames: frames[:3],
        lambda frames: [frames[0], b"0" * 64, *frames[2:]],
        lambda frames: [*frames[:5], frames[5] + b" "],
        lambda frames: [*frames[:2], b"{", *frames[3:]],
    ],
)
def test_what_is_not_signed_with_the_key_is_refused(spoil):
    frames = encode(KEY, new_header("stream", "s"), pack({"a": 1}))
    assert decode(KEY, frames)["content"] == {"a": 1}
    with pytest.raises(ProtocolError):
        decode(KEY, spoil(frames))
    with pytest.raises(ProtocolError):
        decode(b"another", frames)


@pytest.mark.parametrize(
    "value", [float("nan"), {"inf": float("inf")}, {"date": datetime.datetime(2026, 1, 2)}, ("a", 1)]
)
def test_what_json_does_not_know_is_packed_all_the_same(value):
    assert isinstance(unpack(pack(value)), object)


def test_nan_as_python_writes_it_is_read():
    assert str(unpack(b'{"x": NaN}')["x"]) == "nan"


def test_the_thread_of_the_kernels_begins_nothing_while_it_ends():
    async def work():
        pass

    thread = KernelThread()
    thread.close()
    begun = work()
    with pytest.raises(RuntimeError, match="the cluster is shutting down: start another one"):
        thread.run(begun)
    assert begun.cr_frame is None  # closed, so that Python does not warn of it


def test_the_thread_of_the_kernels_is_closed_twice_without_a_warning():
    thread = KernelThread()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        thread.close()
        thread.close()
    assert not told
