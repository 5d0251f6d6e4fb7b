"""Options of a cluster, and settings of torch, that change how workers use a GPU."""

import time

import pytest
import torch

import nbdist
from nbdist import rpc
from nbdist.views.workers.panel import Panel

COUNTED = """
from nbdist.rpc import api
def counted(name):
    return api.current_agent().statistics()[name]
"""


def test_isolated_workers_share_the_gpu_that_each_sees():
    with nbdist.Cluster(2, gpu_ids=(0,), isolate_gpus=True) as cluster:
        assert cluster.evaluate("(torch.cuda.device_count(), str(device), gpu_id)") == [(1, "cuda:0", 0)] * 2
        cluster.execute(COUNTED)
        cluster.execute(
            "x = torch.randn(1 << 20, device=device)\n"
            "y = rpc.rpc_sync('worker1', torch.neg, args=(x,))\n"
            "assert y.device == device and torch.equal(y, -x) and counted('gpu_arena_bytes') > 0",
            0,
        )
        assert torch.equal(cluster.pull("y", 0), -cluster.pull("x", 0))


def test_device_maps_of_a_cluster():
    """A map from the GPU to itself is what a cluster has anyway."""
    maps = {name: {"cuda:0": "cuda:0"} for name in ("worker0", "worker1")}
    with nbdist.Cluster(2, gpu_ids=(0,), rpc=rpc.RpcBackendOptions(device_maps=maps)) as cluster:
        cluster.execute(
            "x = torch.randn(1 << 20, device=device)\n"
            "for value in (x, x[:10]):\n"
            "    y = rpc.rpc_sync('worker1', torch.neg, args=(value,))\n"
            "    assert y.device == device and torch.equal(y, -value)",
            0,
        )
    with (
        pytest.raises(nbdist.NbdistError, match="invalid indices"),
        nbdist.Cluster(2, gpu_ids=(0,), rpc=rpc.RpcBackendOptions(device_maps={"worker1": {"cuda:0": "cuda:7"}})),
    ):
        pass


def test_the_memory_is_shared_with_expandable_segments(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with nbdist.Cluster(2, gpu_ids=(0,)) as cluster:
        cluster.execute(COUNTED)
        cluster.execute(
            "x = torch.randn(1 << 20, device=device)\n"
            "y = rpc.rpc_sync('worker1', torch.neg, args=(x,))\n"
            "assert y.device == device and torch.equal(y, -x) and counted('gpu_arena_bytes') > 0",
            0,
        )


def test_the_panel_says_how_busy_the_gpu_is():
    pytest.importorskip("pynvml")
    with nbdist.Cluster(1, gpu_ids=(0,)) as cluster:
        panel = Panel(cluster)
        code = "a = torch.randn(4096, 4096, device=device)\nwhile True:\n    a = (a @ a).clamp(-1, 1)"
        cell = cluster.execute(code, block=False, quiet=True)
        busy, deadline = 0, time.monotonic() + 20
        while busy < 50 and time.monotonic() < deadline:
            time.sleep(0.5)
            panel.sample()
            busy = panel.rows[0].report.gpu_busy or 0
        assert 50 <= busy <= 100
        assert panel.rows[0].report.gpu_memory > 64 << 20
        cluster.interrupt()
        cell.error()


def test_a_graph_is_captured_and_replayed_in_a_cell_between_calls():
    with nbdist.Cluster(2, gpu_ids=(0,)) as cluster:
        cluster.execute(
            "x = torch.zeros(1 << 20, device=device)\n"
            "rpc.rpc_sync('worker1', torch.neg, args=(x,))\n"
            "y = x * 2\n"
            "torch.cuda.synchronize()\n"
            "graph = torch.cuda.CUDAGraph()\n"
            "with torch.cuda.graph(graph):\n"
            "    y = x * 2\n"
            "for n in range(5):\n"
            "    x.fill_(n)\n"
            "    graph.replay()\n"
            "    z = rpc.rpc_sync('worker1', torch.neg, args=(y,))\n"
            "    assert torch.equal(z, torch.full_like(z, -2.0 * n))",
            0,
        )


def test_the_notebook_may_use_the_gpu_too():
    x = torch.randn(1 << 20, device="cuda:0")
    with nbdist.Cluster(1, gpu_ids=(0,)) as cluster:
        cluster.push({"x": x}, 0)
        assert cluster.evaluate("str(x.device)", 0) == "cuda:0"
        found = cluster.pull("x", 0)
        assert torch.equal(found.to("cuda:0"), x)


def test_many_threads_call_with_tensors_on_the_gpu():
    with nbdist.Cluster(2, gpu_ids=(0,)) as cluster:
        cluster.execute(
            "import threading\n"
            "wrong = []\n"
            "def work(seed):\n"
            "    with torch.cuda.stream(torch.cuda.Stream()):\n"
            "        for n in range(20):\n"
            "            x = torch.full((1 << 18,), float(seed * 100 + n), device=device)\n"
            "            y = rpc.rpc_sync('worker1', torch.mul, args=(x, 2))\n"
            "            if not bool((y == 2.0 * (seed * 100 + n)).all()):\n"
            "                wrong.append((seed, n))\n"
            "threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]\n"
            "for thread in threads: thread.start()\n"
            "for thread in threads: thread.join()\n"
            "assert not wrong, wrong",
            0,
        )
