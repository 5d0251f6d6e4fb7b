"""G4: a context leaves nothing on any worker; after very many there is as much memory in use as after few."""

import gc
import os
import threading
import weakref

import pytest
import torch
from helpers.models.autograd_functions import forward_and_own, kilobytes, stage
from helpers.waiting import wait_until

from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.autograd.passes.context import Run
from nbdist.autograd.passes.worker_part import Part

ALLOWED = 1500
"""KB that allocators may have put aside since: 500 contexts that left 4 KB each would show, or 1000 with 2 KB each."""


def train(count):
    """Contexts whose calls come to all workers: this one's, and a third by way of the second."""
    for _ in range(count):
        x = torch.ones(64, requires_grad=True)
        with dist_autograd.context() as context_id:
            out = rpc.rpc_sync("worker0", forward_and_own, args=("worker1", x))
            dist_autograd.backward(context_id, [out.sum()])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [500, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="the kernel does not say")
def test_contexts_leave_no_memory_in_use(shared_cluster, count):
    def used():
        gc.collect()
        return {"here": kilobytes(), **{name: rpc.rpc_sync(name, kilobytes) for name in shared_cluster.names}}

    train(1300)  # until allocators and caches have what they want, which other tests of this process decide, too
    before = used()
    train(count)
    after = used()
    threads = threading.active_count()
    train(10)
    assert threading.active_count() < threads + 10  # not one for each
    grown = {name: after[name] - before[name] for name in before}
    assert max(grown.values()) < ALLOWED, grown


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_a_pass_leaves_no_circle(world, mode):
    """What only a collection could free would stay until there is one, and with it the gradients that came."""
    gc.collect()
    others = of_passes([])  # of tests before, by an error that is remembered
    gc.disable()
    try:
        known = {name: weakref.ref(gradient) for name, gradient in arriving(mode)}
        assert len(known) == 6
        wait_until(lambda: [name for name, ref in known.items() if ref() is not None], equals=[])
        wait_until(lambda: not of_passes(others))
    finally:
        gc.enable()


def arriving(mode):
    """The gradients that come to this process's workers in one pass, by whom and for what."""
    found = []

    def note(part, message, outputs, gradients):
        found.extend((f"{message}.{index}", gradient) for index, gradient in zip(outputs, gradients, strict=True))
        return arrive(part, message, outputs, gradients)

    arrive = Part.arrive
    Part.arrive = note
    try:
        with dist_autograd.context() as context_id:
            outs = [rpc.rpc_sync("worker1", stage, args=(torch.ones(3), "first", index)) for index in range(2)]
            outs = [rpc.rpc_sync("worker2", stage, args=(out, "second", index)) for index, out in enumerate(outs)]
            dist_autograd.backward(context_id, [sum(outs).sum()], mode=mode)
    finally:
        Part.arrive = arrive
    return found


def of_passes(others):
    """What there is of any pass, but of those."""
    return [one for one in gc.get_objects() if type(one) in (Run, Part) and all(one is not other for other in others)]
