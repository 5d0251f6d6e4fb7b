"""The panel of a cluster, of real workers."""

import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import nbdist
from nbdist.cluster.inspection import status_report
from nbdist.cluster.inspection.status_report import users_calls
from nbdist.testing import World
from nbdist.views.workers.panel import Panel, blamed


@pytest.fixture
def cluster(shared_cluster, own_variables):
    return shared_cluster


def sample_until(panel, condition):
    deadline = time.monotonic() + 20
    while True:
        panel.sample()
        rows = {row["name"]: row for row in panel.snapshot()["rows"]}
        if condition(rows):
            return rows
        assert time.monotonic() < deadline, rows
        time.sleep(0.1)


def test_what_runs_where_and_what_it_costs(cluster):
    panel = Panel(cluster)
    cell = cluster.execute("def spin():\n    while True:\n        pass\nspin()", "1", block=False)
    rows = sample_until(panel, lambda rows: rows["worker1"]["cpu"][-1] > 0.1 and rows["worker1"]["where"])
    assert rows["worker1"]["state"] == "busy"
    assert rows["worker1"]["runs"].startswith("def spin():")
    assert rows["worker1"]["where"].startswith(f"In[{cell.number}]:")
    assert rows["worker0"]["state"] == "idle"
    assert rows["worker0"]["where"] == ""
    assert rows["worker0"]["memory"][-1] > 1 << 20
    assert "busy" in repr(panel)
    cluster.interrupt("1")
    with pytest.raises(Exception) as failed:  # noqa: PT011 - its type is made for it
        cell.wait(20)
    assert type(failed.value).__name__ == "KeyboardInterrupt"
    sample_until(panel, lambda rows: rows["worker1"]["state"] == "idle")


def test_who_waits_for_whom(cluster):
    panel = Panel(cluster)
    cluster.execute("import threading\ngate = threading.Event()", "1")
    held = "def held():\n    import __main__\n    return __main__.gate.wait(60)\n"
    cluster.execute(f"{held}from nbdist import rpc\nx = rpc.rpc_async('worker1', held)", "0")
    sample_until(panel, lambda rows: waits(panel) and rows["worker1"]["calls"] == 1)
    assert waits(panel) == {("worker0", "worker1"): 1}
    assert "worker0 waits for 1 of worker1" in panel._repr_html_()
    cluster.execute("gate.set()", "1")
    sample_until(panel, lambda _: not waits(panel))


def waits(panel):
    return {(each["from"], each["to"]): each["calls"] for each in panel.snapshot()["talk"] if each["calls"]}


@pytest.fixture
def patient(monkeypatch):
    """Wait for a worker's report until it is there: a sample without it has no rates."""
    monkeypatch.setattr("nbdist.cluster.inspection.status._REPORT_WITHIN", 60.0)


def test_what_goes_from_one_to_another(cluster, patient):
    panel = Panel(cluster)
    code = "import torch\nfrom nbdist import rpc\nrpc.rpc_sync('worker1', torch.numel, args=(torch.ones(25_000_000),))"
    cluster.execute(code, "0")
    panel.sample()
    rows = {row["name"]: row for row in panel.snapshot()["rows"]}
    # Through shared memory, which counts as well.
    assert rows["worker0"]["out"][-1] == pytest.approx(rows["worker1"]["in"][-1], rel=0.01)
    assert rows["worker0"]["out"][-1] > 100 * rows["worker1"]["out"][-1]
    (told,) = [each for each in panel.snapshot()["talk"] if each["to"] == "worker1" and each["rate"]]
    assert told["from"] == "worker0"


def test_a_worker_that_holds_the_gil_is_still_located(cluster):
    panel = Panel(cluster)
    code = "import re\n\ndef stuck():\n    return re.match('(a+)+b', 'a' * 60)\n\nstuck()"
    cell = cluster.execute(code, "1", block=False)
    rows = sample_until(panel, lambda rows: "(a+)+b" in rows["worker1"]["where"])
    assert rows["worker1"]["where"].startswith(f"In[{cell.number}]:4 in stuck: return re.match(")
    assert f"In[{cell.number}]:4" in repr(panel)
    cluster.restart("1")
    with pytest.raises(nbdist.WorkerLost, match=r"^worker1 was restarted\nrun the cell again$"):
        cell.wait(20)


def test_the_end_of_what_it_has_written(cluster):
    panel = Panel(cluster)
    cluster.execute("import sys\nfor n in range(9): print('line', n)\nprint('oh', file=sys.stderr)", "0", quiet=True)
    rows = sample_until(panel, lambda rows: rows["worker0"]["log"] and rows["worker0"]["log"][-1][1] == "oh")
    times, lines = zip(*rows["worker0"]["log"], strict=True)
    assert list(lines) == [*(f"line {n}" for n in range(5, 9)), "oh"]
    assert sorted(times) == list(times)
    assert abs(times[-1] - time.time()) < 60


def test_what_torch_has_of_a_gpu(monkeypatch):
    assert status_report.gpu_memory() is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12 + device)
    assert status_report.gpu_memory() == 25


def test_how_busy_a_gpu_is(monkeypatch):
    asked = []

    def utilization(device):
        asked.append(device)
        if len(asked) > 1:
            raise RuntimeError("the GPU does not tell")
        return 80

    assert status_report.gpu_busy() is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    for device in ("", "cpu"):
        monkeypatch.setattr(
            status_report, "active_agent", lambda d=device: SimpleNamespace(me=SimpleNamespace(device=d))
        )
        assert status_report.gpu_busy() is None
    monkeypatch.setattr(status_report, "active_agent", lambda: SimpleNamespace(me=SimpleNamespace(device="cuda:1")))
    assert status_report.gpu_busy() == 80
    assert status_report.gpu_busy() is None
    assert asked == ["cuda:1", "cuda:1"]


def test_what_is_kept_is_bounded(cluster):
    panel = Panel(cluster)
    for _ in range(70):
        panel.sample()
    assert {len(row["cpu"]) for row in panel.snapshot()["rows"]} == {60}


def test_a_worker_that_is_gone(cluster, patient):
    panel = Panel(cluster)
    code = "import torch\nfrom nbdist import rpc\nrpc.rpc_sync('worker0', torch.numel, args=(torch.ones(25_000_000),))"
    cluster.execute(code, "1")
    sample_until(panel, lambda _: any(each["from"] == "worker1" for each in panel.snapshot()["talk"]))
    with pytest.raises(nbdist.WorkerLost):
        cluster.execute("import os; os._exit(3)", "1")
    rows = sample_until(panel, lambda rows: rows["worker1"]["lost"])
    assert "exited with code 3" in rows["worker1"]["state"]
    assert not any(each["from"] == "worker1" for each in panel.snapshot()["talk"])
    cluster.restart("1")
    sample_until(panel, lambda rows: rows["worker1"]["state"] == "idle")


def test_who_holds_others_up():
    waits = {"notebook": ["a", "c"], "a": ["b"], "b": ["d"], "c": ["d"], "d": [], "e": []}
    assert blamed(waits, {"d": "In[3]:3: x", "e": "In[3]:9: y"}) == [
        "notebook → a → b → d, which is at In[3]:3: x",
        "notebook → c → d, which is at In[3]:3: x",
    ]
    assert blamed({"a": ["b"], "b": ["a"]}, {}) == ["a and b wait for each other"]
    assert blamed({"n": ["a"], "a": ["b"], "b": ["a"]}, {}) == ["a and b wait for each other; n waits behind them"]
    assert blamed({"m": ["n"], "n": ["a"], "a": ["a"]}, {}) == ["a waits for itself; m → n wait behind it"]
    assert blamed({"a": ["b"], "b": ["c"], "c": ["a"]}, {}) == ["a → b → c → a wait for each other"]
    assert blamed({"a": [], "b": []}, {"a": "In[3]:1"}) == []
    everybody = [f"w{n}" for n in range(40)]
    assert blamed({name: [other for other in everybody if other != name] for name in everybody}, {})


def test_calls_for_which_only_nbdist_waits_are_left_out():
    with World(2) as world:
        agent = world[0]
        ask = partial(agent.caller.sync, world[1].me.name, time.sleep, (1,), None, 0.0)

        def mine():
            ask()

        threads = [threading.Thread(target=target) for target in (mine, ask)]
        for thread in threads:
            thread.start()
        while len(agent.awaited()) < 2:
            pass
        time.sleep(0.1)
        assert [call.thread for call in users_calls(agent)] == [threads[0].ident]
        for thread in threads:
            thread.join()
