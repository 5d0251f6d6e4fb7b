"""Tensors between workers that share a GPU: copied once on the GPU, and never by way of the host."""

import pytest
import torch
from helpers.waiting import wait_until

import nbdist

COUNTED = """
from nbdist.rpc import api

def counted(name):
    return api.current_agent().statistics()[name]
"""


@pytest.fixture(scope="module")
def cluster():
    with nbdist.Cluster(3, gpu_ids=(0,)) as cluster:
        cluster.execute(COUNTED)
        yield cluster


def test_a_large_tensor_stays_on_the_gpu(cluster):
    cluster.execute(
        "x = torch.randn(1 << 20, device=device)\n"
        "before = counted('arena_bytes')\n"
        "for _ in range(20):\n"
        "    y = rpc.rpc_sync('worker1', torch.neg, args=(x,))\n"
        "    assert y.device == device and torch.equal(y, -x)\n"
        "assert counted('gpu_arena_bytes') > 0 and counted('arena_bytes') <= before\n",
        0,
    )


def test_a_value_is_that_of_the_call(cluster):
    """The sender changes its tensor right after the call, and the callee changes what it got."""
    cluster.execute(
        "def total(x):\n"
        "    time.sleep(0.05)\n"
        "    found = x.sum().item()\n"
        "    x.fill_(7)\n"
        "    return found, x\n"
        "import time\n"
        "x = torch.ones(1 << 20, device=device)\n"
        "futures = []\n"
        "for n in range(8):\n"
        "    x.fill_(n)\n"
        "    futures.append(rpc.rpc_async('worker1', total, args=(x,)))\n"
        "x.fill_(100)\n"
        "for n, future in enumerate(futures):\n"
        "    found, y = future.wait()\n"
        "    assert found == n * (1 << 20), (n, found)\n"
        "    assert (y == 7).all()\n"
        "assert (x == 100).all()\n",
        0,
    )


def test_a_block_is_not_used_again_while_the_gpu_still_reads_it(cluster):
    """The callee asks for long work with its tensor, and drops the tensor at once; the sender sends the next ones."""
    cluster.execute(
        "sums = []\n"
        "def slowly(x):\n"
        "    a = torch.randn(4096, 4096, device=x.device)\n"
        "    for _ in range(30):\n"
        "        a = (a @ a).clamp(-1, 1)\n"
        "    sums.append(x.sum() + 0 * a.sum())\n",
        1,
    )
    cluster.execute(
        "def call_slowly(x):\n"
        "    __import__('__main__').slowly(x)\n"
        "for n in range(40):\n"
        "    rpc.rpc_sync('worker1', call_slowly, args=(torch.full((1 << 20,), float(n), device=device),))\n",
        0,
    )
    assert cluster.evaluate("[s.item() for s in sums]", 1) == [float(n << 20) for n in range(40)]


def test_all_kinds_of_tensors_arrive_equal(cluster):
    cluster.execute(
        "torch.manual_seed(1)\n"
        "base = torch.randn(600, 700, device=device)\n"
        "values = [base, base.t(), base[::2, 3:], base[5:300], base.to(torch.bfloat16), base > 0, base.byte(),\n"
        "          torch.complex(base, base).conj(), torch.nn.Parameter(base.clone()), base[:1].expand(300, 700),\n"
        "          torch.empty(0, 5, device=device), torch.tensor(3.0, device=device), base.double()]\n"
        "for value in values:\n"
        "    found = rpc.rpc_sync('worker1', torch.clone, args=(value.detach(),))\n"
        "    assert found.device == device and found.dtype == value.dtype and torch.equal(found, value), value.shape\n"
        "def same_memory(a, b):\n"
        "    b.zero_()\n"
        "    return a[:300].abs().sum().item(), a\n"
        "zeros, whole = rpc.rpc_sync('worker1', same_memory, args=(base, base[:300]))\n"
        "assert zeros == 0 and torch.equal(whole[300:], base[300:]) and base[:300].abs().sum() > 0\n",
        0,
    )


def test_what_came_so_is_sent_on(cluster):
    cluster.execute(
        "def on(x, left):\n"
        "    if not left:\n"
        "        return x + 1\n"
        "    return rpc.rpc_sync(left[0], on, args=(x, left[1:])) + 1\n"
        "x = torch.randn(1 << 18, device=device)\n"
        "y = rpc.rpc_sync('worker1', on, args=(x, ['worker2', 'worker0', 'worker1']))\n"
        "torch.testing.assert_close(y, x + 4)\n",
        0,
    )


def test_gradients_stay_on_the_gpu(cluster):
    cluster.execute(
        "from nbdist import autograd as dist_autograd\n"
        "x = torch.randn(1 << 19, device=device, requires_grad=True)\n"
        "before = counted('arena_bytes')\n"
        "with dist_autograd.context() as context_id:\n"
        "    y = rpc.rpc_sync('worker1', torch.mul, args=(x, x))\n"
        "    dist_autograd.backward(context_id, [(y * y).sum()])\n"
        "    found = dist_autograd.get_gradients(context_id)[x]\n"
        "torch.testing.assert_close(found, 4 * x.detach() ** 3)\n"
        "assert counted('arena_bytes') <= before\n",
        0,
    )


def test_blocks_come_back(cluster):
    cluster.execute(
        "for n in range(200):\n    rpc.rpc_sync('worker1', torch.sum, args=(torch.ones(1 << 20, device=device),))\n", 0
    )
    wait_until(lambda: cluster.evaluate("counted('gpu_arena_blocks_out')", 0), equals=0)
    assert cluster.evaluate("counted('gpu_arena_bytes')", 0) < 400 << 20


def test_without_room_it_goes_by_the_host(cluster):
    cluster.execute(
        "arena = api.current_agent().sharing._gpus.arenas[0]\n"
        "bound, arena._blocks._bound = arena._blocks._bound, 0\n"
        "x = torch.randn(1 << 20, device=device)\n"
        "y = rpc.rpc_sync('worker1', torch.neg, args=(x,))\n"
        "arena._blocks._bound = bound\n"
        "assert y.device == device and torch.equal(y, -x) and counted('gpu_arena_falls_back') > 0\n",
        0,
    )


def test_to_the_notebook_it_goes_by_the_host(cluster):
    cluster.execute("x = torch.arange(float(1 << 20), device=device)", 0)
    assert torch.equal(cluster.pull("x", 0), torch.arange(float(1 << 20)))


def test_a_tensor_outlives_the_worker_that_sent_it(cluster):
    cluster.execute("kept = []", 0)
    cluster.execute(
        "def call_keep(x):\n"
        "    __import__('__main__').kept.append(x)\n"
        "rpc.rpc_sync('worker0', call_keep, args=(torch.full((1 << 22,), 3.0, device=device),))\n",
        2,
    )
    assert cluster.evaluate("kept[0].sum().item()", 0) == 3.0 * (1 << 22)
    cluster.signal("worker2", 9)
    cluster.restart(2, process_group=True)
    cluster.execute("torch.full((1 << 26,), 5.0, device=device).sum().item()", 2)
    assert cluster.evaluate("kept[0].sum().item()", 0) == 3.0 * (1 << 22)
    cluster.execute("kept[0].mul_(2); kept.clear()", 0)
    cluster.execute(COUNTED, 2)
    cluster.execute(
        "y = rpc.rpc_sync('worker2', torch.neg, args=(torch.ones(1 << 20, device=device),))\n"
        "assert y.sum() == -(1 << 20)",
        0,
    )
