"""Calls from functions that torch.compile compiles: torch leaves nbdist's own code out of its graphs."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

import pytest
import torch
from helpers.models import swarm_models
from helpers.processes import workers

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc, testing
from nbdist.nn import RemoteModule
from nbdist.swarm import serve


class Parts(torch.nn.Module):
    """A module of which one part is on another worker."""

    def __init__(self, remote):
        super().__init__()
        self.here = torch.nn.Linear(3, 3)
        self.there = remote

    def forward(self, x):
        return self.there(self.here(x).relu()) * 2


@pytest.fixture(scope="module")
def values():
    """What the functions below use on worker1, a process of its own."""
    with workers.world(2):
        yield {
            "counter": rpc.remote("worker1", workers.Counter, args=(torch.ones(3),)),
            "tensor": rpc.remote("worker1", torch.ones, args=(3,)),
            "module": RemoteModule("worker1", torch.nn.Linear, args=(3, 2)),
        }


@pytest.fixture
def graphs():
    """The graphs that torch has compiled since the test began."""
    torch._dynamo.reset()
    found = []

    def backend(graph, _):
        found.append(graph)
        return graph.forward

    yield found, backend
    torch._dynamo.reset()


def sync(values, x):
    return rpc.rpc_sync("worker1", torch.add, args=(x + 1, 1)) * 2


def asynchronous(values, x):
    return rpc.rpc_async("worker1", torch.add, args=(x + 1, 1)).then(lambda done: done.wait() - 1).wait() * 2


def remote(values, x):
    return rpc.remote("worker1", torch.add, args=(x + 1, 1)).to_here() * 2


def own_function(values, x):
    return rpc.rpc_sync("worker1", lambda y: y.sin(), args=(x + 1,)) * 2


def method(values, x):
    return values["counter"].rpc_sync().add(x * 0) + values["counter"].rpc_async().add(x * 0).wait()


def remote_method(values, x):
    return values["counter"].remote().add(x * 0).to_here() * 2


def fetched(values, x):
    return values["tensor"].to_here() + x * 2


def module(values, x):
    return values["module"](x + 1) * values["module"].forward_async(x).wait()


def in_a_context(values, x):
    with dist_autograd.context() as context_id:
        loss = values["module"](x * 2).sum()
        context_id.backward(loss)
    return loss * 2


ENTRIES = [sync, asynchronous, remote, own_function, method, remote_method, fetched, module, in_a_context]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_a_call_in_compiled_code(values, graphs, entry):
    found, backend = graphs
    compiled = torch.compile(entry, backend=backend)
    for x in (torch.ones(3), torch.zeros(3)):
        assert torch.equal(compiled(values, x), entry(values, x))
    assert all("nbdist" not in str(graph.code) for graph in found)
    if entry is sync:
        assert len(found) == 2  # x + 1, and the product: compiled before and after the call


@torch.no_grad()
def test_a_model_with_a_part_on_another_worker(values, graphs):
    model = Parts(values["module"])
    compiled = torch.compile(model, backend=graphs[1])
    x = torch.ones(3)
    assert torch.equal(compiled(x), model(x))
    with pytest.raises(nbdist.UsageError, match=r"``named_modules`` not supported for RemoteModule"):
        list(model.parameters())  # outside of compiled code it is refused as ever


def test_what_torch_compiles_by_default(values):
    torch._dynamo.reset()
    x = torch.rand(3)
    assert torch.allclose(torch.compile(module)(values, x), module(values, x))
    torch._dynamo.reset()


def test_a_function_that_a_call_runs_is_compiled_there(values):
    assert rpc.rpc_sync("worker1", workers.count_graphs, args=(torch.ones(3),)) == 1


@torch.no_grad()
def test_a_served_model(graphs):
    model = swarm_models.make("llama")
    inputs = swarm_models.one()
    with testing.World(3) as world, world[0].activate(), closing(serve(model, workers=[1, 2])) as swarm:
        compiled = torch.compile(swarm.causal_lm(), backend=graphs[1])
        assert torch.equal(compiled(**inputs).logits, model(**inputs).logits)
        assert graphs[0]


CALLS = """
from nbdist import rpc, testing
import torch

with testing.World(2) as world, world[0].activate():
    call = lambda x: rpc.rpc_sync("worker1", torch.add, args=(x + 1, 1)) * 2
    x = torch.ones(3)
    assert call(x).tolist() == [6.0, 6.0, 6.0]
    print("torch._dynamo" in sys.modules)
    assert torch.compile(call, backend="eager")(x).tolist() == [6.0, 6.0, 6.0]
"""


WITHOUT_JIT = """
import sys, torch
del torch.jit, sys.modules["torch.jit"]
import nbdist.compat.rpc.internal, nbdist.magics.dist_magics, nbdist.nn, nbdist.optim
from nbdist import autograd, testing, rpc

with testing.World(2) as world, world[0].activate(), autograd.context() as context_id:
    remote = nbdist.nn.RemoteModule("worker1", torch.nn.Linear, (3, 2))
    there = rpc.rpc_sync("worker1", torch.nn.Linear(3, 1), args=(torch.ones(3),))
    loss = remote(torch.ones(1, 3)).relu().sum() + there.sum()
    autograd.backward(context_id, [loss])
assert "torch.jit" not in sys.modules
"""


def test_nothing_needs_torch_jit_before_a_script_comes():
    """Torch, which deprecates it, still imports it by itself; here the program takes it away."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_JIT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["torch._dynamo", "nbdist.nn, nbdist.optim, nbdist.magics.dist_magics"])
def test_it_does_not_matter_which_is_imported_first(first):
    """And nbdist does not import what compiles, which takes a second and 70 MB. (transformers does, for a swarm.)"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {first}{CALLS}"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{first == 'torch._dynamo'}\n"
