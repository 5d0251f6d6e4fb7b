"""G4: a context leaves nothing on any worker; after very many there is as much memory in use as after few."""

import gc
import os
import threading

import pytest
import torch
from autograd_functions import forward_and_own, kilobytes

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc

ALLOWED = 1500
"""KB that allocators may have put aside since; a thousand contexts that left 2 KB each would show."""


def train(count):
    """Contexts whose calls come to all workers: this one's, and a third by way of the second."""
    for _ in range(count):
        x = torch.ones(64, requires_grad=True)
        with dist_autograd.context() as context_id:
            out = rpc.rpc_sync("worker0", forward_and_own, args=("worker1", x))
            dist_autograd.backward(context_id, [out.sum()])


@pytest.mark.timeout(300)
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="the kernel does not say")
def test_a_thousand_contexts_leave_no_memory_in_use():
    def used():
        gc.collect()
        return {"here": kilobytes(), **{name: rpc.rpc_sync(name, kilobytes) for name in cluster.names}}

    with nbdist.Cluster(2, backend="none") as cluster:
        train(300)  # until allocators and caches have what they want
        before = used()
        train(1000)
        after = used()
        threads = threading.active_count()
        train(10)
        assert threading.active_count() == threads
    grown = {name: after[name] - before[name] for name in before}
    assert max(grown.values()) < ALLOWED, grown
