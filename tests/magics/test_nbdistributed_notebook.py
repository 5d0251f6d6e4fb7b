"""A notebook for nbdistributed: the name of the extension changes, one `%dist_mode -e` is added, nothing else."""

from __future__ import annotations

import re

import pytest
from helpers.notebook.frontend import Notebook

BEFORE = [
    """\
%load_ext nbdistributed
%dist_init -n 2""",
    """\
import torch
import torch.distributed as dist

print(f"Rank {rank} of {world_size} on {device}")""",
    # The last expression shows itself.
    "rank * 10",
    # A collective: every worker has contributed its own.
    """\
x = torch.full((3,), float(rank + 1), device=device)
dist.all_reduce(x)
print(f"Sum: {x.tolist()}")""",
    # Some of the workers.
    """\
%%rank[0]
secret = torch.arange(4.0)
print(f"Made on rank {rank}")""",
    """\
%%rank[0-1]
if rank != 0:
    secret = torch.zeros(4)
dist.broadcast(secret, src=0)
print(f"Rank {rank} has {secret.sum().item()}")""",
    """\
%%rank [1]
rank, secret[-1].item()""",
    "%sync",
    # Training on a share of the data each, gradients averaged by hand.
    """\
torch.manual_seed(0)
inputs = torch.randn(64, 8)
targets = inputs.sum(1, keepdim=True)
share = slice(rank * 32, (rank + 1) * 32)
model = torch.nn.Linear(8, 1).to(device)
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)""",
    """\
losses = []
for step in range(50):
    model.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs[share].to(device)), targets[share].to(device))
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.data -= 0.1 * parameter.grad / world_size
    dist.all_reduce(loss.data)
    losses.append(loss.item() / world_size)
if rank == 0:
    print(f"Loss: {losses[0]:.1f} -> {losses[-1]:.3f}")""",
    """\
parts = [torch.empty_like(model.weight.data) for _ in range(world_size)]
dist.all_gather(parts, model.weight.data)
all(torch.equal(part, parts[0]) for part in parts)""",
    "%dist_status",
    "# nothing to run here",
    "%dist_mode",
    # Back in the notebook.
    "%dist_mode -d",
    """\
here = sum(range(5))
here""",
    """\
%%distributed
'here' in globals(), len(losses)""",
    "%dist_mode --enable",
    """\
model.weight.shape""",
    "%dist_mode --disable",
    "%dist_shutdown",
    "%dist_status",
    # A fresh start, of another size; and out again.
    """\
%dist_init --num-processes 3""",
    """\
%%distributed
t = torch.ones(1, device=device)
dist.all_reduce(t)
print(int(t), __rank__ < __world_size__)""",
    "%dist_reset",
    "6 * 7",
]


def changed(cells: list[str]) -> list[str]:
    """The same notebook for nbdist: its name, and one more line."""
    assert cells[0].startswith("%load_ext nbdistributed\n")
    return [cells[0].replace("nbdistributed", "nbdist") + "\n%dist_mode -e", *cells[1:]]


def shown(cell) -> str:
    """What a reader sees below a cell, starting bars and status aside."""
    return (cell.stdout + (cell.result or "")).strip()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "watched", [pytest.param(True, id="watched"), pytest.param(False, id="headless", marks=pytest.mark.soak)]
)
def test_it_runs(watched):
    outputs = {}
    with Notebook(load=False, watched=watched) as notebook:
        for code in changed(BEFORE):
            outputs.setdefault(code, []).append(notebook.run(code, timeout=60))
        pids = set(re.findall(r"worker\d +\d +(\d+)", outputs["%dist_status"][0].result))

    def output(beginning: str, occurrence: int = 0) -> str:
        code = beginning if beginning in outputs else next(code for code in outputs if code.startswith(beginning))
        return shown(outputs[code][occurrence])

    assert len(outputs) == len(set(BEFORE))
    assert output("import torch") == "[worker0] Rank 0 of 2 on cpu\n[worker1] Rank 1 of 2 on cpu"
    assert output("rank * 10") == "[worker0] 0\n[worker1] 10"
    assert output("x = torch.full") == "[worker0,1] Sum: [3.0, 3.0, 3.0]"
    assert output("%%rank[0]\n") == "Made on rank 0"
    assert output("%%rank[0-1]\n") == "[worker0] Rank 0 has 6.0\n[worker1] Rank 1 has 6.0"
    assert output("%%rank [1]\n") == "(1, 3.0)"
    assert output("%sync") == "2 workers are in step."
    first, last = map(float, re.fullmatch(r"\[worker0\] Loss: (\S+) -> (\S+)", output("losses = []")).groups())
    assert last < first / 100
    assert output("parts = ") == "[worker0,1] True"
    assert len(pids) == 2
    assert output("# nothing") == ""
    assert output("%dist_mode") == "Plain cells run on all workers."
    assert output("%dist_mode -d") == "Plain cells run here."
    assert output("here = ") == "10"
    assert output("%%distributed\n'here'") == "[worker0,1] (False, 50)"
    assert output("model.weight.shape") == "[worker0,1] torch.Size([1, 8])"
    assert output("%dist_shutdown") == "0 processes left."
    assert output("%%distributed\nt = ") == "[worker0-2] 3 True"
    assert output("%dist_reset") == "0 processes left."
    assert output("6 * 7") == "42"
