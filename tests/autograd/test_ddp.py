"""DistributedDataParallel inside of workers: gradients are averaged, and land in the context."""

import copy
import gc
import threading
from collections import Counter

import pytest
import torch
from helpers.models.autograd_functions import (
    first_and_second,
    gradients,
    gradients_of,
    make,
    make_two,
    run,
    run_delayed,
)
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from nbdist import autograd as dist_autograd
from nbdist import rpc


@pytest.fixture
def cluster(shared_cluster):
    return shared_cluster


def expected(factor, inputs):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    sum(factor * model(x).sum() for x in inputs).backward()
    return [parameter.grad / len(inputs) for parameter in model.parameters()]


OPTIONS = [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-5}]
INPUTS = [torch.linspace(-1, 1, 6).double().reshape(2, 3), torch.linspace(1, 3, 6).double().reshape(2, 3)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
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


# --- a module of which only a part can run --------------------------------------------------------


@pytest.fixture
def group():
    """A process group that is this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    modules.clear()  # one that lives changes what passes of later tests do
    gc.collect()
    distributed.destroy_process_group()


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.other = (torch.nn.Linear(3, 3).double() for _ in range(3))

    def forward(self, x, y):
        trunk = self.trunk(x).tanh()
        return self.one(trunk + y).tanh(), self.other(trunk).tanh()


modules = {}
y_has_its_gradient = threading.Event()


def heads(x, y):
    one, other = modules["heads"](x, y)
    return one, rpc.rpc_sync("worker2", HeldUp.apply, args=(other,))


class HeldUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert y_has_its_gradient.wait(20), "what could run has waited for what could not"
        return gradient


def loss_of(one, other):
    return one.sum() + other.square().sum()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_leaves_that_could_run_wait_for_those_of_their_module_that_cannot(group, world, options):
    torch.manual_seed(0)
    local = TwoHeads()
    module = copy.deepcopy(local)
    modules["heads"] = DistributedDataParallel(module, **options)
    ran = Counter()
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ran.update([name]))
    for times in (1, 2):
        x, y, own_x, own_y = (one.detach().clone().requires_grad_() for one in (*INPUTS, *INPUTS))
        local.zero_grad()
        loss_of(*local(own_x, own_y)).backward()
        y_has_its_gradient.clear()
        with dist_autograd.context() as context_id:
            sent = y * 1
            sent.register_hook(lambda _: y_has_its_gradient.set())
            context_id.backward(loss_of(*rpc.rpc_sync("worker1", heads, args=(x, sent))))
            found = context_id.gradients()
            torch.testing.assert_close([found[x], found[y]], [own_x.grad, own_y.grad])
            found = world[1].recorder.contexts.get(context_id).gradients()
            for (name, mine), theirs in zip(local.named_parameters(), module.parameters(), strict=True):
                torch.testing.assert_close(found[theirs], mine.grad)
                assert theirs.grad is None
                assert ran[name] == times


# --- several passes at a time ---------------------------------------------------------------------


FACTORS = {"a": 1.0, "b": 10.0}


@pytest.mark.timeout(120)
def test_passes_over_several_workers_reduce_in_one_order(cluster):
    """Each worker would come to the module of another pass first, and average what does not belong together."""
    for future in [rpc.rpc_async(name, make_two) for name in cluster.names]:
        future.wait()
    found, errors = {}, []
    one_forward = threading.Lock()

    def train(name, delays):
        try:
            with dist_autograd.context() as context_id:
                with one_forward:  # which may be collective
                    futures = [
                        rpc.rpc_async(worker, run_delayed, args=(name, x, delay))
                        for worker, x, delay in zip(cluster.names, INPUTS, delays, strict=True)
                    ]
                    loss = sum(FACTORS[name] * future.wait().sum() for future in futures)
                ready.wait()
                context_id.backward(loss)
                found[name] = [rpc.rpc_sync(n, gradients_of, args=(name, context_id)) for n in cluster.names]
        except BaseException as error:
            errors.append(error)

    for _ in range(3):
        ready = threading.Barrier(2)
        threads = [threading.Thread(target=train, args=args) for args in (("a", (0.0, 0.2)), ("b", (0.2, 0.0)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        mean = torch.stack([x.sum(0) for x in INPUTS]).mean(0)
        for name, each in found.items():
            for weight, bias in each:
                torch.testing.assert_close(weight[0], FACTORS[name] * mean)
                torch.testing.assert_close(bias, torch.full((1,), FACTORS[name] * 2.0).double())
