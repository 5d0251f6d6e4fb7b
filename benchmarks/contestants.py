"""Runs the libraries that `rpc.py` compares, each as ``contestants.py NAME`` with two processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import messages
from harness import Case, each

MEGABYTE = 1 << 20


def nothing() -> None:
    """The empty call."""


def identity(value: Any) -> Any:
    """The echo."""
    return value


_kept: dict[str, Any] = {"busy": False, "over": False}


def busy(value: bool) -> None:
    """Have the main thread of this worker run Python, or stop it."""
    _kept["busy"] = value


def end() -> None:
    """The worker is no longer needed."""
    _kept["over"] = True


def barriers(count: int) -> None:
    """One after the other, together with all other workers."""
    for _ in range(count):
        _kept["barrier"](_kept["names"])


def torch_like(
    rpc: Any, wait_all: Callable[[list[Any]], Any], options: Any, version: str, counted: bool = False
) -> None:
    """nbdist and torch, which have the same interface."""
    import torch

    agents = int(os.environ.get("BENCH_AGENTS", "2"))
    path = tempfile.mktemp()
    servers = [
        subprocess.Popen([sys.executable, __file__, sys.argv[1], "serve", str(rank), path], stdin=subprocess.DEVNULL)
        for rank in range(1, agents)
    ]
    rpc.init_rpc("worker0", rank=0, world_size=agents, rpc_backend_options=options(path))
    _kept["names"] = [f"worker{rank}" for rank in range(agents)]
    small, one, many = torch.ones(2), torch.ones(MEGABYTE // 4), torch.ones(64 * MEGABYTE // 4)

    def outstanding(count: int) -> list[float]:
        start = time.perf_counter()
        wait_all([rpc.rpc_async("worker1", nothing) for _ in range(count)])
        return [(time.perf_counter() - start) / count]

    def all_together(count: int) -> list[float]:
        start = time.perf_counter()
        others = [rpc.rpc_async(f"worker{rank}", barriers, args=(count,), timeout=0) for rank in range(1, agents)]
        barriers(count)
        wait_all(others)
        return [(time.perf_counter() - start) / count / agents]

    def while_busy(case: Case) -> Case:
        def run(count: int) -> list[float]:
            rpc.rpc_sync("worker1", busy, args=(True,))
            time.sleep(0.1)  # until it has seen that
            try:
                return case(count)
            finally:
                rpc.rpc_sync("worker1", busy, args=(False,))

        return run

    # The same function under the name that the program itself has in both processes.
    of_main = sys.modules["__main__"].nothing
    cases = {
        "empty call": each(lambda: rpc.rpc_sync("worker1", nothing)),
        "empty call of `__main__`": each(lambda: rpc.rpc_sync("worker1", of_main)),
        "torch.add, small tensor": each(lambda: rpc.rpc_sync("worker1", torch.add, args=(small, 1))),
        "remote().to_here()": each(lambda: rpc.remote("worker1", torch.add, args=(small, 1)).to_here()),
        "5,000 outstanding, per call": outstanding,
        "echo 1 MB": each(lambda: rpc.rpc_sync("worker1", identity, args=(one,))),
        "echo 64 MB": each(lambda: rpc.rpc_sync("worker1", identity, args=(many,))),
        "a barrier, per agent": all_together,
    }
    cases |= {f"{name}, busy": while_busy(case) for name, case in cases.items()}
    workers = _kept["names"][1:]
    harness.serve(version, cases, messages.counter(rpc, workers) if counted else None)
    for rank in range(1, agents):
        rpc.rpc_sync(f"worker{rank}", end)
    rpc.shutdown()
    for server in servers:
        server.wait()
    Path(path).unlink(missing_ok=True)


def serve_torch_like(rpc: Any, options: Any) -> None:
    """The other process of `torch_like`."""
    rank, path = int(sys.argv[3]), sys.argv[4]
    agents = int(os.environ.get("BENCH_AGENTS", "2"))
    _kept["names"] = [f"worker{number}" for number in range(agents)]
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=agents, rpc_backend_options=options(path))
    number = 0
    while not _kept["over"]:
        if _kept["busy"]:
            for _ in range(1000):
                number = (number * 5 + 3) % 1000003
        else:
            time.sleep(0.01)
    rpc.shutdown()


def nbdist() -> None:
    """This project."""
    import torch

    import nbdist
    from nbdist import rpc
    from nbdist.compat.rpc.api import _barrier

    _kept["barrier"] = _barrier

    def options(path: str) -> Any:
        return rpc.RpcBackendOptions(init_method=f"file://{path}", rpc_timeout=300)

    if "serve" in sys.argv:
        serve_torch_like(rpc, options)
    else:
        torch_like(rpc, torch.futures.wait_all, options, nbdist.__version__, counted=True)


def tensorpipe() -> None:
    """torch.distributed.rpc's own backend."""
    import torch
    import torch.distributed.rpc as rpc
    from torch.distributed.rpc.api import _barrier

    _kept["barrier"] = _barrier

    def options(path: str) -> Any:
        return rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=300)

    if "serve" in sys.argv:
        serve_torch_like(rpc, options)
    else:
        torch_like(rpc, torch.futures.wait_all, options, torch.__version__)


def zeromq() -> None:
    """Bare ZeroMQ ping-pong: PUSH and PULL, one thread each side, the same number of bytes; no RPC at all."""
    import zmq

    folder = os.environ.get("BENCH_FOLDER") or tempfile.mkdtemp()
    here, there = f"ipc://{folder}/0", f"ipc://{folder}/1"
    serving = "serve" in sys.argv
    if serving:
        here, there = there, here
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.set_hwm(0)
    outbox.set_hwm(0)
    inbox.bind(here)
    outbox.connect(there)
    if serving:
        while (message := inbox.recv_multipart())[0] != b"end":
            outbox.send_multipart(message)
        return
    server = subprocess.Popen(
        [sys.executable, __file__, "zeromq", "serve"],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "BENCH_FOLDER": folder},
    )

    def once() -> None:
        outbox.send_multipart([b"x" * 60, b"y" * 30])
        inbox.recv_multipart()

    harness.serve(zmq.zmq_version(), {"empty call": each(once)})
    outbox.send_multipart([b"end"])
    server.wait()


def ray() -> None:
    """Ray: an actor in another process."""
    import ray
    import torch

    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")

    @ray.remote
    class Actor:
        def nothing(self) -> None:
            pass

        def add(self, a: Any, b: Any) -> Any:
            return torch.add(a, b)

        def identity(self, value: Any) -> Any:
            return value

    actor = Actor.remote()
    _by_methods(ray.__version__, lambda name, *args: ray.get(getattr(actor, name).remote(*args)), None)


def dask() -> None:
    """Dask: an actor in another process."""
    import distributed
    import torch

    class Actor:
        def nothing(self) -> None:
            pass

        def add(self, a: Any, b: Any) -> Any:
            return torch.add(a, b)

        def identity(self, value: Any) -> Any:
            return value

    client = distributed.Client(n_workers=1, threads_per_worker=2, processes=True, dashboard_address=None)
    actor = client.submit(Actor, actor=True).result()
    _by_methods(distributed.__version__, lambda name, *args: getattr(actor, name)(*args).result(), client.close)


def ipyparallel() -> None:
    """ipyparallel: one engine, a direct view."""
    import ipyparallel
    import torch

    cluster = ipyparallel.Cluster(n=1, log_level=40)
    view = cluster.start_and_connect_sync()[0]
    functions = {"nothing": nothing, "add": torch.add, "identity": identity}
    _by_methods(
        ipyparallel.__version__, lambda name, *args: view.apply_sync(functions[name], *args), cluster.stop_cluster_sync
    )


def rpyc() -> None:
    """RPyC: a classic server in another process; values are pickled to be copied, as the others copy them."""
    import pickle

    import rpyc
    import rpyc.utils.classic
    import torch

    connection = rpyc.classic.connect_subproc(str(Path(sys.executable).with_name("rpyc_classic")))
    sys_there = connection.modules.sys
    sys_there.path.insert(0, str(Path(__file__).parent))
    there = connection.modules.rpyc_side

    def call(name: str, *args: Any) -> Any:
        return pickle.loads(there.call(name, pickle.dumps(args)))

    torch.add(torch.ones(1), 1)
    _by_methods(str(rpyc.__version__), call, connection.close)


def monarch() -> None:
    """Monarch: an actor in another process."""
    from importlib.metadata import version

    import torch
    from monarch.actor import Actor, endpoint, this_host

    class Server(Actor):
        @endpoint
        def nothing(self) -> None:
            pass

        @endpoint
        def add(self, a: Any, b: Any) -> Any:
            return torch.add(a, b)

        @endpoint
        def identity(self, value: Any) -> Any:
            return value

    server = this_host().spawn_procs(per_host={"gpus": 1}).spawn("server", Server)
    _by_methods(version("torchmonarch"), lambda name, *args: getattr(server, name).call_one(*args).get(), None)


def _by_methods(version: str, call: Callable[..., Any], close: Callable[[], Any] | None) -> None:
    import torch

    small, one, many = torch.ones(2), torch.ones(MEGABYTE // 4), torch.ones(64 * MEGABYTE // 4)
    harness.serve(
        version,
        {
            "empty call": each(lambda: call("nothing")),
            "torch.add, small tensor": each(lambda: call("add", small, 1)),
            "echo 1 MB": each(lambda: call("identity", one)),
            "echo 64 MB": each(lambda: call("identity", many)),
        },
    )
    if close is not None:
        close()


if __name__ == "__main__":
    import contestants  # functions must belong to an importable module, not to __main__

    getattr(contestants, sys.argv[1])()
