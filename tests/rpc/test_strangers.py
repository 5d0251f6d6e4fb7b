"""Who has not the secret gets in nowhere, and members do not notice (G6)."""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from helpers.processes import workers
from helpers.waiting import wait_until

import nbdist
from nbdist import rpc
from nbdist.channel.secret import Secret
from nbdist.ids import new_incarnation
from nbdist.rpc import api
from nbdist.rpc.world.roster import Roster
from nbdist.wire import codec
from nbdist.wire.messages import VERSION, Call, Envelope, Hello, Record, encode_envelope

SECRET = "a secret of the tests, long enough"


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[workers.Workers]:
    """Two members that take each other to be on different hosts: TCP, CURVE, and judged by silence."""
    store = tempfile.mktemp(prefix="nbdist-test-")
    others = workers.Workers()
    options = {"secret": SECRET, "host": "127.0.0.1", "suspect_after": 1.0, "lost_after": 2.5}
    elsewhere = "import nbdist.rpc.start as w; w.host_identity = lambda: 'elsewhere'"
    described = ", ".join(f"{key}={value!r}" for key, value in options.items())
    others.start("worker1", workers.member("worker1", 1, 2, store, described, first=elsewhere))
    here = rpc.RpcBackendOptions(init_method=f"file://{store}", **options)
    rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=here)
    try:
        yield others
    finally:
        if workers.is_running():
            rpc.shutdown(graceful=False)
        others.end()
        Path(f"{store}.rpc").unlink(missing_ok=True)


def tcp_address() -> str:
    return next(address for address in api.current_agent().me.addresses if address.startswith("tcp://"))


def exploit() -> list[bytes]:
    """A call that a member would run: it would create a file."""
    me = api.current_agent().me
    payload, frames, *_ = codec.encode(("os:mkdir", (MARK,), {}))
    envelope = Envelope(new_incarnation(), me.incarnation, 1, 1, 0, [], Call(1, 0, "mkdir", payload))
    return [encode_envelope(envelope), *(bytes(frame) for frame in frames)]


def knock(sock: zmq.Socket) -> None:
    frames = exploit()
    joined = struct.pack(f"<B{len(frames)}I", len(frames), *map(len, frames)) + b"".join(frames)
    for parts in (frames, [joined]):
        with contextlib.suppress(zmq.Again):  # turned away already
            sock.send_multipart(parts, zmq.NOBLOCK)


MARK = tempfile.mktemp(prefix="nbdist-broken-into-")


def test_calls_work_over_tcp(over_tcp):
    assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
    assert rpc.remote("worker1", torch.ones, args=(1 << 20,)).to_here().sum() == 1 << 20


def test_a_thousand_strangers(over_tcp):
    address = tcp_address()
    port = int(address.rpartition(":")[2])
    context = zmq.Context()
    context.max_sockets = 4000
    agent = api.current_agent()
    served_before = agent.exchange.served
    for n in range(250):
        # No security at all.
        plain = context.socket(zmq.PUSH)
        plain.linger = 0
        plain.connect(address)
        knock(plain)
        # The right door, a key that was not admitted (a stranger does not know the door's key; suppose he did).
        public, private = zmq.curve_keypair()
        wrong = context.socket(zmq.PUSH)
        wrong.linger = 0
        wrong.curve_publickey, wrong.curve_secretkey = public, private
        wrong.curve_serverkey = Secret(SECRET.encode(), shared_off_host=True).curve("door").public
        wrong.connect(address)
        knock(wrong)
        # A member of another cluster.
        other = Secret(b"the secret of somebody else", shared_off_host=True)
        foreign = context.socket(zmq.PUSH)
        foreign.linger = 0
        foreign.curve_publickey, foreign.curve_secretkey = other.curve("member")
        foreign.curve_serverkey = other.curve("door").public
        foreign.connect(address)
        knock(foreign)
        # Garbage, straight into TCP.
        with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
            raw.sendall(secrets.token_bytes(200) if n % 2 else b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00NULL")
        if n % 50 == 49:
            assert rpc.rpc_sync("worker1", workers.identity, args=(n,)) == n
        for sock in (plain, wrong, foreign):
            if n % 10:
                sock.close(0)
    assert rpc.rpc_sync("worker1", workers.call_there, args=("worker0", workers.name)) == "worker0"
    assert not os.path.exists(MARK)
    wait_until(lambda: agent.exchange.served, equals=served_before + 1)  # worker1's
    context.destroy(0)


def test_a_replay_of_a_members_messages(over_tcp):
    """Even with the keys: the same frames again do not run again, and those of a past incarnation not at all."""
    agent = api.current_agent()
    record = agent.membership.others()[0]
    link = agent.channel.connect(record.addresses)
    payload, frames, *_ = codec.encode(("workers:count", ("replayed",), {}))
    number = agent.links.peer(record.incarnation).next_seq
    envelope = Envelope(
        agent.me.incarnation, record.incarnation, number, number, 0, [], Call(10**6, 0, "count", payload)
    )
    agent.links.peer(record.incarnation).next_seq += 1
    for _ in range(5):
        link.send([encode_envelope(envelope), *frames], "call")
    past = msgspec.structs.replace(envelope, sender=new_incarnation(), seq=1)
    to_past = msgspec.structs.replace(envelope, receiver=new_incarnation(), seq=number + 1)
    for forged in (past, to_past):
        link.send([encode_envelope(forged), *frames], "call")
    wait_until(lambda: rpc.rpc_sync("worker1", workers.statistics)["duplicates_dropped"] >= 4)
    # At most one of the five has run (none, if an own message has meanwhile told that nothing is missing).
    assert rpc.rpc_sync("worker1", workers.count, args=("replayed",)) <= 2


def test_garbage_from_a_member(over_tcp):
    """A member that has gone mad cannot harm the others' agents."""
    agent = api.current_agent()
    record = agent.membership.others()[0]
    link = agent.channel.connect(record.addresses)
    good = encode_envelope(Envelope(agent.me.incarnation, record.incarnation, 0, 1, 0, [], Hello(agent.me)))
    for frames in (
        [b""],
        [b"\xc1"],
        [good[:-3]],
        [good + b"x"],
        [secrets.token_bytes(40)] * 5,
        [good[:10], good],
        [b"{}"],
    ):
        link.send(frames, "garbage")
    payload, frames, *_ = codec.encode(("workers:identity", (torch.ones(10),), {}))
    broken = msgspec.structs.replace(payload, buffers=[(0, 10**9, 40)])
    seq = agent.links.peer(record.incarnation).next_seq
    agent.links.peer(record.incarnation).next_seq += 1
    envelope = Envelope(agent.me.incarnation, record.incarnation, seq, seq, 0, [], Call(10**6, 0, "identity", broken))
    link.send([encode_envelope(envelope), *frames], "call")
    wait_until(lambda: rpc.rpc_sync("worker1", workers.statistics)["messages_refused"] >= 6)
    assert rpc.rpc_sync("worker1", workers.name) == "worker1"


def test_another_version_is_named(over_tcp, monkeypatch):
    record = msgspec.structs.replace(api.current_agent().me, version=99, incarnation=new_incarnation(), name="future")
    refused = []
    agent = api.current_agent()
    monkeypatch.setattr(agent.links, "refuse", lambda record, answer: refused.append(answer.reason))
    link = agent.channel.connect(agent.me.addresses)
    link.send([encode_envelope(Envelope(record.incarnation, 0, 0, 1, 0, [], Hello(record)))], "hello")
    wait_until(lambda: refused)
    assert f"version {VERSION} of nbdist's protocol, not 99" in refused[0]


def test_silence_of_a_remote_one(over_tcp, caplog):
    import signal

    assert rpc.rpc_sync("worker1", workers.name) == "worker1"
    workers.stop(over_tcp.processes["worker1"].pid)
    call = rpc.rpc_async("worker1", workers.name)
    wait_until(lambda: api.current_agent().statistics()["suspects"] == 1)
    # Calls to a suspect wait.
    with pytest.raises(nbdist.WorkerLost, match=r"worker1 has been silent for [2-9]\.\d\d s"):
        call.wait(20)
    assert "calls to it wait" in caplog.text
    over_tcp.processes["worker1"].send_signal(signal.SIGCONT)


def test_a_suspect_that_comes_back(over_tcp):
    import signal

    process = over_tcp.processes["worker1"]
    assert rpc.rpc_sync("worker1", workers.count, args=("back",)) == 1
    workers.stop(process.pid)
    call = rpc.rpc_async("worker1", workers.count, args=("back",))
    wait_until(lambda: api.current_agent().statistics()["suspects"] == 1)
    process.send_signal(signal.SIGCONT)
    assert call.wait(20) == 2
    wait_until(lambda: api.current_agent().statistics()["suspects"] == 0)


def test_records_in_a_store_are_signed():
    class Forged:
        """A store in which a stranger has written a member."""

        def __init__(self) -> None:
            stranger = Secret(b"the stranger's own secret", shared_off_host=True)
            record = Record("worker1", 1, new_incarnation(), ["tcp://10.9.9.9:1"], "x", 1, 0, 2)
            sealed = stranger.sign(msgspec.msgpack.encode((1, msgspec.msgpack.encode(record))))
            document = {"gathering": [sealed], "formed": [], "dynamic": []}
            self.value = base64.b64encode(msgspec.msgpack.encode(document))

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            return self.value

    roster = Roster(Forged, Secret(SECRET.encode(), shared_off_host=True), "here")
    me = Record("worker0", 0, new_incarnation(), [], "here", os.getpid(), 0, 2)
    with pytest.raises(nbdist.SecurityError, match="not signed with this cluster's secret"):
        roster.form(me, 0.0)


def test_off_host_without_a_secret_is_refused(monkeypatch):
    monkeypatch.delenv("NBDIST_SECRET_FILE", raising=False)
    options = rpc.RpcBackendOptions(init_method="tcp://192.0.2.1:2000", rpc_timeout=1)
    with pytest.raises(nbdist.SecurityError, match="NBDIST_SECRET_FILE"):
        rpc.init_rpc("worker1", rank=1, world_size=2, rpc_backend_options=options)
    options = rpc.RpcBackendOptions(init_method="file:///tmp/x", host="192.0.2.7")
    with pytest.raises(nbdist.SecurityError, match="need a secret"):
        rpc.init_rpc("worker1", rank=1, world_size=2, rpc_backend_options=options)
    options = rpc.RpcBackendOptions(init_method="tcp://192.0.2.1:2000", secret=SECRET)
    with pytest.raises(nbdist.SecurityError, match="NBDIST_HOST"):
        rpc.init_rpc("worker1", rank=1, world_size=2, rpc_backend_options=options)
    with pytest.raises(nbdist.SecurityError, match="at least 16"):
        rpc.init_rpc(
            "a",
            rank=0,
            world_size=1,
            rpc_backend_options=rpc.RpcBackendOptions(init_method="file:///tmp/x", secret="short"),
        )
    assert not workers.is_running()


def test_an_oversized_message_ends_nothing():
    with workers.world(2, options={"max_message": 1 << 20}) as _:
        agent = api.current_agent()
        record = agent.membership.others()[0]
        raw = zmq.Context.instance().socket(zmq.PUSH)
        raw.linger = 0
        raw.connect(next(address for address in record.addresses if address.startswith("ipc://")))
        raw.send(bytes(4 << 20))
        assert rpc.rpc_sync("worker1", workers.name) == "worker1"
        raw.close(0)
