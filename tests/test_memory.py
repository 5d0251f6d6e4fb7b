"""What a notebook with three workers needs: on Binder, where there is 1 GB for everything."""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from helpers.notebook.frontend import Notebook

BINDER = 1024
SERVER = 100
"""What JupyterLab's server takes of it, in MB: 90 when it starts, 99 after 1,600 requests."""

TOUR = Path(__file__).parent.parent / "notebooks" / "00_tour.ipynb"
BINDER_START = Path(__file__).parent.parent / "binder" / "start"

# The first DistributedDataParallel, or optimizer, of a process imports torch's compiler: 90 MB in each worker.
TRAINING = (
    "%load_ext nbdist\n%dist_init -n 3 --seed 1",
    """%%distributed
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)))
for step in range(20):
    model(torch.randn(32, 64)).pow(2).mean().backward()""",
    "%%distributed\noptimizer = torch.optim.Adam(model.parameters())\noptimizer.step()",
)


def cells_of_the_tour() -> tuple[str, ...]:
    cells = json.loads(TOUR.read_text())["cells"]
    return tuple("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def environment_of_binder() -> dict[str, str]:
    """What a session on Binder has in its environment besides that of this process."""
    shown = "import json, os; print(json.dumps(dict(os.environ)))"
    found = subprocess.run([BINDER_START, sys.executable, "-c", shown], stdout=subprocess.PIPE, check=True).stdout
    return {name: value for name, value in json.loads(found).items() if os.environ.get(name) != value}


@dataclass
class Use:
    """What processes use, in MB."""

    processes: int
    anonymous: float = 0.0
    """What is theirs alone; a page that several of them share, as forked workers do, counts once."""
    files: float = 0.0
    """Libraries and the like, as much as the process has that has most of them."""
    proportional: float = 0.0
    """The sum of what the kernel says of each: less than the truth where others map the same libraries."""

    @property
    def all(self) -> float:
        return max(self.anonymous + self.files, self.proportional)

    def __str__(self) -> str:
        return f"{self.all:.0f} MB ({self.anonymous:.0f} of its own, {self.files:.0f} of libraries)"


def measure(root: int) -> Use:
    """What a tree of processes uses."""
    try:
        process = psutil.Process(root)
        pids = [root, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        pids = []
    use = Use(len(pids))
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found = {name: int(size) / 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", rollup, re.MULTILINE)}
            use.anonymous += found["Pss_Anon"]
            use.files = max(use.files, found["Rss"] - found["Anonymous"])
            use.proportional += found["Pss"]
    return use


class Watch:
    """Looks at a tree all the time, and keeps the most that it has seen."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.most = Use(0)

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            self.most = max(self.most, measure(self._root), key=lambda use: use.all)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._stop.set()
        self._thread.join()


@pytest.mark.timeout(180)
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="the kernel does not say")
@pytest.mark.skipif(torch.version.cuda is not None, reason="Binder gets torch's build for CPUs, which needs less")
@pytest.mark.parametrize("what", [pytest.param("the tour", marks=pytest.mark.soak), "training"])
def test_a_notebook_with_three_workers_fits_into_binder(what, capsys):
    cells = cells_of_the_tour() if what == "the tour" else TRAINING
    uses = []
    with Notebook(load=False, env=environment_of_binder()) as notebook, Watch(notebook.pid) as watch:
        for cell in cells:
            notebook.run(cell, check=what != "the tour")  # some of its cells fail, as they should
            uses.append(measure(notebook.pid))
    # The notebook, the zygote, three workers, after most cells: a process may be about to go, or about to fork.
    assert statistics.mode(use.processes for use in uses) == 5
    with capsys.disabled():
        print(f"\nThe notebook, the zygote and 3 workers, {what}:")
        for cell, use in zip(cells, uses, strict=True):
            print(f"  {use} after {cell.strip().splitlines()[-1][:60]}")
        print(f"  {watch.most} at most, of {BINDER} MB")
    assert watch.most.all < BINDER - SERVER
