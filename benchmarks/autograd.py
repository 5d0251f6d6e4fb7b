"""Measures backward passes over workers: nbdist beside torch's own distributed autograd, in pairs (see `pairs`).

Four workers, one process each. Then, for nbdist alone, what SMART costs over FAST, and what its engine costs over
torch's on one worker, without any call.
"""

from __future__ import annotations

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
import pairs
from harness import Case, Contestant, each
from pairs import Bound, Pair, Turn

WORLD = 4
STEP = "remote Linear(64, 64): forward, backward, step"
CASES = {
    STEP: 100,
    "ten hops, SMART": 30,
    "ten hops, FAST": 30,
    "test_multiple_backward, a pass": 250,
    "16 MB activations over 4 workers": 5,
    "four-stage MLP, a step": 40,
}
BOUNDS = {
    STEP: Bound(0.9, 0.6),
    "ten hops, SMART": Bound(0.9, 0.6),
    "ten hops, FAST": Bound(0.8, 0.5),
    "test_multiple_backward, a pass": Bound(2.5),
    "16 MB activations over 4 workers": Bound(0.5),
    "four-stage MLP, a step": Bound(1.5),
}
CPU = {STEP: ("CPU of all sides, a step of the remote Linear", Bound(0.5, 0.3))}

PASSES = pairs.same_cases(CASES, "nbdist", "torch", BOUNDS, CPU)

OWN = [
    Pair(name, Turn("nbdist", ours, count), Turn("nbdist", theirs, count), bound)
    for name, ours, theirs, count, bound in (
        ("SMART beside FAST, ten hops", "ten hops, SMART", "ten hops, FAST", 30, Bound(1.3)),
        ("SMART beside FAST, four-stage MLP", "four-stage MLP, a step", "four-stage MLP, FAST", 40, Bound(1.3)),
        (
            "our engine beside torch's, transformer layer",
            "transformer layer, engine",
            "transformer layer, native",
            40,
            Bound(1.4),
        ),
    )
]


# --- what runs on the workers ---------------------------------------------------------------------

_kept: dict[str, Any] = {}


def make(name: str, width: int, layers: int) -> Any:
    """A stage, kept by name; references to its parameters."""
    import torch

    modules: list[Any] = []
    for _ in range(layers):
        modules += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    _kept[name] = torch.nn.Sequential(*modules)
    return [_kept["rpc"].RRef(parameter) for parameter in _kept[name].parameters()]


def stage(name: str, x: Any) -> Any:
    """Run a stage."""
    return _kept[name](x)


def hop(x: Any) -> Any:
    """Next to nothing."""
    return x + 1


def scale(x: Any) -> Any:
    """One product of large tensors."""
    import torch

    if "scale" not in _kept:
        _kept["scale"] = torch.ones(1, requires_grad=True)
    return x * _kept["scale"]


def multiple_backward(rank: int, count: int) -> None:
    """What torch's test does: pass after pass over one graph."""
    import torch

    autograd, rpc = _kept["autograd"], _kept["rpc"]
    a, b = (torch.rand(3, 3, requires_grad=True) for _ in range(2))
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(f"worker{(rank + 1) % WORLD}", torch.add, args=(a, b)).sum()
        for _ in range(count):
            autograd.backward(context_id, [loss], retain_graph=True)


def cases(rpc: Any, autograd: Any, optimizer: Any, ours: bool) -> dict[str, Any]:
    """What rank 0 measures."""
    import torch

    torch.manual_seed(0)
    linear = optimizer(torch.optim.SGD, rpc.rpc_sync("worker1", make, args=("linear", 64, 1)), lr=0.01)
    parameters = [rref for i in range(WORLD) for rref in rpc.rpc_sync(f"worker{i}", make, args=("mlp", 256, 2))]
    mlp = optimizer(torch.optim.SGD, parameters, lr=0.01)
    x64, x256 = torch.randn(8, 64), torch.randn(32, 256)
    large = torch.ones(16 * (1 << 20) // 4, requires_grad=True)

    def one_linear() -> None:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", stage, args=("linear", x64)).sum()
            autograd.backward(context_id, [loss])
            linear.step(context_id)

    def hops(**options: Any) -> None:
        with autograd.context() as context_id:
            x = torch.ones(8, requires_grad=True)
            for i in range(10):
                x = rpc.rpc_sync(f"worker{1 + i % (WORLD - 1)}", hop, args=(x,))
            autograd.backward(context_id, [x.sum()], **options)

    def many(count: int) -> list[float]:
        start = time.perf_counter()
        others = [rpc.rpc_async(f"worker{i}", multiple_backward, args=(i, count), timeout=0) for i in range(1, WORLD)]
        multiple_backward(0, count)
        for other in others:
            other.wait()
        return [(time.perf_counter() - start) / count]

    def activations() -> None:
        with autograd.context() as context_id:
            x = large
            for i in range(1, WORLD):
                x = rpc.rpc_sync(f"worker{i}", scale, args=(x,))
            autograd.backward(context_id, [x.sum()])

    def four_stages(**options: Any) -> None:
        with autograd.context() as context_id:
            x = x256
            for i in range(WORLD):
                x = rpc.rpc_sync(f"worker{i}", stage, args=("mlp", x))
            autograd.backward(context_id, [x.square().mean()], **options)
            mlp.step(context_id)

    # torch has one mode, which is FAST: its hops are the same program in both cases.
    found = {
        STEP: each(one_linear),
        "ten hops, SMART": each(lambda: hops(mode="smart")) if ours else each(hops),
        "ten hops, FAST": each(lambda: hops(mode="fast")) if ours else each(hops),
        "test_multiple_backward, a pass": many,
        "16 MB activations over 4 workers": each(activations),
        "four-stage MLP, a step": each(four_stages),
    }
    if ours:
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0)
        source = torch.randn(16, 8, 64)

        def transformer(backward: Callable[[Any], None]) -> Case:
            def run(count: int) -> list[float]:
                times = []
                for _ in range(count):
                    y = source
                    for _ in range(5):
                        y = layer(y)
                    loss = y.square().mean()
                    start = time.perf_counter()
                    backward(loss)
                    times.append(time.perf_counter() - start)
                    layer.zero_grad()
                return times

            return run

        def engine(loss: Any) -> None:
            with autograd.context() as context_id:
                autograd.backward(context_id, [loss])

        found |= {
            "four-stage MLP, FAST": each(lambda: four_stages(mode="fast")),
            "transformer layer, native": transformer(lambda loss: loss.backward()),
            "transformer layer, engine": transformer(engine),
        }
    return found


def contestant(name: str, rank: int, path: str) -> None:
    """One process of a contestant."""
    import torch

    torch.set_num_threads(1)
    if name == "nbdist":
        import nbdist
        from nbdist import autograd, optim, rpc

        options: Any = rpc.RpcBackendOptions(init_method=f"file://{path}", rpc_timeout=300)
        version, optimizer = nbdist.__version__, optim.DistributedOptimizer
    else:
        import torch.distributed.autograd as autograd  # type: ignore[no-redef]
        import torch.distributed.rpc as rpc  # type: ignore[no-redef]
        from torch.distributed.optim import DistributedOptimizer as optimizer

        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=300)
        version = torch.__version__
    _kept.update(rpc=rpc, autograd=autograd)  # before anybody can ask for it
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORLD, rpc_backend_options=options)
    if rank == 0:
        ours = name == "nbdist"
        counter = messages.counter(rpc, [f"worker{number}" for number in range(1, WORLD)]) if ours else None
        harness.serve(version, cases(rpc, autograd, optimizer, ours), counter)
    rpc.shutdown()


def lead(name: str) -> None:
    """Rank 0, and the processes of the others."""
    path = tempfile.mktemp()
    command = [sys.executable, "-c", "import sys, autograd_benchmark as b; b.contestant(*eval(sys.argv[1]))"]
    others = [subprocess.Popen([*command, repr((name, rank, path))], stdin=subprocess.DEVNULL) for rank in range(1, 4)]
    import autograd_benchmark  # this file, by the name by which the others know it

    autograd_benchmark.contestant(name, 0, path)
    for other in others:
        other.wait()
    Path(path).unlink(missing_ok=True)


def start(name: str, folder: str, label: str | None = None, python: str = sys.executable) -> Contestant:
    """Start a contestant by name, called ``label`` in the tables, whose library is installed for ``python``.

    Functions travel by the name of their module, so all import this file by one, a link in ``folder``.
    """
    link = Path(folder) / "autograd_benchmark.py"
    if not link.exists():
        link.symlink_to(Path(__file__).resolve())
    path = harness.search_path(folder, Path(__file__).parent, python=python)
    return Contestant(label or name, [python, __file__, "--contestant", name], {"PYTHONPATH": path})


def main() -> None:
    """Measure."""
    parser = harness.paired_arguments(__doc__ or "")
    parser.add_argument("--contestant")
    chosen = parser.parse_args()
    if chosen.contestant:
        lead(chosen.contestant)
        return
    tables = {"passes": PASSES, "own": OWN}
    with tempfile.TemporaryDirectory() as folder:
        racing = {name: start(name, folder) for name in ("nbdist", "torch")}
        pinned = harness.pin(racing.values())
        rounds = {table: harness.measure(racing, tables[table], chosen.rounds, chosen.seed) for table in tables}
        lines = {table: harness.lines_of(racing, tables[table], rounds[table]) for table in tables}
        for contestant in racing.values():
            contestant.close()
    print(f"{harness.machine()}\n\n{harness.conditions(racing, chosen, pinned)}\n")
    print(f"{pairs.comparison(lines['passes'])}\n\n{pairs.costs(lines['passes'])}\n\nnbdist alone:\n")
    print(pairs.comparison(lines["own"], "the one", "the other"))
    harness.write(harness.kept(chosen, rounds, lines), chosen.json)


if __name__ == "__main__":
    main()
