"""The panel of a cluster, of real workers."""

import time

import pytest

import nbdist
from nbdist.views.panel import Panel


@pytest.fixture(scope="module")
def cluster():
    with nbdist.Cluster(2, backend="none") as cluster:
        yield cluster


def until(panel, condition):
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
    rows = until(panel, lambda rows: rows["worker1"]["cpu"][-1] > 0.5 and rows["worker1"]["where"])
    assert rows["worker1"]["state"] == "busy"
    assert rows["worker1"]["runs"].startswith("def spin():")
    assert rows["worker1"]["where"].startswith("cell:")
    assert rows["worker0"]["state"] == "idle"
    assert rows["worker0"]["where"] == ""
    assert rows["worker0"]["memory"][-1] > 1 << 20
    assert "busy" in repr(panel)
    cluster.interrupt("1")
    with pytest.raises(Exception) as failed:  # noqa: PT011 - its type is made for it
        cell.wait(20)
    assert type(failed.value).__name__ == "KeyboardInterrupt"
    until(panel, lambda rows: rows["worker1"]["state"] == "idle")


def test_who_waits_for_whom(cluster):
    panel = Panel(cluster)
    code = "import time\nfrom nbdist import rpc\nx = rpc.rpc_async('worker1', time.sleep, args=(1.0,))"
    cluster.execute(code, "0")
    rows = until(panel, lambda rows: rows["worker0"]["waits"])
    assert rows["worker0"]["waits"] == {"worker1": 1}
    assert rows["worker1"]["calls"] == 1
    assert "worker0 waits for 1 of worker1" in panel._repr_html_()
    until(panel, lambda rows: not rows["worker0"]["waits"])


def test_what_is_kept_is_bounded(cluster):
    panel = Panel(cluster)
    for _ in range(70):
        panel.sample()
    assert {len(row["cpu"]) for row in panel.snapshot()["rows"]} == {60}


def test_a_worker_that_is_gone(cluster):
    panel = Panel(cluster)
    with pytest.raises(nbdist.WorkerLost):
        cluster.execute("import os; os._exit(3)", "1")
    rows = until(panel, lambda rows: rows["worker1"]["lost"])
    assert "exited with code 3" in rows["worker1"]["state"]
    cluster.restart("1")
    until(panel, lambda rows: rows["worker1"]["state"] == "idle")
