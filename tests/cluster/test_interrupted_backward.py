"""A backward pass that waits for another worker in C++ ends by an interrupt, and its worker runs the next cell.

DDP averages gradients in the C++ code of the backward pass. The innermost Python frame is then the one of nbdist's
engine (`nbdist.autograd.passes.engine`), which torch.autograd calls in place of its own.
"""

import os
import signal
import threading
import time

import pytest
from helpers.notebook.frontend import COLOUR
from helpers.waiting import wait_for_error, wait_until

import nbdist
from nbdist.cluster.whereabouts import place

LIMIT = 20
"""Seconds for what a test waits for."""

MODELS = """
import time
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
hooked = DistributedDataParallel(torch.nn.Linear(4, 4))
x = torch.ones(2, 4, requires_grad=True)

def average(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])

hooked.register_comm_hook(None, average)

class Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ddp(gradient).sum().backward()
        return gradient

def reduce_in_hook():
    output = ddp(x)
    output.register_hook(lambda gradient: dist.all_reduce(gradient))
    output.sum().backward()

def step_sharded(model):
    loss = fully_shard(model)(x).sum()
    if rank == 0:
        loss.backward()

def gather(tensor):
    sharded = distribute_tensor(tensor, init_device_mesh("cpu", (2,)), [Shard(0)])
    if rank == 0:
        sharded.full_tensor()
"""

STEP = "ddp(x).sum().backward()"
KINDS = {
    "DDP": (STEP, "Tensor.backward()"),
    "DDP with a hook for its averages": ("hooked(x).sum().backward()", "Tensor.backward()"),
    "autograd.grad": ("torch.autograd.grad(Inner.apply(x).sum(), x)", "Tensor.backward()"),
    "a reentrant checkpoint": ("checkpoint(ddp, x, use_reentrant=True).sum().backward()", "Tensor.backward()"),
    "a hook": ("reduce_in_hook()", "dist.all_reduce()"),
    "FSDP2": ("step_sharded(torch.nn.Linear(4, 4))", "Tensor.backward()"),
    "a functional collective": (
        "functional.wait_tensor(functional.all_reduce(x, 'sum', dist.group.WORLD))",
        "dist.wait_tensor()",
    ),
    "DTensor": ("gather(x.detach())", "dist.DTensor.full_tensor()"),
}
"""By name: the code that worker0 runs, and the call in which it waits."""


@pytest.fixture
def cluster(shared_cluster, own_variables):
    """Two idle workers, which have the models. After the test no worker may be stuck in its cell."""
    shared = shared_cluster
    shared.execute(MODELS, timeout=LIMIT)
    yield shared
    stuck = [worker.name for worker in shared.workers if worker.cells]
    if not stuck:
        living = [worker.name for worker in shared.workers if not worker.lost]
        shared.execute("ran = True", living, timeout=LIMIT)
    shared.restart(stuck or None, process_group=True)
    assert not stuck, "an interrupt costs these workers"


def reach_wait(cluster):
    """Return when worker0's main thread waits in the user's code: two looks find it at one place, without computing."""
    deadline, before = time.monotonic() + LIMIT, None
    while time.monotonic() < deadline:
        found = cluster.agent.ask("worker0", place)
        if found and before and found.instruction == before.instruction and found.processor - before.processor < 1e-3:
            return
        before = found
        time.sleep(0.1)
    raise AssertionError("worker0 does not wait")


def press_stop(cluster):
    """Press stop in another thread, once worker0 waits."""

    def press():
        reach_wait(cluster)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def expect_stopped(error, call="Tensor.backward()"):
    """Check the error of a cell that an interrupt has ended in this call."""
    assert type(error).__name__ == "KeyboardInterrupt", error
    assert "did not stop within" not in str(error)
    shown = "\n".join(error.traceback)
    assert "its process group was broken off; `%dist_restart -p` forms it anew" in shown
    assert f"KeyboardInterrupt: stopped in {call}, In[" in COLOUR.sub("", shown)
    for internals in ("gloo", "engine.py", "distributed_c10d.py", "collective_errors.py", "RuntimeError"):
        assert internals not in shown


@pytest.mark.parametrize("kind", KINDS)
def test_stop_ends_a_wait_for_an_idle_worker(cluster, kind):
    code, call = KINDS[kind]
    pressing = press_stop(cluster)
    with pytest.raises(KeyboardInterrupt) as ended:
        cluster.execute(code, None if call == "dist.DTensor.full_tensor()" or kind == "FSDP2" else 0)
    pressing.join()
    expect_stopped(ended.value, call)


@pytest.mark.parametrize("partner", ["pass", "raise ValueError('mine')"])
def test_stop_ends_ddps_backward_whose_partner_has_ended_the_cell(cluster, partner):
    pressing = press_stop(cluster)
    with pytest.raises((KeyboardInterrupt, nbdist.NbdistError)) as ended:
        cluster.execute(f"if rank == 0:\n    {STEP}\nelse:\n    {partner}")
    pressing.join()
    errors = {error.worker: error.name for error in getattr(ended.value, "errors", ())}
    assert errors in ({}, {"worker0": "KeyboardInterrupt", "worker1": "ValueError"})
    shown = "\n".join(ended.value.traceback)
    assert "its process group was broken off" in shown
    assert ("mine" in shown) == ("mine" in partner)


def test_a_limit_of_time_ends_ddps_backward(cluster):
    with pytest.raises(
        nbdist.NbdistError,
        match=r"worker0 did not end the cell within 2 s; worker1 has not come to .*; worker0 stopped in ",
    ) as ended:
        cluster.execute(STEP, 0, timeout=2)
    assert "its process group was broken off" in "\n".join(ended.value.traceback)


def test_an_error_ends_ddps_backward_of_the_others_and_is_raised(cluster):
    code = f"if rank == 0:\n    {STEP}\nelse:\n    raise ValueError('mine')"
    with pytest.raises(ValueError, match="mine") as ended:
        cluster.execute(code, timeout=LIMIT, fail_fast=True)
    assert {error.worker: error.name for error in ended.value.errors}["worker0"] == "KeyboardInterrupt"


def test_ddps_error_names_the_parameters_without_a_gradient(cluster):
    cluster.execute(
        "class Two(torch.nn.ModuleDict):\n"
        "    def forward(self, x):\n"
        "        return self['used'](x)\n"
        "two = Two({each: torch.nn.Linear(2, 2) for each in ('used', 'idle')})\n"
        "two = torch.nn.parallel.DistributedDataParallel(two)"
    )
    with pytest.raises(RuntimeError, match="Expected to have finished reduction") as ended:
        cluster.execute("for _ in range(2):\n    two(torch.ones(1, 2)).sum().backward()", timeout=LIMIT)
    shown = "\n".join(ended.value.traceback)
    assert shown.count("these parameters got no gradient: idle.weight, idle.bias") == 1


def test_cluster_interrupt_ends_ddps_backward(cluster):
    cell = cluster.execute(STEP, 0, block=False)
    reach_wait(cluster)
    cluster.interrupt("worker0")
    expect_stopped(wait_for_error(cell))


def test_an_interrupt_during_the_computation_ends_the_wait_after_it(cluster):
    # The marks tell when the backward pass runs; the products of matrices then take about a second, in C++.
    code = (
        "def note(gradient):\n    global computes\n    computes = True\n"
        "computes, wide = False, torch.ones(800, 800, requires_grad=True)\n"
        "value = wide\n"
        "for _ in range(30): value = torch.sigmoid(value @ wide)\n"
        "value.register_hook(note)\n"
        "(value.sum() * ddp(x).sum()).backward()"
    )
    cell = cluster.execute(code, 0, block=False)
    wait_until(lambda: cluster.agent.ask("worker0", eval, "getattr(__import__('__main__'), 'computes', False)"))
    cluster.interrupt("worker0")
    expect_stopped(wait_for_error(cell))


def test_the_death_of_the_partner_ends_ddps_backward(cluster):
    cell = cluster.execute(STEP, 0, block=False)
    reach_wait(cluster)
    os.kill(cluster.find("worker1").pid, signal.SIGKILL)
    error = wait_for_error(cell)
    assert isinstance(error, nbdist.WorkerLost), error
    assert "worker1" in str(error)


def test_a_call_in_a_backward_pass_is_stopped(cluster):
    # The innermost frames are the hook's and the engine's: for both, the call counts as the user's code.
    code = (
        "def loop():\n"
        "    import __main__, time\n"
        "    def spin(gradient):\n"
        "        __main__.spins = True\n"
        "        try:\n            while True: time.sleep(0.01)\n"
        "        finally: __main__.spins = False\n"
        "    y = torch.ones(1, requires_grad=True)\n"
        "    y.register_hook(spin)\n"
        "    with torch.enable_grad(): (y * 2).backward()\n"
        "rpc.rpc_sync('worker1', loop)"
    )
    cell = cluster.execute(code, 0, block=False)
    spins = "getattr(__import__('__main__'), 'spins', None)"
    wait_until(lambda: cluster.agent.ask("worker1", eval, spins))
    cell.cancel()
    assert type(wait_for_error(cell)).__name__ == "KeyboardInterrupt"
    wait_until(lambda: not cluster.agent.ask("worker1", eval, spins))


def test_wrappers_of_a_group_before_a_restart_say_that_they_are_old(cluster):
    cluster.execute("hooked(x).sum().backward()", timeout=LIMIT)
    cell = cluster.execute(STEP, 0, block=False)
    reach_wait(cluster)
    cell.cancel()
    expect_stopped(wait_for_error(cell))
    cluster.restart(process_group=True)
    for model in ("ddp", "hooked"):  # torch checks less for the first one, which has run on worker0 only
        with pytest.raises(nbdist.GroupError, match=r"from before the last %dist_restart.*wrap models again") as ended:
            cluster.execute(f"{model}(x).sum().backward()", timeout=LIMIT)
        assert [error.worker for error in ended.value.errors] == ["worker0", "worker1"]
