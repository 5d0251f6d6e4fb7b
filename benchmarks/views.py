"""What the views cost, and how soon they act: a real JupyterLab in a real browser, over real workers.

A training step beside an open view is compared with one beside none, turn by turn in one notebook. ``--minutes 10``
also has a loop train for that long under the panel and a watched cell, and tells what has grown meanwhile: the kernel,
the page, the file. Needs Chromium.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import harness
from helpers.notebook import browser

ROOT = Path(__file__).parent.parent

START = f"""
import json, sys, time
sys.path.insert(0, {str(ROOT / "notebooks")!r})
%load_ext nbdist
%dist_init -n 2 --seed 0 --backend none
import torch
"""
TRAIN = """
from models import resnet
from torch import nn
from nbdist.nn import Pipeline
from nbdist.optim import DistributedOptimizer

torch.manual_seed(0)
images = torch.randn(16, 3, 32, 32)
labels = nn.functional.one_hot(torch.randint(1000, (16,)), 1000).float()
pipe = Pipeline(resnet.resnet50(), ["worker0", "worker1"], at=["layer3"], micro_batches=4)
optimizer = DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.05)
times = {"none": [], "watch": [], "panel": [], "after": [], "display": []}

def train():
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [nn.functional.mse_loss(pipe(images), labels)])
        optimizer.step(context_id)

def turn(name, seconds):
    begun, count = time.perf_counter(), 0
    while time.perf_counter() < begun + seconds:
        train()
        count += 1
    times[name].append((time.perf_counter() - begun) / count)

for _ in range(3):
    train()
"""
TINY = """
def twice(x):
    return (x * 2).tanh()

def loop(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        x = torch.ones(4, requires_grad=True)
        with dist_autograd.context() as context_id:
            y = rpc.rpc_sync("worker0", twice, args=(x,))
            dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", twice, args=(y,)).sum()])
"""
DISPLAY = """
from nbdist.views.displays import _show
many = [rpc.remote("worker0", int, args=(n,)) for n in range(60)]
for rref in many:
    rref.to_here()
for rref in many:
    begun = time.perf_counter()
    _show(rref)
    times["display"].append(time.perf_counter() - begun)
"""
CLEAR = """(index) => {
    const app = window.jupyterapp ?? window.jupyterlab;
    app.shell.currentWidget.content.widgets[index].model.outputs?.clear();
}"""
"""As a user clears the output of a cell: its view is gone from the page."""
CLICK = """async ([index, name, selector]) => {
    const cell = document.querySelectorAll('.jp-Notebook .jp-Cell')[index];
    const button = [...cell.querySelectorAll('button')].find((each) => each.textContent === name);
    const begun = performance.now();
    button.click();
    while (!cell.querySelector(selector)) await new Promise((then) => setTimeout(then, 1));
    return performance.now() - begun;
}"""
LIMITS = {"watch": 1.05, "panel": 1.05, "after": 1.0, "display": 1e-3, "pause": 0.1, "layout": 1.0}


def measure_cost(rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of a training step beside each view, and of the first display of a reference."""
    turns = {name: f"turn({name!r}, {seconds})" for name in ("none", "watch", "panel", "after")}
    cells = [
        START + TRAIN,
        turns["none"],
        f"%%watch\n{turns['watch']}",
        "%dist_panel",
        turns["panel"],
        turns["after"],
        DISPLAY,
        "print('TOLD' + json.dumps(times) + 'END')",
    ]
    with tempfile.TemporaryDirectory() as folder, browser.notebook(cells, "lab", Path(folder)) as page:
        page.finish(0, 300)
        for _ in range(rounds):
            page.finish(1, 300)
            page.finish(2, 300)
            page.page.evaluate(CLEAR, 2)
            page.finish(3)
            page.finish(4, 300)
            page.page.evaluate(CLEAR, 3)
            page.finish(5, 300)
        page.finish(6)
        page.finish(7)
        text = page.told(7)
        found: dict[str, list[float]] = json.loads(text[text.index("TOLD") + 4 : text.index("END")])
        return found


def measure_clicks(count: int) -> dict[str, list[float]]:
    """Seconds from a press to what is seen of it in the page, while the cell goes on: a halted node, one that ran."""
    found: dict[str, list[float]] = {"pause": [], "step": []}
    cells = [START, TINY, "%%watch\nloop(600)"]
    with tempfile.TemporaryDirectory() as folder, browser.notebook(cells, "lab", Path(folder)) as page:
        page.finish(0, 120)
        page.finish(1)
        page.run(2)
        page.cell(2).locator(".node").first.wait_for()
        for _ in range(count):
            page.page.wait_for_timeout(500)
            found["pause"].append(page.page.evaluate(CLICK, [2, "Pause", ".node.halted"]) / 1e3)
            page.page.wait_for_timeout(500)
            found["step"].append(page.page.evaluate(CLICK, [2, "Step", ".node.done"]) / 1e3)
            page.page.evaluate(CLICK, [2, "Run", ".nbdist-view:not(:has(.node.halted))"])
    return found


def measure_layout() -> dict[str, list[float]]:
    """Seconds in which a page would lay out a thousand nodes, as the tests of the drawing under node tell it."""
    if shutil.which("node") is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "nbdist" / "views" / "static", Path(folder) / "static")
        (Path(folder) / "package.json").write_text('{"type": "module"}')
        text = (ROOT / "tests" / "views" / "graph.test.mjs").read_text()
        (Path(folder) / "graph.test.mjs").write_text(text.replace("../../nbdist/views/static", "./static"))
        done = subprocess.run(["node", "--test", "graph.test.mjs"], cwd=folder, capture_output=True, text=True)
    return {"layout": [int(ms) / 1e3 for ms in re.findall(r"1,000 nodes.* in (\d+) ms", done.stdout)]}


def soak(minutes: float) -> list[dict[str, float]]:
    """Under the panel and a watched loop: what the kernel, the page and the file take, over time."""
    loop = f"%%watch\nuntil = time.monotonic() + {minutes * 60}\nwhile time.monotonic() < until:\n    train()"
    found: list[dict[str, float]] = []
    cells = [START + TRAIN + "\nimport os; print('PID', os.getpid())", "%dist_panel", loop]
    with tempfile.TemporaryDirectory() as folder, browser.notebook(cells, "lab", Path(folder)) as page:
        page.finish(0, 300)
        kernel = int(re.search(r"PID (\d+)", page.told(0))[1])
        page.finish(1)
        page.run(2)
        begun = time.monotonic()
        while time.monotonic() < begun + minutes * 60 - 15:
            page.page.wait_for_timeout(minutes * 6_000)
            page.save()
            file = os.path.getsize(Path(folder) / "book.ipynb")
            found.append(
                {"seconds": time.monotonic() - begun, "kernel": _own_memory(kernel), "page": page.heap(), "file": file}
            )
        page.ended(2, 120)
    return found


def _own_memory(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(size) for size in re.findall(r"^Private_\w+: +(\d+) kB", text, re.MULTILINE)) * 1024


def tables(numbers: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    times: dict[str, list[float]] = numbers["times"]
    median = {name: statistics.median(values) for name, values in times.items() if values}
    lines = ["| | measured | limit |", "| --- | ---: | ---: |"]
    told = {"watch": "a `%%watch` view", "panel": "a panel", "after": "views that are closed"}
    base = median["none"]
    for name, what in told.items():
        ratio = statistics.median(one / other for one, other in zip(times[name], times["none"], strict=True))
        lines.append(
            f"| a training step of {harness.duration(base)} beside {what} | {ratio:.3f} | {LIMITS[name]:.2f} |"
        )
    rest = {
        "pause": "from a press of Pause, in a busy cell, to the halted node in the page",
        "step": "from a press of Step to the node that ran",
        "display": "first display of a reference",
        "layout": "1,000 nodes laid out",
    }
    for name, what in rest.items():
        if name in median:
            limit = harness.duration(LIMITS[name]) if name in LIMITS else ""
            lines.append(f"| {what} | {harness.duration(median[name])} | {limit} |")
    if numbers.get("soak"):
        lines += [
            "",
            "| training under the panel and a watched cell | kernel | page | file |",
            "| --- | ---: | ---: | ---: |",
        ]
        for each in numbers["soak"]:
            sizes = " | ".join(f"{each[name] / 1e6:.2f} MB" for name in ("kernel", "page", "file"))
            lines.append(f"| after {each['seconds'] / 60:.1f} min | {sizes} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print tables."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=30, help="how long each turn of training takes")
    parser.add_argument("--minutes", type=float, default=0, help="how long the loop of the soak trains; not without")
    options = parser.parse_args()
    harness.touch_memory()
    os.environ["OMP_NUM_THREADS"] = "1"
    numbers: dict[str, Any] = {
        "times": measure_cost(options.rounds, options.seconds) | measure_clicks(4 * options.rounds) | measure_layout()
    }
    if options.minutes:
        numbers["soak"] = soak(options.minutes)
    print(tables(numbers))
    harness.write(numbers, options.json)


if __name__ == "__main__":
    main()
