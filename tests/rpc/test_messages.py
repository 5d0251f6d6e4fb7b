"""The messages of errors that a program of RPC can meet, and that no other test provokes."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import torch
from helpers.processes import workers
from helpers.waiting import wait_until

from nbdist import durations, rpc
from nbdist.errors import (
    Interrupted,
    NotUnique,
    RendezvousError,
    RpcTimeout,
    RRefError,
    UnknownWorker,
    UsageError,
    VersionMismatch,
    WorkerLost,
)
from nbdist.ids import GlobalId
from nbdist.rpc import api, hosted
from nbdist.rpc.calls.stopping import Stopping
from nbdist.rpc.latch import Latch
from nbdist.rpc.world import meeting, tcp_store
from nbdist.rpc.world.handshake import Handshake
from nbdist.rpc.world.meeting_file import MeetingFile
from nbdist.testing import World
from nbdist.wire.messages import Cast, Payload, Refused, Stop


@pytest.fixture(scope="module")
def two():
    with World(2) as world:
        yield world


@pytest.fixture
def caller(two):
    """The agent of worker0, for which the functions of `nbdist.rpc` act."""
    with two[0].activate() as agent:
        yield agent


@contextlib.contextmanager
def held_call(world, monkeypatch):
    """A call from worker0 to worker1, which runs until the block ends."""
    gate = threading.Event()
    monkeypatch.setattr(workers, "released", gate)
    future = rpc.rpc_async("worker1", workers.hold)
    wait_until(lambda: bool(world[1].exchange.active))
    try:
        yield future
    finally:
        gate.set()
    wait_until(lambda: not world[1].exchange.active)


def test_a_message_that_cannot_be_read_is_dropped_and_its_sender_named(caplog):
    with World(2) as world:
        me, there = world[0], world[1].me.incarnation
        me.post(there, Cast("autograd.mark", b"\xc1", Payload()))
        wait_until(lambda: "worker1 dropped a message (autograd.mark) of worker0: not a message of" in caplog.text)
        me.links.connections[there].link.send([b"\xc1"], "call")
        told = "worker1 dropped a damaged message, or one of another version (use one): MessagePack data is malformed"
        wait_until(lambda: told in caplog.text)
        with me.activate():
            assert rpc.rpc_sync("worker1", len, args=("abc",)) == 3


def options(**given):
    return lambda: rpc.RpcBackendOptions(**given)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (options(num_worker_threads=0), UsageError, "num_worker_threads must be a whole number of at least 1, not 0"),
        (options(retries=-1), UsageError, "retries must be a whole number of at least 0, not -1"),
        (options(rpc_timeout=-5), UsageError, "rpc_timeout must be 0 (no limit) or more seconds, not -5"),
        (options(max_message=10), UsageError, "max_message must be 65536 to 9223372036854775807 bytes, not 10"),
        (
            options(max_message=2**63),
            UsageError,
            "max_message must be 65536 to 9223372036854775807 bytes, not 9223372036854775808",
        ),
        (
            options(suspect_after=20, lost_after=12),
            UsageError,
            "suspect_after, 20.0 s, must be more than 0 and at most lost_after, 12.0 s",
        ),
        (
            options(switch_interval=-1),
            UsageError,
            "switch_interval must be 0 (leave Python's own) or more seconds, not -1.0",
        ),
        (options(colour="red"), TypeError, "RpcBackendOptions has no option colour"),
        (options(lost_after="soon"), TypeError, "lost_after must be a number of seconds, not 'soon'"),
        (options(lost_after=float("nan")), UsageError, "lost_after must be a number of seconds, not nan"),
        (lambda: durations.positive(0), UsageError, "timeout must be more than 0 s, not 0"),
        (lambda: durations.patience(-1), UsageError, "timeout must be 0 s or more, not -1"),
        (
            lambda: rpc.WorkerInfo("x" * 200, 0),
            UsageError,
            "a worker name must be shorter than 128 characters, not 200",
        ),
        (
            lambda: rpc.WorkerInfo("my worker", 0),
            UsageError,
            "Worker name must match [A-Za-z0-9-_:]*, but 'my worker' does not",
        ),
        (lambda: rpc.init_rpc(5), TypeError, "name must be a str, not int"),
        (
            lambda: rpc.init_rpc("a", rank=0, rpc_backend_options={}),
            TypeError,
            "Argument rpc_backend_options must be an instance of RpcBackendOptions",
        ),
        (
            lambda: rpc.init_rpc("a", rank=3, world_size=2, rpc_backend_options=at("tcp://127.0.0.1:29500")),
            UsageError,
            "rank must be from 0 to world_size - 1 (1), not 3",
        ),
        (
            lambda: rpc.init_rpc("a", rank=0, world_size=1 << 63, rpc_backend_options=at("tcp://127.0.0.1:29500")),
            UsageError,
            "world_size must not be larger than 9223372036854775807",
        ),
        (
            lambda: meeting.parse("tcp://", 0, 2),
            ValueError,
            "Error initializing torch.distributed using tcp:// rendezvous: ",
        ),
    ],
)
def test_what_init_rpc_refuses(make, error, text):
    with pytest.raises(error) as raised:
        make()
    assert str(raised.value).startswith(text)


def at(init_method):
    return rpc.RpcBackendOptions(init_method=init_method)


def test_a_file_that_is_no_list_of_members(tmp_path):
    path = tmp_path / "world.rpc"
    path.touch()
    os.truncate(path, 1 << 30)
    with pytest.raises(RendezvousError, match=r"has 1073741824 bytes, too many for a list of members"):
        MeetingFile(str(path.with_suffix("")))


def test_what_the_agent_of_a_cluster_cannot_take_on(caller):
    for given, text in [
        (("other", -1, None, None), r"this is worker0 of a cluster.*it cannot take the name 'other'"),
        (("worker0", 1, None, None), r"with rank 0; it cannot get rank 1: leave the rank out"),
        (("worker0", 0, 9, None), r"this cluster's RPC has 2 members.*a world_size of 9 would be waited for in vain"),
        (("worker0", 0, 2, rpc.RpcBackendOptions(retries=3)), r"it cannot take on retries now"),
    ]:
        with pytest.raises(UsageError, match=text):
            hosted.take_on(caller, *given)


def test_calls_that_cannot_be_made(caller):
    with pytest.raises(UsageError, match=r"kwargs must be a dict, not list"):
        rpc.rpc_sync("worker1", max, args=(1, 2), kwargs=[])
    with pytest.raises(UnknownWorker, match=r"this world has never had an incarnation 7"):
        caller.membership.info_of(7)
    with pytest.raises(NotUnique, match=r"RPC worker name is not unique: 'worker1' \(id 1\) cannot have it"):
        caller.membership.add(msgspec.structs.replace(caller.membership.names["worker1"], incarnation=12345))


def test_a_world_of_which_a_member_is_lost_or_refuses():
    with pytest.raises(WorkerLost, match=r"worker1 died while the RPC world formed"):
        join_with(lambda handshake, other: handshake.on_lost(other, "died"))
    refused = Refused(5, "too old", version=1)
    with pytest.raises(VersionMismatch, match=r"worker1 uses version 1 of nbdist's protocol, this agent \d+: install"):
        join_with(lambda handshake, other: handshake.on_refused(refused))


def join_with(event):
    """Have worker0 join a world of two, where something happens as soon as it connects to worker1."""
    me, other = (SimpleNamespace(incarnation=number, name=name) for number, name in ((4, "worker0"), (5, "worker1")))
    members = SimpleNamespace(me=me, add=lambda record: None, name_of=lambda _: "worker1")
    links = SimpleNamespace(connect=lambda record: event(handshake, record), connected=lambda _: other)
    handshake = Handshake(members, links, None, lose=None, ended=None, joined=None, lost_after=12.0)
    handshake.join_fixed([me, other], time.monotonic() + 10)


def test_a_store_that_cannot_be_served():
    with pytest.raises(RendezvousError, match=r"rank 0 cannot serve the store at no-such-host.invalid:29500: "):
        tcp_store.open_store("no-such-host.invalid", 29500, 10.0, serve=True)


def test_an_end_that_takes_too_long(monkeypatch):
    too_long = pytest.raises(RendezvousError, match=r"shutdown of worker0 timed out, with calls that it made still")
    with World(2, dynamic=True) as world, world[0].activate(), held_call(world, monkeypatch), too_long:
        rpc.shutdown(timeout=0.01)


def test_a_nested_call_whose_caller_was_interrupted():
    ended, stopped = [], []
    nested = [SimpleNamespace(id=id, to=8, thread=threading.get_ident(), result=id or None) for id in (1, 0)]
    stopping = Stopping(
        SimpleNamespace(incarnation=7),
        SimpleNamespace(calls=SimpleNamespace(all=lambda: nested), lock=threading.Lock()),
        SimpleNamespace(post=lambda to, message: stopped.append(message)),
        call=None,
        give_up=lambda calls, error: ended.append(error),
        submit=lambda job: job(),
        is_blocked=lambda thread: True,
    )
    stopping.begin((9, 5))
    stopping.on_stop(Stop(5), 9, [])
    assert stopped == [Stop(1), Stop(0)]
    assert [type(error) for error in ended] == [Interrupted, KeyboardInterrupt]
    with pytest.raises(Interrupted, match=r"stopped: its caller was interrupted"):
        raise ended[0]


def test_a_value_that_does_not_exist_any_more(caller):
    with pytest.raises(RRefError, match=r"the value of this RRef is gone: a worker that passed it on was lost"):
        caller.references.target(GlobalId(1, 1, 1)).wait()


def test_a_call_that_ctrl_c_ends(tmp_path, monkeypatch):
    watches = []
    monkeypatch.setattr(api, "InterruptWatch", SimpleNamespace(start=watches.append))
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=at(f"file://{tmp_path}/world"))
    try:
        future = rpc.rpc_async("worker0", workers.sleep, args=(0.5,))
        (give_up,) = watches
        give_up()  # as the watch does while the main thread sleeps in a wait of torch's own
        with pytest.raises(Interrupted, match=r"interrupted \(Ctrl-C\) while waiting for this call"):
            future.wait()
    finally:
        rpc.shutdown()


def test_futures_that_are_not_done():
    future = rpc.Future()
    with pytest.raises(RuntimeError, match=r"value\(\) was called on a future that is not done: call wait\(\) instead"):
        future.value()
    with pytest.raises(RuntimeError, match=r"exception\(\) was called on a future that is not done: call wait"):
        future.exception()
    with pytest.raises(TypeError, match=r"'no' is of type <class 'str'>, not an Exception"):
        future.set_exception("no")
    with pytest.raises(RpcTimeout, match=r"1 of 2 futures are not done after 0.01 s"):
        rpc.wait_all([future, done(3)], timeout=0.01)
    with pytest.raises(RpcTimeout, match=r"waited 0.01 s for an answer"):
        Latch().wait(None, 0.01)
    future.set_result(1)
    with pytest.raises(RuntimeError, match=r"Future can only be marked completed once"):
        future.set_result(2)


def done(value):
    future = rpc.Future()
    future.set_result(value)
    return future


def test_references_used_in_a_wrong_way(two, caller):
    rref = rpc.remote("worker1", torch.ones, args=(2,))
    rref.to_here()
    with pytest.raises(RRefError, match=r"can't call localValue\(\) on user WorkerInfo\(id=0, name=worker0\)"):
        rref.local_value()
    with pytest.raises(UsageError, match=r"User RRefs require 'dist_autograd_ctx_id' to be specified"):
        rref.backward()
    with pytest.raises(UsageError, match=r"RRef should contain a tensor for .backward\(\)"):
        rpc.RRef([1]).backward()
    with two[1].activate(), pytest.raises(RRefError, match=r"cannot be sent: it belongs to another agent"):
        rpc.rpc_sync("worker0", id, args=(rref,))
    number = rpc.remote("worker1", int, args=(3,))
    number.to_here()
    with pytest.raises(AttributeError, match=r"type object 'int' has no attribute 'no_such_method'"):
        number.remote().no_such_method()
    rref.release()
    with pytest.raises(RRefError, match=r"cannot be used: release\(\) was called on it"):
        rref.to_here()
    with pytest.raises(RRefError, match=r"cannot be copied: release\(\) was called on it, so there is nothing to copy"):
        copy.copy(rref)


def test_references_after_the_end():
    with World(2) as world, world[0].activate():
        theirs, mine = rpc.remote("worker1", torch.ones, args=(2,)), rpc.RRef(3)
        theirs.to_here()
        world[0].references.release_all()
        with pytest.raises(RRefError, match=r"cannot be used: shutdown\(\) has released all references"):
            theirs.to_here()
        world[0].close("ended")
        with pytest.raises(RRefError, match=r"cannot be used: RPC has been shut down on this worker"):
            theirs.to_here()
        with pytest.raises(RRefError, match=r"the value of .* is gone: RPC has been shut down on this worker"):
            mine.local_value()


def test_the_owner_is_gone():
    with World(2) as world, world[0].activate():
        rref = rpc.remote("worker1", torch.ones, args=(2,))
        rref.to_here()
        world.kill(1)
        with pytest.raises(WorkerLost, match=r"the value of this RRef is lost: its owner worker1 died"):
            rref.to_here()
