"""What tests of distributed autograd call on real workers, which must be able to import it."""

import gc
import time

import torch
from torch.nn.parallel import DistributedDataParallel

from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.autograd.passes.ordering import ordered

# --- test_killing ---------------------------------------------------------------------------------

weight = torch.full((4,), 2.0, requires_grad=True)


class Leisurely(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.002)
        return gradient


def relay(depth, x):
    y = Leisurely.apply(x * weight)
    if depth:
        y = rpc.rpc_sync(f"worker{depth % 3}", relay, args=(depth - 1, y)) + y
    return y


def contexts_here():
    return len(dist_autograd.api.recorder().contexts.all())


# --- test_steps -----------------------------------------------------------------------------------

hooks = {}
"""What is called when a micro-batch goes backward, by name: with its index."""


class Called(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name, index):
        ctx.name, ctx.index = name, index
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        hooks.get(ctx.name, lambda _: None)(ctx.index)
        return gradient, None, None


weights = {name: torch.full((3,), 2.0, requires_grad=True) for name in ("first", "second")}
"""By stage: where all workers are one process, a leaf is in the hands of one of them at a time."""


def stage(x, name, index):
    return Called.apply(x * weights[name], name, index)


def each_by_way_of_worker2(*tensors):
    """Send each of the tensors through the leaf here and then, in a message of its own, through the one of worker2."""
    return sum(
        rpc.rpc_sync("worker2", stage, args=(stage(tensor, "first", index), "second", index))
        for index, tensor in enumerate(tensors)
    )


def through(names, x):
    """Send a tensor through workers in turn and back. In a pass, ``hooks`` runs for each worker on its way there."""
    y = x * 2
    if names:
        y = rpc.rpc_sync(names[0], through, args=(names[1:], y)) + y
    return Called.apply(y, rpc.get_worker_info().name, 0)


def gradient_of(name, context_id):
    return dist_autograd.get_gradients(context_id)[weights[name]].tolist()


# --- test_ddp -------------------------------------------------------------------------------------

_kept = {}


def make(options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    _kept["model"] = DistributedDataParallel(model, **options)


def run(x):
    return _kept["model"](x)


def first_and_second(x):
    """The model's output, and what another worker made of it, sent back in between."""
    y = _kept["model"](x)
    return y + rpc.rpc_sync("notebook", torch.mul, args=(y, 2.0)), y * 3


def parameters():
    return [parameter.detach() for parameter in _kept["model"].parameters()]


def gradients(context_id):
    found = dist_autograd.get_gradients(context_id)
    return [found.get(parameter) for parameter in _kept["model"].parameters()], [
        parameter.grad for parameter in _kept["model"].parameters()
    ]


def make_two():
    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        _kept[name] = DistributedDataParallel(torch.nn.Linear(3, 1).double())


class Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


def run_delayed(name, x, seconds):
    return Delayed.apply(_kept[name](x), seconds)


def gradients_of(name, context_id):
    found = dist_autograd.get_gradients(context_id)
    return [found.get(parameter) for parameter in _kept[name].parameters()]


# --- test_memory_of_contexts ----------------------------------------------------------------------


def forward_and_own(other, x):
    return rpc.rpc_sync(other, torch.mul, args=(x, 2.0)) * weight.sum()


def kilobytes():
    """What this process has in use that nobody else has."""
    gc.collect()
    with open("/proc/self/smaps_rollup") as report:
        lines = dict(line.split(":") for line in report if line.startswith("Private"))
    return sum(int(value.split()[0]) for value in lines.values())


# --- test_watch -----------------------------------------------------------------------------------


def begin_pass(context_id, x):
    """A pass of this worker's, which comes to the caller's ``x``; and who runs it."""
    dist_autograd.backward(context_id, [(x * weight).sum()])
    return rpc.get_worker_info().name


# --- test_ordering --------------------------------------------------------------------------------

_leaf = torch.ones(1, requires_grad=True)


def times_leaf(index):
    """An ordered tensor that was made with the same leaf as others; or what the leaf's gradient is by now."""
    if index is None:
        return dist_autograd.get_gradients()[_leaf]
    return ordered(_leaf * 1, "times_leaf", index)
