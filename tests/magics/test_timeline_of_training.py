"""`%%timeline` above DDP and FSDP2, which make no call of nbdist's: real workers, gloo."""

import json
import re

import pytest
from helpers.notebook.frontend import Notebook

MODEL = """%%remote
import time
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
data = DataLoader(TensorDataset(torch.randn(6, 8)), batch_size=2)

def train(model, optimizer):
    for (x,) in data:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def notebook():
    made = Notebook()
    try:
        made.run("%dist_init -n 2")
        made.model = re.escape(made.run(MODEL).name)
        yield made
    finally:
        made.close()


def shown(notebook, code):
    """The cell, and the timeline below it as text and as HTML."""
    cell = notebook.run(f"%%timeline\n{code}")
    (found,) = cell.displays
    return cell, found["text/plain"], found["text/html"]


def line_of(text, worker):
    (line,) = [line for line in text.splitlines() if line.startswith(f"{worker}: ")]
    return line


@pytest.mark.parametrize("wrapped", ["DistributedDataParallel(model)", "fully_shard(model, mesh=mesh)"])
def test_a_step_shows_its_collectives_passes_steps_and_batches(notebook, wrapped):
    notebook.run(
        "%%remote\nmesh = dist.device_mesh.init_device_mesh('cpu', (world_size,))\nmodel = torch.nn.Linear(8, 8)\n"
        f"model = {wrapped}\noptimizer = torch.optim.Adam(model.parameters())\ntrain(model, optimizer)"
    )
    cell, text, html = shown(notebook, "%%remote\ntrain(model, optimizer)")
    for worker in ("worker0", "worker1"):
        line = line_of(text, worker)
        for part in ("1 cell", "3 local backward passes", "3 optimizer steps", "3 batches loaded"):
            assert part in line, line
    assert re.search(r"group: \d+ collectives; worker\d came last to \d+", text)
    line = rf"The longest wait: \w+ float32\[[^;]*{notebook.model}:10; worker[01] came last: worker[01] waited"
    assert re.search(line, text)
    for name, number in (("local backward pass", 10), ("Adam.step", 11), ("next batch of a DataLoader", 9)):
        assert re.search(rf"{name} \({notebook.model}:{number}\), ", html)
    assert html.count(f'title="{cell.name}, ') == 2


def test_a_worker_that_comes_late_is_named_with_the_waits_and_the_line(notebook, tmp_path):
    code = "%%remote\nif rank == 1:\n    time.sleep(0.5)\ndist.all_reduce(torch.ones(1000))"
    cell = notebook.run(f"%%timeline {tmp_path / 'told.json'}\n{code}")
    text = cell.displays[0]["text/plain"]
    line = f"all_reduce float32[1000], 4.0 KB, {cell.name}:5; worker1 came last: worker0 waited "
    assert f"default group: 1 collective; worker1 came last to 1. The longest wait: {line}" in text
    waited = float(re.search(r"worker0 waited ([\d.]+) ms \(#", text)[1])
    assert waited > 100
    assert "1 wait; " in line_of(text, "worker0")
    assert " for others" in line_of(text, "worker0")
    assert "wait" not in line_of(text, "worker1")
    events = json.loads((tmp_path / "told.json").read_text())["traceEvents"]
    (collective,) = [each for each in events if each["ph"] == "X" and line in each["name"]]
    assert collective["dur"] == pytest.approx(waited * 1e3, abs=1e3)
    (wait,) = [each for each in events if each.get("args", {}).get("line") == f"{cell.name}:5"]
    assert wait["name"] == "all_reduce waits for worker1"


def test_a_send_with_its_receive_has_a_bar(notebook):
    cell = notebook.run(
        "%%timeline\n%%remote\nimport time\nfor n in range(3):\n"
        "    if rank == 0:\n        dist.send(torch.full((4,), float(n)), 1)\n"
        "    else:\n        time.sleep(0.05)\n        dist.recv(torch.empty(4), 0)\n"
    )
    text = cell.displays[-1]["text/plain"]
    assert "worker0 to worker1: 3 transfers; worker1 came last to 3. Furthest apart: worker0 send float32[4], " in text
    assert "wait" not in line_of(text, "worker0")
    assert "worker0 to worker1" in cell.displays[-1]["text/html"]


def test_a_collective_that_hangs_is_drawn_to_the_end_and_says_who_is_missing(notebook):
    notebook.run("told = cluster.timeline()")
    waits = notebook.run("%%remote -a 0\ndist.all_reduce(torch.ones(3))")
    text = notebook.run(
        "from nbdist.cluster.worker.flight_recorder import progress\n"
        "while not rpc.rpc_sync('worker0', progress)[1]: pass\n"
        "print(told.stop())"
    ).stdout
    notebook.run("%%remote 1\ndist.all_reduce(torch.ones(3))")
    missing = "worker1 had not come; it had not ended"
    assert f"Not ended: all_reduce float32[3], 12 B, {waits.name}:2; {missing} (#" in text
    assert "came last" not in text
    assert line_of(text, "worker0").startswith("worker0: 1 cell, ")  # it goes on
    assert f"{waits.name}, which goes on" in notebook.run("told").of("execute_result")[0]["data"]["text/html"]


def test_nothing_stays_after_a_timeline(notebook):
    code = (
        "from torch.optim import optimizer as o\nfrom nbdist import trace\n"
        "kinds = len(o._global_optimizer_pre_hooks) + len(o._global_optimizer_post_hooks), len(trace.listeners)\n"
        "loads = torch.utils.data.dataloader._BaseDataLoaderIter.__next__.__code__.co_filename\n"
        "print(kinds, loads.endswith('torch/utils/data/dataloader.py'))"
    )
    _, text, _ = shown(notebook, f"%%remote 0\n{code}")
    assert "1 cell" in text
    during = notebook.run(f"%%timeline\n%%remote 0\n{code}").stdout
    after = notebook.run(f"%%remote 0\n{code}").stdout
    assert "(2, 1) False" in during
    assert "(0, 0) True" in after
