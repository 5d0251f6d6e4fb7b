"""Tensors that travel through shared memory: between agents of this process, and between processes that are killed."""

from __future__ import annotations

import gc
import os
import random
import signal
import time

import pytest
import torch
from helpers.processes import workers
from helpers.waiting import wait_until

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.channel.shared_memory import mapping
from nbdist.rpc import shared_tensors
from nbdist.rpc.api import current_agent
from nbdist.testing import Faults, World

pytestmark = pytest.mark.skipif(not mapping.is_available(), reason="this system has no memfd")

ALL = rpc.RpcBackendOptions(arena_threshold=1)
NONE = rpc.RpcBackendOptions(arena_bytes=0)
M = 1 << 20


def arena(agent, what):
    return agent.statistics()[f"arena_{what}"]


def nothing_out(*agents):
    """No block is out, none is held; a collection, because the user's tensors may be in circles."""
    gc.collect()
    return all(not arena(agent, "bytes_used") and not arena(agent, "blocks_held") for agent in agents)


@pytest.fixture(params=["inprocess", "local", "zeromq"])
def pair(request):
    with World(2, channel=request.param, options=ALL) as world, world[0].activate():
        yield world
        workers.kept.clear()
        wait_until(lambda: nothing_out(*world))
        assert not any(arena(agent, "falls_back") for agent in world)


def kinds():
    base = torch.arange(24.0)
    yield {"a": base, "views": [base[::2], base.view(4, 6).t()], "b": (torch.ones(()), torch.empty(0, 3))}
    yield [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3), requires_grad=False)]
    yield [torch.ones(5, dtype=dtype) for dtype in (torch.bfloat16, torch.int8, torch.bool, torch.complex64)]
    yield torch.nn.Linear(20, 30).state_dict()
    yield [torch.randn(300, 300).expand(2, 300, 300), torch.sparse_coo_tensor([[1, 2]], [3.0, 4.0], (5,))]


def is_same(a, b):
    if isinstance(a, torch.Tensor):
        dense = [x.to_dense() if x.layout is torch.sparse_coo else x for x in (a, b)]
        return type(a) is type(b) and a.requires_grad == b.requires_grad and torch.equal(*dense)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(is_same, a, b))


@pytest.mark.parametrize("options", [ALL, NONE], ids=["arena", "frames"])
def test_all_kinds_travel(options):
    with World(2, options=options) as world, world[0].activate():
        for value in kinds():
            assert is_same(rpc.rpc_sync("worker1", workers.identity, args=(value,)), value)
        rref = rpc.remote("worker1", torch.full, args=((500, 500), 3.0))
        assert rref.to_here().eq(3).all()
        got = rpc.rpc_sync("worker1", workers.identity, args=(next(kinds()),))
        got["a"].add_(1)
        assert got["views"][0].tolist() == got["a"][::2].tolist()
        if options is NONE:
            assert "arena_bytes" not in world[0].statistics()
        else:
            assert arena(world[0], "bytes") > 0
            del got
            wait_until(lambda: nothing_out(*world), within=5)


def test_what_is_received_is_the_receivers_own(pair):
    x = torch.ones(M)
    future = rpc.rpc_async("worker1", workers.keep, args=(x,))
    x.zero_()
    future.wait()
    (there,) = workers.kept
    assert there.eq(1).all()
    there.add_(1)
    assert x.eq(0).all()
    assert there.data_ptr() != x.data_ptr()
    back = rpc.rpc_sync("worker1", workers.identity, args=(x,))
    back.add_(5)
    assert there.eq(2).all()
    assert x.eq(0).all()


def test_a_tensor_for_several_is_several_tensors(pair):
    x = torch.ones(M)
    kept = [rpc.rpc_sync(name, workers.identity, args=(x,)) for name in ("worker0", "worker1")]
    wait_until(lambda: [arena(agent, "blocks_out") for agent in pair] == [1, 1])
    kept[0].add_(1)
    assert kept[1].eq(1).all()
    assert kept[0].eq(2).all()


def test_a_block_comes_back_when_the_last_view_dies(pair):
    there = pair[1]
    got = rpc.rpc_sync("worker1", torch.ones, args=(M,))
    assert arena(there, "blocks_out") == 1
    part = got[10:20]
    del got
    time.sleep(0.5)
    assert arena(there, "blocks_out") == 1
    kept = part.numpy()
    del part
    time.sleep(0.5)
    assert arena(there, "blocks_out") == 1
    assert kept.sum() == 10
    del kept
    wait_until(lambda: arena(there, "blocks_out") == 0)
    assert arena(there, "bytes") > 0  # it is warm


def test_a_block_that_autograd_has_saved(pair):
    got = rpc.rpc_sync("worker1", torch.full, args=((M,), 3.0)).requires_grad_()
    weight = torch.ones(M, requires_grad=True)
    loss = (got * weight).sum()
    del got
    time.sleep(0.5)
    assert arena(pair[1], "blocks_out") == 1
    loss.backward()
    assert weight.grad.eq(3).all()
    del loss
    wait_until(lambda: arena(pair[1], "blocks_out") == 0)


def test_ping_pong_needs_few_blocks(pair):
    x = torch.ones(4 * M)
    for _ in range(20):
        back = rpc.rpc_sync("worker1", workers.identity, args=(x,))
        wait_until(lambda: [arena(agent, "blocks_out") for agent in pair], equals=[0, 1])
    assert back.eq(1).all()
    assert [arena(agent, "bytes") for agent in pair] == [16 * M, 2 * 16 * M]


def test_calls_that_nobody_waits_for_give_back(pair):
    futures = [rpc.rpc_async("worker1", workers.identity, args=(torch.ones(100_000),)) for _ in range(20)]
    with pytest.raises(nbdist.RpcTimeout):
        rpc.rpc_sync("worker1", workers.slow_identity, args=(torch.ones(M), 0.5), timeout=0.1)
    with pytest.raises(nbdist.DecodeError):
        rpc.rpc_sync("worker1", workers.identity, args=((torch.ones(M), workers.Unreadable()),))
    with pytest.raises(ValueError, match="no"):
        rpc.rpc_sync("worker1", workers.fail_with, args=(torch.ones(M),))
    assert all(future.wait().eq(1).all() for future in futures)
    del futures


def test_a_received_tensor_cannot_be_made_larger(pair):
    """As torch's own shared memory cannot; a smaller or a new one is fine."""
    got = rpc.rpc_sync("worker1", torch.ones, args=(1000,))
    with pytest.raises(RuntimeError, match="not resizable"):
        got.resize_(2000)
    assert got.resize_(500).eq(1).all()
    assert torch.add(got, 1, out=got).eq(2).all()
    assert got.clone().resize_(2000).numel() == 2000
    got.share_memory_()
    assert got.eq(2).all()


def test_the_bound_is_kept_and_the_rest_goes_in_frames():
    options = rpc.RpcBackendOptions(arena_bytes=4 * M)
    with World(2, options=options) as world, world[0].activate():
        got = [rpc.rpc_sync("worker1", torch.full, args=((M // 4,), float(n))) for n in range(10)]
        assert [tensor.unique().tolist() for tensor in got] == [[n] for n in range(10)]
        assert arena(world[1], "bytes") == 4 * M
        assert arena(world[1], "falls_back") == 6
        assert rpc.rpc_sync("worker1", torch.ones, args=(2 * M,)).eq(1).all()
        del got
        wait_until(lambda: arena(world[1], "bytes_used") == 0)
        assert rpc.rpc_sync("worker1", torch.ones, args=(M // 2,)).eq(1).all()
        assert arena(world[1], "falls_back") == 7


def test_free_memory_is_let_go(monkeypatch):
    monkeypatch.setattr(shared_tensors, "_TRIM_EVERY_SECONDS", 0.1)
    with World(2, options=ALL) as world, world[0].activate():
        rpc.rpc_sync("worker1", workers.identity, args=([torch.ones(n) for n in (1, 100_000, 5 * M)],))
        wait_until(lambda: nothing_out(*world) and not any(arena(agent, "bytes") for agent in world))
        assert not any(arena(agent, "segments") for agent in world)


@pytest.mark.parametrize("channel", [pytest.param("inprocess", marks=pytest.mark.soak), "local"])
def test_on_a_channel_that_loses_doubles_and_reorders(channel):
    faults = Faults(drop={"*": 0.1}, duplicate={"*": 0.3}, reorder={"*": 0.3}, fail={"reply": 3}, seed=5)
    with World(3, channel=channel, faults=faults, options=ALL) as world, world[0].activate():
        held = []
        for round in range(12):
            futures = [
                (round * 10 + n, rpc.rpc_async(f"worker{n % 3}", workers.plus_one, args=(torch.full((9000,), v),)))
                for n in range(6)
                if (v := float(round * 10 + n)) >= 0
            ]
            held += [(value + 1, future.wait()) for value, future in futures]
            assert all(workers.is_all(tensor, value) for value, tensor in held)
            held = held[-9:]
        del held, futures
        wait_until(lambda: nothing_out(*world))
        assert sum(agent.statistics()["duplicates_dropped"] for agent in world) > 10


def test_gradients_of_large_activations(pair):
    x = torch.randn(300, 400, requires_grad=True)
    w = torch.randn(400, 300, requires_grad=True)
    ((x @ w).relu().sum() + (x * 2).sum()).backward()
    with dist_autograd.context() as context_id:
        h = rpc.rpc_sync("worker1", torch.matmul, args=(x, w))
        y = rpc.rpc_sync("worker1", torch.relu, args=(h,)).sum() + rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
        dist_autograd.backward(context_id, [y])
        gradients = dist_autograd.get_gradients(context_id)
        assert torch.allclose(gradients[x], x.grad, atol=1e-5)
        assert torch.allclose(gradients[w], w.grad, atol=1e-5)
        del gradients, h, y
    x.grad = w.grad = None


def test_who_leaves_but_lives_keeps_its_tensors():
    with World(3, options=ALL) as world, world[0].activate():
        rpc.rpc_sync("worker1", workers.keep, args=(torch.ones(M),))
        mine = rpc.rpc_sync("worker1", torch.full, args=((M,), 2.0))
        world.kill(1)
        for value in range(5):
            assert rpc.rpc_sync("worker2", torch.full, args=((M,), float(value))).eq(value).all()
            rpc.rpc_sync("worker2", workers.identity, args=(torch.zeros(M),))
        assert workers.kept[0].eq(1).all()
        assert mine.eq(2).all()
        workers.kept.clear()
        del mine
        wait_until(lambda: nothing_out(world[0], world[2]))


def test_one_that_has_no_shared_memory(monkeypatch):
    with World(2, options=ALL, dynamic=True) as world, world[0].activate():
        with monkeypatch.context() as patch:
            patch.delattr(os, "memfd_create")
            world.add()
        for name in ("worker1", "worker2"):
            assert rpc.rpc_sync(name, workers.identity, args=(torch.ones(M),)).eq(1).all()
        # It has none of its own, yet can read those of others.
        assert "arena_bytes" not in world[2].statistics()
        assert arena(world[0], "bytes") > 0
        with world[2].activate():
            assert rpc.rpc_sync("worker0", workers.identity, args=(torch.ones(M),)).eq(1).all()


def test_members_on_other_hosts_get_frames():
    with World(2, options=ALL, apart=True) as world, world[0].activate():
        assert rpc.rpc_sync("worker1", workers.identity, args=(torch.ones(M),)).eq(1).all()
        assert arena(world[0], "bytes") == arena(world[1], "bytes") == 0


def test_nothing_is_left_of_a_world():
    files, maps = workers.open_files(), workers.mapped_segments()
    for _ in range(3):
        with World(3, options=ALL) as world, world[0].activate():
            kept = rpc.rpc_sync("worker1", workers.identity, args=(torch.ones(M),))
            rpc.rpc_sync("worker2", workers.identity, args=(torch.ones(M),))
        assert workers.mapped_segments() == maps + 1
        assert kept.eq(1).all()
        del kept
        gc.collect()
        assert workers.mapped_segments() == maps
    assert workers.open_files() <= files


def test_the_options(monkeypatch):
    monkeypatch.setenv("NBDIST_ARENA_BYTES", "1000")
    monkeypatch.setenv("NBDIST_ARENA_THRESHOLD", "7")
    options = rpc.RpcBackendOptions()
    assert (options.arena_bytes, options.arena_threshold) == (1000, 7)
    assert rpc.RpcBackendOptions(arena_bytes=0).arena_bytes == 0
    for wrong in ({"arena_bytes": -1}, {"arena_threshold": "many"}, {"arena_bytes": 1.5}):
        with pytest.raises(nbdist.UsageError, match="number of bytes"):
            rpc.RpcBackendOptions(**wrong)
    monkeypatch.setenv("NBDIST_ARENA_BYTES", "")
    assert rpc.RpcBackendOptions().arena_bytes is None


def test_a_device_map_that_is_refused_leaves_the_earlier_one():
    options = rpc.RpcBackendOptions()
    options.set_device_map("worker1", {"cuda:0": "cuda:1"})
    with pytest.raises(nbdist.UsageError, match="two devices here"):
        options.set_device_map("worker1", {"cuda:1": "cuda:1"})
    assert options.device_maps == {"worker1": {torch.device("cuda:0"): torch.device("cuda:1")}}


def test_processes():
    with workers.world(2):
        assert workers.trade(["worker1"], 100, 1) == 100
        assert rpc.rpc_sync("worker1", workers.trade, args=(["worker0"], 100, 2)) == 100
        assert workers.check_held() + rpc.rpc_sync("worker1", workers.check_held) > 0
        here, there = current_agent().statistics(), rpc.rpc_sync("worker1", workers.statistics)
        assert here["arena_blocks_held"] == there["arena_blocks_out"] > 0
        workers.drop_held()
        rpc.rpc_sync("worker1", workers.drop_held)
        wait_until(lambda: nothing_out(current_agent()))
        wait_until(lambda: rpc.rpc_sync("worker1", workers.statistics)["arena_bytes_used"] == 0)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.soak)])
def test_a_sender_and_receiver_is_killed_at_any_moment(kills):
    """What the others hold stays what it was; all blocks come home; no file and no mapping is left."""
    moments = random.Random(kills)
    lost = 0
    files, maps = workers.open_files(), workers.mapped_segments()
    with nbdist.Cluster(3, backend="none") as cluster:
        everybody = [*cluster.names, "notebook"]
        for kill in range(kills):
            victim = moments.choice(cluster.names)
            pid = next(worker.pid for worker in cluster.workers if worker.name == victim)
            others = {name: [other for other in everybody if other != name] for name in everybody}
            trades = [
                rpc.rpc_async(name, workers.trade, args=(others[name], 10_000, kill * 10 + n))
                for n, name in enumerate(everybody)
            ]
            time.sleep(0.1 + moments.random() * 0.3)
            os.kill(pid, signal.SIGKILL)
            for trade in trades:
                with pytest.raises(nbdist.WorkerLost, match=victim):
                    trade.wait()
                lost += 1
            survivors = [name for name in everybody if name != victim]
            for name in survivors:
                rpc.rpc_sync(name, workers.check_held)
            for name in survivors:  # and with the memory that has come home since
                rpc.rpc_sync(name, workers.trade, args=([o for o in survivors if o != name], 5, kill))
                rpc.rpc_sync(name, workers.check_held)
            for name in survivors:
                rpc.rpc_sync(name, workers.drop_held)
            for name in survivors:
                wait_until(lambda name=name: rpc.rpc_sync(name, workers.nothing_out), within=60)
            assert cluster.restart(victim) == [victim]
    gc.collect()
    assert lost == 4 * kills
    assert workers.mapped_segments() == maps
    assert workers.open_files() <= files + 2


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_minutes_of_everything():
    """Four agents, calls and tensors of all sizes: memory, segments and files are flat."""
    seconds = float(os.environ.get("NBDIST_SOAK_SECONDS", "600"))
    sizes = (1, 1000, 40_000, 50_000, 300_000, 1_000_000)
    with nbdist.Cluster(3, backend="none") as cluster:
        everybody = [*cluster.names, "notebook"]
        seen = []
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            trades = [
                rpc.rpc_async(name, workers.trade, args=([o for o in everybody if o != name], 60, seed, sizes))
                for name in everybody
                for seed in (number, number + 1)
            ]
            for trade in trades:
                trade.wait()
            number += 2
            seen.append([rpc.rpc_sync(name, workers.footprint) for name in everybody])
    early, late = seen[len(seen) // 5 : len(seen) // 2], seen[-(len(seen) // 4) :]
    for index, name in enumerate(everybody):
        for what in ("resident", "segments", "files"):
            before = max(round[index][what] for round in early)
            after = max(round[index][what] for round in late)
            print(f"{name} {what}: {before} early, {after} late, of {len(seen)} rounds")
            assert after <= before * 1.15 + 3
