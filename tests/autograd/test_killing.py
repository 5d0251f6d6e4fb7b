"""Workers are killed with SIGKILL at random instants of passes: none hangs, and the error names who died."""

import os
import random
import signal
import threading

import pytest
import torch
from helpers.models.autograd_functions import contexts_here, relay
from helpers.waiting import wait_until

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc


def expect_no_context(name):
    wait_until(lambda: rpc.rpc_sync(name, contexts_here), f"the end of all contexts on {name}", equals=0)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=pytest.mark.soak)])
def test_no_pass_hangs_and_the_error_names_the_worker(kills):
    moments = random.Random(kills)
    outcomes: dict[str, int] = {"ended": 0, "lost": 0}
    said = []
    with nbdist.Cluster(3, backend="none") as cluster:
        x = torch.ones(4, requires_grad=True)
        expected = None
        for _ in range(kills):
            victim = moments.choice(cluster.names)
            pid = next(worker.pid for worker in cluster.workers if worker.name == victim)
            with dist_autograd.context() as context_id:
                loss = rpc.rpc_sync("worker0", relay, args=(5, x)).sum()
                killer = threading.Timer(moments.random() * 0.04, os.kill, (pid, signal.SIGKILL))
                killer.start()
                try:
                    dist_autograd.backward(context_id, [loss])
                    outcomes["ended"] += 1
                    gradient = context_id.gradients()[x]
                    expected = gradient if expected is None else expected
                    assert torch.equal(gradient, expected)
                except nbdist.WorkerLost as error:
                    outcomes["lost"] += 1
                    said.append((victim, str(error)))
                killer.join()
            for survivor in cluster.names:
                if survivor != victim:
                    expect_no_context(survivor)
            expect_no_context("notebook")
            assert cluster.restart(victim) == [victim]
    assert all(victim in text for victim, text in said), said
    assert outcomes["lost"] > kills // 10, outcomes


@pytest.mark.timeout(120)
def test_a_worker_is_killed_while_a_pass_is_paused_there():
    with nbdist.Cluster(3, backend="none") as cluster:
        x = torch.ones(4, requires_grad=True)
        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("worker0", relay, args=(5, x)).sum()
            watch = context_id.watch(paused=True)
            handle = context_id.backward_async(loss)
            theirs = dist_autograd.trace(context_id).nodes["worker1"]
            assert watch.run(until=("worker1", next(node.number for node in theirs if node.kind == "operation")))
            (pid,) = [worker.pid for worker in cluster.workers if worker.name == "worker1"]
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(nbdist.WorkerLost, match="worker1"):
                handle.wait()
            assert watch.step() == []
            (seen,) = watch.passes
            assert "worker1" in seen.error
        for survivor in ("worker0", "worker2", "notebook"):
            expect_no_context(survivor)
