"""What was made before new workers joined a running cluster includes them: executors, views, panels, timelines.

The keepers run on this host, as processes of their own.
"""

from __future__ import annotations

import threading
import time

import torch
from helpers.waiting import wait_until

from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.cluster.inspection import holdings
from nbdist.cluster.inspection.status import collect
from nbdist.compat.ipyparallel.client import Client
from nbdist.views.passes.watching import Watcher
from nbdist.views.widgets.panel import PanelView
from nbdist.views.workers.panel import Panel
from nbdist.views.workers.status import StatusTable

STEP = """
from nbdist import autograd as dist_autograd
def step():
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync("worker0", torch.add, args=(torch.ones(2, requires_grad=True), 1)).sum()
        dist_autograd.backward(context, [loss])
step()
"""


RANK = "int(__import__('os').environ['RANK'])"
SLOW_RANK = f"(__import__('time').sleep(0.5), {RANK})[1]"


def test_executors_and_views_of_all_workers_use_the_new_one(keepers):
    with keepers.cluster(2) as cluster:
        every, same, some = cluster.executor(), cluster.executor("all"), cluster.executor([0, 1])
        client = Client(cluster)
        direct, balanced = client.direct_view(), cluster.view(balanced=True)
        fixed = client[:]
        assert len(direct) == len(fixed) == 2
        # Two tasks keep the workers busy until the third is there; the others wait for whoever is free.
        release = keepers.folder / "release"
        code = f"while not __import__('os').path.exists({str(release)!r}): __import__('time').sleep(0.01)"
        busy = [every.submit(exec, code) for _ in range(2)]
        wait_until(lambda: all(each.rank is not None for each in busy))
        waiting, refused = every.submit(eval, RANK), some.submit(eval, RANK)
        keepers.grow(cluster)
        assert waiting.result(20) == 2, "a task that was queued before runs on the new worker"
        assert same.submit(eval, RANK).result(20) == 2
        assert balanced.apply_sync(eval, RANK) == 2
        assert not refused.done(), "an executor of named workers does not use others"
        release.touch()
        assert refused.result(20) in (0, 1)
        assert [each.result(20) for each in busy] == [None, None]
        with every:
            assert {each.result(20) for each in [every.submit(eval, SLOW_RANK) for _ in range(3)]} == {0, 1, 2}
        assert direct.targets == [0, 1, 2]
        assert direct.apply_sync(eval, RANK) == [0, 1, 2]
        assert direct.map_sync(abs, range(-6, 0)) == [6, 5, 4, 3, 2, 1]
        direct["x"] = 3
        assert cluster.pull("x") == [3, 3, 3]
        direct.scatter("part", list(range(7)), block=True)
        assert direct.gather("part", block=True) == list(range(7))
        assert fixed.apply_sync(eval, RANK) == [0, 1]
        client.wait_for_engines(3)
        assert len(client) == 3
        assert cluster.evaluate("__import__('ipyparallel').__name__", 2) == "nbdist.compat.ipyparallel"
        keepers.another(cluster)
        client.wait_for_engines(4, timeout=60)
        assert direct.apply_sync(eval, RANK) == [0, 1, 2, 3]


def test_views_that_are_open_show_the_new_worker(keepers, capsys):
    with keepers.cluster() as cluster:
        view = PanelView(Panel(cluster))
        view.receive({"press": "looking"})
        wait_until(lambda: [row["name"] for row in view.snapshot["rows"]] == ["worker0"])
        timeline = cluster.timeline()
        watcher = Watcher()
        rpc.rpc_sync("worker0", print, args=("from the old one",))
        keepers.grow(cluster)
        # The panel samples by itself while somebody looks.
        view.receive({"press": "looking"})
        wait_until(lambda: [row["name"] for row in view.look()["rows"]] == ["worker0", "worker1"])
        wait_until(lambda: [row["name"] for row in view.snapshot["rows"]] == ["worker0", "worker1"])
        cell = cluster.execute("while True: pass", 1, block=False)
        wait_until(lambda: view.look()["rows"][1]["state"] == "busy")
        view.receive({"press": "interrupt", "worker": "worker1"})
        wait_until(lambda: cell.done)
        assert "worker1" in repr(StatusTable(*collect(cluster)))
        assert [memory.name for memory in holdings.collect().workers] == ["worker0", "notebook", "worker1"]
        # A watch that began before sees a pass that the new worker begins.
        with watcher:
            cluster.execute(STEP, 1)
            wait_until(lambda: watcher.state == "over")
        assert "worker1" in repr(watcher)
        # The timeline has what the new worker did, and what it does after a restart.
        rpc.rpc_sync("worker1", time.sleep, args=(0.01,))
        timeline.stop()
        assert timeline.workers == ["worker0", "notebook", "worker1"]
        assert {"worker0", "worker1"} <= {entry.agent for entry in timeline.noted}
        assert "sleep" in {entry.name for entry in timeline.noted if entry.agent == "worker1"}
        assert timeline.lost == 0
        assert "worker1: " in repr(timeline)
        assert "missing" not in repr(timeline)
        # Output of the new worker's calls belongs to this program, which has called others before.
        rpc.rpc_sync("worker1", print, args=("from the new one",))
        wait_until(lambda: "[worker1] from the new one\n" in capsys.readouterr().out)


def test_a_timeline_records_workers_that_start_again(keepers):
    with keepers.cluster(2) as cluster:
        with cluster.timeline() as timeline:
            rpc.rpc_sync("worker1", time.sleep, args=(0.01,))
            cluster.restart("worker1")
            wait_until(
                lambda: cluster.find("worker1").incarnation in {record.incarnation for record in timeline._records}
            )
            rpc.rpc_sync("worker1", max, args=(1, 2))
        assert timeline.workers == ["worker0", "worker1", "notebook"]
        assert [entry.name for entry in timeline.noted if entry.agent == "worker1"] == ["max"]
        assert timeline.lost == 1, "what the killed worker had noted"
        recordings = "len(__import__('nbdist').trace.listeners)"
        assert cluster.evaluate(recordings) == [0, 0]


def test_calls_of_a_new_worker_do_not_time_out_while_a_pass_is_paused(keepers):
    with keepers.cluster() as cluster, Watcher(paused=True) as watcher, dist_autograd.context() as context:
        loss = rpc.rpc_sync("worker0", torch.mul, args=(torch.ones(2, requires_grad=True), 2)).sum()
        thread = threading.Thread(target=dist_autograd.backward, args=(context, [loss]))
        thread.start()
        try:
            wait_until(lambda: watcher.paused)
            keepers.grow(cluster)
            cluster.execute("rpc.rpc_sync('worker0', __import__('time').sleep, args=(2,), timeout=0.5)", 1)
        finally:
            watcher.run()
            thread.join(20)
        assert not thread.is_alive()
