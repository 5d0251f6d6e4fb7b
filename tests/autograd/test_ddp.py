"""DistributedDataParallel inside of workers: gradients are averaged, and land in the context."""

import pytest
import torch
from autograd_functions import first_and_second, gradients, make, run

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc


@pytest.fixture(scope="module")
def cluster():
    with nbdist.Cluster(2) as cluster:
        yield cluster


def expected(factor, inputs):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    sum(factor * model(x).sum() for x in inputs).backward()
    return [parameter.grad / len(inputs) for parameter in model.parameters()]


INPUTS = [torch.linspace(-1, 1, 6).double().reshape(2, 3), torch.linspace(1, 3, 6).double().reshape(2, 3)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-5}], ids=str)
@pytest.mark.parametrize("function", [run, first_and_second])
def test_averages_of_all_workers_are_in_the_context(cluster, options, function):
    for future in [rpc.rpc_async(name, make, args=(options,)) for name in cluster.names]:
        future.wait()
    for _ in range(2):
        with dist_autograd.context() as context_id:
            futures = [rpc.rpc_async(n, function, args=(x,)) for n, x in zip(cluster.names, INPUTS, strict=True)]
            outputs = [future.wait() for future in futures]
            loss = sum(out.sum() if function is run else out[0].sum() + out[1].sum() for out in outputs)
            dist_autograd.backward(context_id, [loss])
            for name in cluster.names:
                found, own = rpc.rpc_sync(name, gradients, args=(context_id,))
                for got, wanted in zip(found, expected(1 if function is run else 6, INPUTS), strict=True):
                    torch.testing.assert_close(got, wanted)
                assert own == [None] * 4
