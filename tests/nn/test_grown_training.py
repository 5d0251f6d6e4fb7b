"""Training over workers of which some joined the running cluster: pipelines, remote modules, references, optimizers."""

from __future__ import annotations

import copy
import signal

import pytest
import torch
from helpers.hosts.keepers import Keepers
from helpers.waiting import wait_until
from torch.nn import Linear, Sequential, Tanh
from torch.nn.functional import mse_loss

from nbdist import WorkerLost, rpc
from nbdist import autograd as dist_autograd
from nbdist.nn import Pipeline, Reference, RemoteModule
from nbdist.optim import DistributedOptimizer

BEGUN_THERE = """
from nbdist import autograd as dist_autograd
from nbdist.optim import DistributedOptimizer
with dist_autograd.context() as context:
    near = torch.nn.Linear(3, 3)
    hidden = near(torch.ones(2, 3))
    out = rpc.rpc_sync("worker0", torch.mul, args=(hidden, 2))
    dist_autograd.backward(context, [out.sum()])
    gradients = dist_autograd.get_gradients(context)
    same = torch.equal(gradients[near.weight], torch.full((3, 3), 4.0))
    DistributedOptimizer(torch.optim.SGD, [rpc.RRef(near.weight)], lr=0.5).step(context)
"""


@pytest.fixture
def keepers(tmp_path):
    keepers = Keepers(tmp_path)
    yield keepers
    keepers.end()


def train(pipe: Pipeline, reference: Reference, steps: int) -> None:
    """Train a pipeline and its twin in this process; all losses and parameters must be equal."""
    alone = [parameter for stage in reference.stages for parameter in stage.parameters]
    theirs = torch.optim.Adam(alone, lr=0.01)
    ours = DistributedOptimizer(torch.optim.Adam, pipe.parameter_rrefs(), lr=0.01)
    for _ in range(steps):
        x, y = torch.randn(8, 6), torch.randn(8, 6)
        with dist_autograd.context() as context:
            loss = pipe.train_step(x, y, mse_loss)
            ours.step(context)
        theirs.zero_grad()
        assert torch.equal(loss, reference.train_step(x, y, mse_loss))
        theirs.step()
    for value, expected in zip(pipe.state_dict()["model"].values(), alone, strict=True):
        assert torch.equal(value, expected)


@pytest.mark.soak
def test_a_model_is_trained_over_old_and_new_workers(keepers):
    stages = [Sequential(Linear(6, 6), Tanh()) for _ in range(4)]
    reference = Reference(copy.deepcopy(stages), micro_batches=4)
    with keepers.cluster(2) as cluster:
        before = Pipeline(stages, cluster.names, micro_batches=4)
        train(before, reference, 2)
        keepers.grow(cluster, "-n", "2", uses=2)
        # A pipeline from before works as it did; its state moves to one with a stage on each worker.
        train(before, reference, 2)
        pipe = Pipeline(stages, ["worker3", "worker0", "worker2", "worker1"], micro_batches=4)
        pipe.load_state_dict(before.state_dict())
        train(pipe, reference, 3)
        # Modules and references, in one pass over all workers.
        plain = [Linear(3, 3) for _ in range(2)]
        new, old = (RemoteModule(name, Linear, (3, 3)) for name in ("worker2", "worker1"))
        for module, twin in zip((new, old), plain, strict=True):
            module.load_state_dict(twin.state_dict())
        kept = rpc.remote("worker3", torch.ones, args=(2, 3))
        parameters = [*new.remote_parameters(), *old.remote_parameters()]
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
        with dist_autograd.context() as context:
            hidden = new.forward_async(rpc.rpc_sync("worker0", rpc.RRef.to_here, args=(kept,))).wait()
            assert kept.is_owner() is False
            loss = rpc.rpc_sync("worker3", torch.square, args=(old.forward(hidden),)).sum()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        plain[1](plain[0](torch.ones(2, 3))).square().sum().backward()
        for module, twin in zip((new, old), plain, strict=True):
            moved = module.state_dict()
            for name, parameter in twin.named_parameters():
                assert torch.allclose(moved[name], parameter.detach() - 0.1 * parameter.grad, atol=1e-6)
        # A pass that a new worker begins.
        cluster.execute(BEGUN_THERE, "worker3")
        assert cluster.evaluate("same", "worker3")
        # A new worker dies: the step says so, and a restarted one takes part again.
        state = pipe.state_dict()
        cluster.signal("worker2", signal.SIGKILL)
        wait_until(lambda: cluster.find("worker2").lost)
        with pytest.raises(WorkerLost, match="worker2"), dist_autograd.context():
            pipe.train_step(torch.randn(8, 6), torch.randn(8, 6), mse_loss)
        assert cluster.restart() == ["worker2"]
        again = Pipeline(stages, ["worker3", "worker0", "worker2", "worker1"], micro_batches=4)
        again.load_state_dict(state)
        train(again, reference, 1)
