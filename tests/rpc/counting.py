"""Counts the Python functions and messages of each kind of call; prints them as JSON.

It is a program of its own, because other tests leave hooks, listeners and caches in their process, which count too.
"""

import contextlib
import json
import os
import sys

import torch
from helpers.simulated.stepping import SteppedWorld

import nbdist.autograd as dist_autograd
from nbdist import rpc
from nbdist.nn import RemoteModule
from nbdist.optim import DistributedOptimizer

WARM = 105
"""Operations before the count; so many that the table of deadlines is not compacted, which it is after 1,024 calls."""
RUNS = 20


def empty(world):
    return lambda: rpc.rpc_sync("worker1", os.getpid)


def empty_of_main(world):
    """A function of the program's own, which travels by name and digest."""
    main = sys.modules["__main__"]
    exec("def of_main():\n    return None", main.__dict__)
    main.of_main.__module__ = "__main__"
    return lambda: rpc.rpc_sync("worker1", main.of_main)


def empty_from_a_cell(world):
    """As in a notebook, where each call says whose cell it works for."""
    for agent in world:
        agent.know_cells(str, lambda origin: contextlib.nullcontext())
    return empty(world)


def small_tensor(world):
    small = torch.ones(2)
    return lambda: rpc.rpc_sync("worker1", torch.add, args=(small, 1))


def created_and_fetched(world):
    small = torch.ones(2)
    return lambda: rpc.remote("worker1", torch.add, args=(small, 1)).to_here()


def step(world):
    """Forward, backward and a step of the optimizer of a module elsewhere."""
    module = RemoteModule("worker1", torch.nn.Linear, args=(64, 64))
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
    batch = torch.ones(8, 64)

    def run():
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [module(batch).sum()])
            optimizer.step(context_id)

    return run


def ten_hops(mode):
    def make(world):
        def run():
            with dist_autograd.context() as context_id:
                x = torch.ones(8, requires_grad=True)
                for number in range(10):
                    x = rpc.rpc_sync(f"worker{1 + number % 3}", torch.add, args=(x, 1))
                dist_autograd.backward(context_id, [x.sum()], mode=mode)

        return run

    return make


CASES = {
    "empty": (empty, 2),
    "empty, of __main__": (empty_of_main, 2),
    "empty, from a cell": (empty_from_a_cell, 2),
    "small tensor": (small_tensor, 2),
    "remote().to_here()": (created_and_fetched, 2),
    "step": (step, 2),
    "ten hops, SMART": (ten_hops("smart"), 4),
    "ten hops, FAST": (ten_hops("fast"), 4),
}
"""By case: what makes the operation, and how many agents there are."""


def count(case):
    """Return the counts of all runs, each of the caller and of all others, and the number of messages."""
    make, agents = CASES[case]
    with SteppedWorld(agents) as world:
        operation = make(world)
        for _ in range(WARM):
            operation()
            world.settle()
        counts = [(first, sum(others)) for first, *others in (world.count_calls(operation) for _ in range(RUNS))]
        return counts, len(world.count_messages(operation))


if __name__ == "__main__":
    print(json.dumps({case: count(case) for case in CASES}))
