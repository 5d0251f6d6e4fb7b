"""Which way the members of one host take to each other, and that every way, and a mixture of them, does the same."""

import tempfile
from pathlib import Path

import pytest
import torch
from helpers.processes import workers

import nbdist
from nbdist import rpc
from nbdist.channel.local_link import LocalLink
from nbdist.channel.zeromq_links import LargeZeroMqLink, ZeroMqLink
from nbdist.errors import WorkerLost
from nbdist.rpc import api
from nbdist.rpc.links import Connection
from nbdist.testing import World


def links():
    agent = api.current_agent()
    return {connection.record.name: type(connection.link) for connection in agent.links.connections.values()}


def call_back_and_forth():
    assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
    assert rpc.rpc_sync("worker1", workers.call_there, args=("worker0", workers.name)) == "worker0"
    assert rpc.remote("worker1", torch.ones, args=(1 << 20,)).to_here().sum() == 1 << 20
    futures = [rpc.rpc_async("worker1", workers.identity, args=(number,)) for number in range(2000)]
    assert torch.futures.wait_all(futures) == list(range(2000))
    bodies = [rpc.rpc_async("worker1", workers.identity, args=(torch.full((1 << 20,), n),)) for n in range(8)]
    assert [body.wait().unique().tolist() for body in bodies] == [[n] for n in range(8)]


@pytest.mark.parametrize(
    ("channel", "link", "large"), [("auto", LocalLink, LocalLink), ("zeromq", ZeroMqLink, LargeZeroMqLink)]
)
def test_a_world_of_one_kind(channel, link, large, monkeypatch):
    monkeypatch.delenv("NBDIST_CHANNEL", raising=False)
    with workers.world(2, options={"channel": channel, "arena_bytes": 0}):
        assert set(links().values()) == {link}
        call_back_and_forth()
        connections = api.current_agent().links.connections.values()
        (connection,) = [each for each in connections if each.record.name == "worker1"]
        assert type(connection.large_link) is large
        assert connection.large_link is not connection.link
        assert not any(peer.resent for peer in connection.peers)


def test_an_agent_that_is_lost_meanwhile_gets_no_link_for_large_messages():
    with World(2, options=rpc.RpcBackendOptions(arena_bytes=0)) as world, world[0].activate():
        links, lost = [], []

        class LostWhileSending(Connection):
            """A connection whose agent is lost when a sender, which holds no lock then, looks for the link."""

            @property
            def large_link(self):
                if not lost:
                    lost.append(world[1].me.name)
                    world.kill(1)
                return links[-1] if links else None

            @large_link.setter
            def large_link(self, link):
                links.append(link)

        world[0].links.connections[world[1].me.incarnation].__class__ = LostWhileSending
        with pytest.raises(WorkerLost, match="worker1 died"):
            rpc.rpc_sync("worker1", workers.identity, args=(torch.ones(1 << 20),))
        assert lost
        assert not links


def test_a_large_tensor_that_came_alone_is_where_it_came(monkeypatch):
    """At an aligned address, writable, and apart from all others; also as a view of a part that others share."""
    with workers.world(2, options={"channel": "zeromq"}):
        whole = torch.arange(1 << 20, dtype=torch.float64)
        for value in (whole, whole.view(1024, 1024).t(), (whole, whole[:10]), torch.nn.Parameter(whole.clone())):
            came = rpc.rpc_sync("worker1", workers.identity, args=(value,))
            first, sent = (came[0], value[0]) if isinstance(value, tuple) else (came, value)
            assert torch.equal(first, sent)
            assert first.stride() == sent.stride()
            assert first.untyped_storage().data_ptr() % 64 == 0
            with torch.no_grad():
                first += 1
            if isinstance(value, tuple):
                assert torch.equal(came[1], whole[:10] + 1)  # they share their storage, as they did
        few = rpc.rpc_sync("worker1", workers.identity, args=([torch.full((30_000,), n) for n in range(20)],))
        assert [each.unique().tolist() for each in few] == [[n] for n in range(20)]  # in one frame, and copied out


def test_the_environment_says_it_too(monkeypatch):
    monkeypatch.setenv("NBDIST_CHANNEL", "zeromq")
    assert rpc.RpcBackendOptions().channel == "zeromq"
    assert rpc.RpcBackendOptions(channel="auto").channel == "auto"
    with pytest.raises(nbdist.UsageError, match="carrier pigeon"):
        rpc.RpcBackendOptions(channel="carrier pigeon")


def test_a_mixed_world():
    """One member that has no unix sockets: it is reached by ZeroMQ, and reaches the other by ZeroMQ."""
    store = tempfile.mktemp(prefix="nbdist-test-")
    others = workers.Workers()
    try:
        others.start("worker1", workers.member("worker1", 1, 2, store, "channel='zeromq'"))
        options = rpc.RpcBackendOptions(init_method=f"file://{store}", channel="auto")
        rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
        assert links() == {"worker0": LocalLink, "worker1": ZeroMqLink}
        call_back_and_forth()
        rpc.shutdown()
        _, errors = others.output("worker1")
        assert others.processes["worker1"].returncode == 0, errors
    finally:
        if workers.is_running():
            rpc.shutdown(graceful=False)
        others.end()
        Path(f"{store}.rpc").unlink(missing_ok=True)
