"""A tour of nbdist.rpc in one script: three processes on this host, and what each call shows.

Run it with ``python examples/demo.py`` where nbdist is installed. The same and more, in a notebook: ``make demo``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import nbdist
from nbdist import rpc

WORLD = 3


class Counter:
    """Something that lives on one worker and is used from others."""

    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, by: int) -> int:
        """Count on."""
        self.value += by
        return self.value


def where_am_i() -> str:
    """Which worker runs this."""
    return rpc.get_worker_info().name


def ask_another(other: str) -> str:
    """A call inside of a call."""
    return f"{where_am_i()} asked {rpc.rpc_sync(other, where_am_i)}"


def divide(a: int, b: int) -> float:
    """Fails for b = 0."""
    return a / b


@rpc.functions.async_execution
def add_three(to: str, x: torch.Tensor, y: int, z: int) -> Any:
    """Returns a future: this worker's thread is free while ``to`` computes."""
    return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda done: done.wait() + z)


def show(what: str, run: Callable[[], Any]) -> None:
    """Print a call and what came of it."""
    try:
        outcome = run()
    except Exception as error:
        print(f">>> {what}\n{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", []):
            print("    " + note.replace("\n", "\n    "))
    else:
        print(f">>> {what}\n{outcome!r}")


def driver(workers: list[Any]) -> None:
    """What worker0 does."""
    x = torch.ones(2)
    show('rpc.rpc_sync("worker1", torch.add, args=(x, 3))', lambda: rpc.rpc_sync("worker1", torch.add, args=(x, 3)))
    first = rpc.rpc_async("worker1", torch.add, args=(x, 3))
    second = rpc.rpc_async("worker2", min, args=(1, 2))
    show("first.wait() + second.wait()      # two calls at once", lambda: first.wait() + second.wait())
    show(
        'rpc.rpc_sync("worker1", ask_another, args=("worker2",))',
        lambda: rpc.rpc_sync("worker1", ask_another, args=("worker2",)),
    )
    factor = 5
    show(
        'rpc.rpc_sync("worker2", lambda v: v * factor, args=(x,))',
        lambda: rpc.rpc_sync("worker2", lambda v: v * factor, args=(x,)),
    )
    show(
        'rpc.rpc_sync("worker1", add_three, args=("worker2", x, 1, 1))',
        lambda: rpc.rpc_sync("worker1", add_three, args=("worker2", x, 1, 1)),
    )

    rref = rpc.remote("worker1", torch.randn, args=(128, 64))
    rref.rpc_sync().size()
    show('rref = rpc.remote("worker1", torch.randn, args=(128, 64)); rref', lambda: rref)
    counter = rpc.remote("worker1", Counter, args=(40,))
    show("counter.rpc_sync().add(1)", lambda: counter.rpc_sync().add(1))
    show(
        'rpc.rpc_sync("worker2", Counter.add, …)   # worker2 uses the counter on worker1',
        lambda: rpc.rpc_sync("worker2", lambda: counter.rpc_sync().add(1)),
    )

    show('rpc.rpc_sync("worker1", divide, args=(1, 0))', lambda: rpc.rpc_sync("worker1", divide, args=(1, 0)))
    show(
        'rpc.rpc_sync("worker1", time.sleep, args=(2,), timeout=0.5)',
        lambda: rpc.rpc_sync("worker1", time.sleep, args=(2,), timeout=0.5),
    )
    show('rpc.rpc_sync("worker7", where_am_i)', lambda: rpc.rpc_sync("worker7", where_am_i))

    print("\n... and now worker2 is killed (SIGKILL) while it runs something for us:")
    waiting = rpc.rpc_async("worker2", time.sleep, args=(60,))
    rpc.rpc_sync("worker2", where_am_i)
    workers[1].kill()
    start = time.perf_counter()
    show("waiting.wait()", waiting.wait)
    print(f"    (after {(time.perf_counter() - start) * 1e3:.0f} ms)")
    show(
        'rpc.rpc_sync("worker1", where_am_i)         # the others work on', lambda: rpc.rpc_sync("worker1", where_am_i)
    )


def member(rank: int, store: str, workers: list[Any]) -> None:
    """What every process does."""
    options = rpc.RpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORLD, rpc_backend_options=options)
    if rank == 0:
        driver(workers)
    with contextlib.suppress(nbdist.WorkerLost):  # worker1 is told, here too, that worker2 was lost meanwhile
        rpc.shutdown()


def main() -> None:
    """Start the workers, and be worker0."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"nbdist {nbdist.__version__}, torch {torch.__version__}: {WORLD} processes\n")
    store = tempfile.mktemp(prefix="nbdist-demo-")
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=member, args=(rank, store, []), daemon=True) for rank in range(1, WORLD)]
    for worker in workers:
        worker.start()
    try:
        member(0, store, workers)
    finally:
        for worker in workers:
            worker.join(10)
        if os.path.exists(store):
            os.unlink(store)


if __name__ == "__main__":
    main()
