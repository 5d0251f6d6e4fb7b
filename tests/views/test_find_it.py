"""Three things that go wrong in a run of four workers; what is shown names the worker, and the line.

A test reads what a person would read: the text of the views, in a real notebook.
"""

import re

import pytest
from helpers.notebook.frontend import Notebook

PROGRAM = """%%remote --local
import threading, time, torch
from nbdist import rpc
gate = threading.Event()

class Heavy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(1.0 * (rank == 3))
        return gradient

def layer(x):
    return Heavy.apply(x * 0.5).tanh()

def normalised(x):
    y = x - x.detach()
    z = y.abs().sqrt()
    return z + x if rank == 2 else layer(x)

def logs(x):
    return torch.log(x - 1.0) if rank == 2 else x * 1.0

def chain(function, x, ahead):
    y = globals()[function](x)
    if ahead:
        y = rpc.rpc_sync(ahead[0], chain, args=(function, y, ahead[1:]))
    return y

def waiting(x):
    if rank == 3:
        gate.wait()
    return x
"""
CALL = """
x = torch.full((8,), 0.3, requires_grad=True)
with dist_autograd.context() as context_id:
    y = rpc.rpc_sync("worker0", chain, args=({!r}, x, ["worker1", "worker2", "worker3"]))
    dist_autograd.backward(context_id, [y.sum()])
"""


@pytest.fixture(scope="module")
def notebook():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 4 --backend none\nimport torch, time")
        notebook.run("import nbdist.views.passes.watching as watching; watching._LAST_REPORTS_SECONDS = 30")
        notebook.run("import nbdist.cluster.inspection.status as status; status._REPORT_WITHIN = 30")
        notebook.run(PROGRAM)
        yield notebook


def test_a_planted_nan(notebook):
    notebook.run("%%watch --paused -a\n" + CALL.format("normalised"))
    notebook.run("handle = _\nfound = handle.run(until='nan')")
    assert notebook.run("found.worker").result == "'worker2'"
    told = notebook.run("print(handle)").stdout
    (line,) = [line for line in told.splitlines() if "first NaN" in line]
    assert "@worker2" in line
    assert "z = y.abs().sqrt()" in line
    notebook.run("handle.run(); handle.wait(30)")


def test_a_nan_of_the_forward_pass(notebook):
    """Which shows in the notebook's own node, and is not that one's."""
    cell = CALL.format("logs").replace("y.sum()", "y.pow(2).sum()")
    shown = notebook.run("%%watch\n" + cell)
    told = [message["content"] for message in shown.messages if message["msg_type"] == "update_display_data"]
    (line,) = [line for line in told[-1]["data"]["text/plain"].splitlines() if "NaN" in line]
    assert "Pow@notebook" in line
    assert (
        "was given NaN by the forward pass already: it came from worker0, with a call of chain, and to worker0 from "
        in line
    )
    assert "made by Log@worker2" in line
    assert line.endswith("return torch.log(x - 1.0) if rank == 2 else x * 1.0")


def test_a_nan_that_is_checked_for(notebook):
    """The cell fails where it calls, with the line of the worker."""
    failed = notebook.run(CALL.format("logs").replace("context()", 'context(check="nan")'), check=False)
    assert failed.error["ename"] == "ForwardNaN"
    assert "log made 8 NaN of 8 values (float32[8])" in failed.error["evalue"]
    assert re.search(r"That was on worker2, at In\[\d+\]:\d+: return torch.log", failed.error["evalue"])
    shown = "\n".join(failed.error["traceback"])
    assert "raised on worker2, in chain" in shown
    assert "__torch_function__" not in shown


def test_a_straggler(notebook):
    shown = notebook.run("%%watch\n" + CALL.format("layer"))
    told = [message["content"] for message in shown.messages if message["msg_type"] == "update_display_data"]
    text = told[-1]["data"]["text/plain"]
    (line,) = [line for line in text.splitlines() if "most time" in line]
    assert "on worker3" in line
    assert "return Heavy.apply(x * 0.5).tanh()" in line
    units = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
    told = re.findall(r"(\w+): .*busy ([\d.]+) (µs|ms|s)\b", text)
    busy = {worker: float(time) * units[unit] for worker, time, unit in told}
    assert max(busy, key=busy.get) == "worker3"
    (path,) = [line for line in text.splitlines() if "critical path" in line]
    assert "Heavy@worker3" in path


def test_a_hang(notebook):
    cell = notebook.send(
        "hung = rpc.rpc_async('worker0', chain, args=('waiting', torch.ones(2), ['worker1', 'worker2', 'worker3']))"
    )
    notebook.finish(cell)
    notebook.until(lambda: "worker3, which is at" in notebook.run("%dist_panel").value["text/plain"])
    told = notebook.run("%dist_panel").value["text/plain"]
    (line,) = [line for line in told.splitlines() if "which is at" in line]
    assert line.startswith("notebook → worker0 → worker1 → worker2 → worker3, which is at ")
    assert "gate.wait()" in line
    rows = {row.split()[0]: row for row in notebook.run("%dist_status").result.splitlines()}
    assert "gate.wait()" in rows["worker3"]
    assert "rpc.rpc_sync(ahead[0]" in rows["worker1"]
    notebook.run("%remote 3 gate.set()")
    assert notebook.run("hung.wait().tolist()").result == "[1.0, 1.0]"
