"""Clusters of ``--launcher join`` that grow: workers join while the cluster runs.

The keepers run on this host, as processes of their own.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref

import psutil
import pytest
import torch
from helpers.hosts.keepers import cluster_on, keeper_of
from helpers.hosts.other_hosts import can_make_hosts, hosts
from helpers.notebook.frontend import Notebook
from helpers.waiting import wait_until

import nbdist
from nbdist import rpc
from nbdist.channel.contract import ChannelError
from nbdist.cluster.hosts.hub import Hub
from nbdist.cluster.hosts.launchers.join import JoinLauncher
from nbdist.cluster.kernels.workers import StartError
from nbdist.cluster.processes.setup import WorkerSetup
from nbdist.cluster.spec import Spec
from nbdist.errors import NbdistError, ResourceError, UsageError, WorkerLost

SIZES = "(dist.get_world_size(), world_size, __world_size__, os.environ['WORLD_SIZE'], os.environ['RANK'])"


def sum_of_ranks(cluster: nbdist.Cluster) -> list[float]:
    cluster.execute("total = torch.tensor(float(rank)); dist.all_reduce(total)")
    return [float(total) for total in cluster.pull("total")]


def test_a_running_cluster_grows_by_one_and_by_two(keepers):
    with keepers.cluster() as cluster:
        pool = cluster.executor()
        assert sum_of_ranks(cluster) == [0.0]
        keepers.grow(cluster)
        assert cluster.names == ["worker0", "worker1"]
        assert sum_of_ranks(cluster) == [1.0, 1.0]
        keepers.grow(cluster, "-n", "2", uses=2)
        assert cluster.names == ["worker0", "worker1", "worker2", "worker3"]
        cluster.execute("import os")
        assert cluster.evaluate(SIZES) == [(4, 4, 4, "4", str(rank)) for rank in range(4)]
        local = cluster.evaluate("(os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])")
        assert [*local[:2], *sorted(local[2:])] == [("0", "1"), ("0", "1"), ("0", "2"), ("1", "2")]
        assert len(set(cluster.evaluate("(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"))) == 1
        assert sum_of_ranks(cluster) == [6.0] * 4
        host = cluster.find("worker1").host
        assert keepers.told == [
            f"worker1 joined from {host}; 2 workers. The process group is formed anew.",
            f"worker2,3 joined from {host}; 4 workers. The process group is formed anew.",
        ]
        # Calls, in all directions, and output of calls below their cell.
        call = "rpc.rpc_sync({!r}, torch.add, args=(torch.ones(2), 1)).tolist()"
        assert cluster.evaluate(call.format("worker3"), "worker0") == [2.0, 2.0]
        assert cluster.evaluate(call.format("worker0"), "worker3") == [2.0, 2.0]
        assert rpc.rpc_sync("worker3", torch.add, args=(torch.ones(1_000_000), 1)).sum() == 2_000_000
        assert cluster.evaluate("rpc.rpc_sync('notebook', max, args=(1, 2))", "worker2") == 2
        ids = [rpc.get_worker_info(name).id for name in (*cluster.names, "notebook")]
        assert ids == [0, 2, 3, 4, 1]
        # Whatever names workers: targets, the executor, views, the status, an interrupt.
        assert cluster.evaluate("rank", -1) == 3
        assert cluster.evaluate("rank", "1:3") == [1, 2]
        with cluster.executor() as larger:
            futures = [larger.submit(time.sleep, 0.3) for _ in range(4)]
            assert {future.result() or future.rank for future in futures} == {0, 1, 2, 3}
        assert {pool.submit(max, 1, 2).result() for _ in range(3)} == {2}
        assert len(cluster.view()) == 4
        cell = cluster.execute("while True: pass", "worker3", block=False)
        wait_until(lambda: cell.parts["worker3"].began)
        cluster.interrupt("worker3")
        with pytest.raises(NbdistError, match="stopped in while True"):
            cell.wait(20)
        # A restart of all forms one group of all.
        cluster.restart("all")
        assert sum_of_ranks(cluster) == [6.0] * 4
    assert [process.wait(20) for process in keepers.processes] == [0, 0, 0]


@pytest.mark.soak
def test_processes_that_come_together_all_become_workers(keepers):
    with keepers.cluster() as cluster:
        file = keepers.file.with_name("three.json")
        cluster.invite(str(file), uses=3)
        for _ in range(3):
            keepers.start(file=file)
        cluster.wait_for_workers(4, timeout=60)
        wait_until(lambda: "4 workers" in keepers.told[-1])
        assert sum_of_ranks(cluster) == [6.0] * 4
        assert len(keepers.told) <= 3


def test_a_running_cell_keeps_its_workers_and_the_group_forms_after_it(keepers):
    with keepers.cluster(2) as cluster:
        code = "import time\nwhile not os.path.exists({!r}): time.sleep(0.01)\n"
        code += "total = torch.tensor(1.0); dist.all_reduce(total)\nprint('total', total.item(), world_size)"
        go = keepers.file.with_name("go")
        cell = cluster.execute(code.format(str(go)), block=False)
        wait_until(lambda: all(part.began for part in cell.parts.values()))
        keepers.grow(cluster)
        assert keepers.told[-1].endswith("The process group is formed anew once worker0,1 can take part.")
        assert cluster.evaluate("world_size", "worker2") == 3
        with pytest.raises(nbdist.GroupError, match="formed anew once all workers are idle"):
            cluster.execute("dist.barrier()", "worker2")
        go.touch()
        cell.wait(20)
        assert set(cell.outputs) == {"worker0", "worker1"}
        for outputs in cell.outputs.values():
            assert "".join(output["text"] for output in outputs) == "total 2.0 2\n"
        assert sum_of_ranks(cluster) == [3.0] * 3
        assert cluster.evaluate("world_size") == [3, 3, 3]


@pytest.mark.soak
def test_cells_for_all_workers_and_workers_that_join_do_not_cross(keepers):
    with keepers.cluster() as cluster:
        with cluster.lifecycle.choosing() as token:  # as for a cell whose workers are chosen, and that is not sent yet
            keepers.another(cluster)
            wait_until(lambda: len(cluster.workers) == 2, within=60)
            time.sleep(0.5)
            assert not keepers.told
            assert cluster.evaluate("dist.get_world_size()", 0) == 1
        cluster.lifecycle.unsent.discard(token)
        wait_until(lambda: keepers.told)
        # Cells with a collective of all workers run one after another while the cluster grows.
        file = keepers.file.with_name("two.json")
        cluster.invite(str(file), uses=2)
        for _ in range(2):
            keepers.start(file=file)
        deadline = time.monotonic() + 60
        seen = set()
        while 4.0 not in seen and time.monotonic() < deadline:
            cluster.execute("total = torch.tensor(1.0); dist.all_reduce(total)", timeout=30)
            seen.add(cluster.pull("total", 0).item())
        assert seen >= {2.0, 4.0}


@pytest.mark.soak
def test_an_open_place_is_filled_before_the_cluster_grows(keepers):
    with keepers.cluster() as cluster:
        first = keepers.grow(cluster)
        keepers.grow(cluster)
        # The process alone is killed: its keeper keeps the place, so a newcomer is another worker.
        cluster.signal("worker1", signal.SIGKILL)
        wait_until(lambda: cluster.find("worker1").lost)
        keepers.grow(cluster)
        assert keepers.told[-1].endswith("4 workers. The process group is formed anew once worker1 can take part.")
        assert cluster.restart() == ["worker1"]
        assert sum_of_ranks(cluster) == [6.0] * 4
        # The keeper is killed: the place is open, and the newcomer waits for the restart.
        first.kill()
        wait_until(lambda: cluster.find("worker1").lost)
        keepers.another(cluster)
        wait_until(lambda: len(cluster.lifecycle.launcher.hub.members) == 4)
        time.sleep(0.5)
        assert len(cluster.workers) == 4
        assert cluster.restart() == ["worker1"]
        assert sum_of_ranks(cluster) == [6.0] * 4
        keepers.grow(cluster)
        assert cluster.names[-1] == "worker4"


def test_nobody_is_taken_in_while_a_keeper_is_silent(keepers):
    with keepers.cluster() as cluster:
        silent = keepers.grow(cluster)
        frozen = psutil.Process(silent.pid)
        frozen.suspend()
        keepers.another(cluster)
        wait_until(lambda: len(cluster.lifecycle.launcher.hub.members) == 3)
        time.sleep(2)  # longer than a worker needs to join
        assert len(cluster.workers) == 2
        frozen.resume()
        cluster.wait_for_workers(3, timeout=60)
        wait_until(lambda: "3 workers" in keepers.told[-1])
        assert sum_of_ranks(cluster) == [3.0] * 3


@pytest.mark.skipif(not can_make_hosts(), reason="only root can make hosts, and only where the kernel allows it")
def test_who_comes_before_a_dead_host_is_noticed_takes_its_place(tmp_path):
    with hosts(4) as (address, others), cluster_on(others[:2], address, tmp_path, timeout=60) as cluster:
        members = cluster.lifecycle.launcher.hub.members
        dead = next(other for other in others if other.address == keeper_of(cluster, "worker1").address)
        dead.kill()
        file = tmp_path / "another.json"
        for count, other in enumerate(others[2:], 2):
            cluster.invite(str(file))
            other.start("-m", "nbdist", "worker", "--connect", "-", stdin=file.read_bytes())
            if count == 2:
                wait_until(lambda: len(members) == 3)
                assert not cluster.find("worker1").lost
                wait_until(lambda: cluster.find("worker1").lost, within=30)
                assert cluster.restart() == ["worker1"]
        cluster.wait_for_workers(3, timeout=60)
        assert cluster.names == ["worker0", "worker1", "worker2"]
        assert sum_of_ranks(cluster) == [3.0] * 3


@pytest.mark.soak
def test_a_newcomer_that_dies_leaves_no_trace(keepers):
    slow = "import os, time\nif os.path.exists('slow'):\n    time.sleep(5)\n"
    (keepers.folder / "slow_to_import.py").write_text(slow)
    with keepers.cluster(preload=("slow_to_import",)) as cluster:
        folder = keepers.folder / "where"
        folder.mkdir()
        (folder / "slow").touch()
        process = keepers.another(cluster, cwd=folder)
        wait_until(lambda: cluster.lifecycle.launcher.placed.keys() >= {"worker1"})
        process.kill()
        wait_until(lambda: keepers.told)
        assert keepers.told[0].startswith("worker1 could not join the running cluster: ")
        assert cluster.names == ["worker0"]
        keepers.grow(cluster)
        assert cluster.names == ["worker0", "worker1"]
        assert sum_of_ranks(cluster) == [1.0, 1.0]


@pytest.mark.soak
def test_a_newcomer_that_cannot_start_is_sent_away_with_the_reason(keepers):
    module = keepers.folder / "only_here.py"
    module.write_text("")
    with keepers.cluster(preload=("only_here",)) as cluster:
        module.unlink()
        process = keepers.another(cluster, stderr=subprocess.PIPE)
        said = process.stderr.read().decode()
        assert process.wait(20) == 1
        assert "worker1 could not join the running cluster: " in said
        assert "only_here" in said
        assert "only_here" in keepers.told[0]
        module.write_text("")
        keepers.grow(cluster)
        assert sum_of_ranks(cluster) == [1.0, 1.0]


def test_a_newcomer_that_fails_does_not_send_another_one_away(keepers):
    """Both come at the same time, so both start or none; then the good one starts again, under the other's name."""
    (keepers.folder / "picky.py").write_text("import os\nassert not os.path.exists('bad'), 'a bad place'\n")
    folder = keepers.folder / "where"
    folder.mkdir()
    (folder / "bad").touch()
    with keepers.cluster(preload=("picky",)) as cluster:
        members = cluster.lifecycle.launcher.hub.members
        with cluster._changes.changing:
            bad = keepers.another(cluster, cwd=folder)
            wait_until(lambda: len(members) == 2)
            good = keepers.another(cluster)
            wait_until(lambda: len(members) == 3)
        cluster.wait_for_workers(2, timeout=60)
        wait_until(lambda: len(keepers.told) == 2)
        assert "could not join the running cluster: " in keepers.told[0]
        assert "a bad place" in keepers.told[0]
        assert keepers.told[1].startswith("worker1 joined from ")
        assert bad.wait(20) == 1
        assert good.poll() is None
        assert sum_of_ranks(cluster) == [1.0, 1.0]


@pytest.mark.soak
def test_a_cluster_without_a_process_group_grows(keepers):
    with keepers.cluster(backend="none") as cluster:
        keepers.grow(cluster)
        assert keepers.told[0].endswith("; 2 workers.")
        wait_until(lambda: cluster.evaluate("(world_size, __import__('os').environ['WORLD_SIZE'])") == [(2, "2")] * 2)


@pytest.mark.soak
def test_driver_and_seed_count_on(keepers):
    with keepers.cluster(driver="master", seed=7) as cluster:
        keepers.grow(cluster)
        assert cluster.names == ["worker1", "worker2"]
        assert [rpc.get_worker_info(name).id for name in ("master", *cluster.names)] == [0, 1, 2]
        torch.manual_seed(8)
        assert cluster.evaluate("torch.rand(1).item()", "worker2") == torch.rand(1).item()


def test_a_newcomer_of_other_versions_is_refused(keepers):
    with keepers.cluster() as cluster:
        file = keepers.file.with_name("other.json")
        cluster.invite(str(file))
        program = "import nbdist; nbdist.__version__ = '0.0.1'\n"
        program += f"import sys; sys.argv[1:] = ['worker', '--connect', {str(file)!r}, '--host', '127.0.0.1']\n"
        program += "from nbdist.__main__ import main; sys.exit(main())"
        refused = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert refused.returncode == 2
        assert "install the same on all hosts" in refused.stderr
        keepers.start(file=file)
        cluster.wait_for_workers(2, timeout=60)


@pytest.mark.soak
def test_waiting_for_workers_that_do_not_come_ends(keepers):
    with keepers.cluster() as cluster:
        cluster.wait_for_workers(1)
        with pytest.raises(StartError, match=r"the cluster has 1 worker, and not 2, after 0\.1 s: invite workers"):
            cluster.wait_for_workers(2, timeout=0.1)
        with pytest.raises(UsageError):
            cluster.wait_for_workers(2, timeout=0)
    with (
        nbdist.Cluster(1) as local,
        pytest.raises(UsageError, match=r"start one with `%dist_init -n N --host ADDRESS`"),
    ):
        local.wait_for_workers(2)


@pytest.mark.soak  # the test of a notebook below has such a cluster, too
def test_workers_of_this_host_are_joined_by_others(keepers):
    with nbdist.Cluster(2, host="127.0.0.1", timeout=60) as cluster:
        cluster.on_joined = keepers.told.append
        cluster.execute("import os")
        assert cluster.evaluate("(os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])") == [
            ("0", "2"),
            ("1", "2"),
        ]
        assert sum_of_ranks(cluster) == [1.0, 1.0]
        first = keepers.grow(cluster)
        assert cluster.names == ["worker0", "worker1", "worker2"]
        assert sum_of_ranks(cluster) == [3.0] * 3
        # A worker of this host dies, then all of them with their keeper: they start here again, beside a newcomer.
        cluster.signal("worker1", signal.SIGKILL)
        wait_until(lambda: cluster.find("worker1").lost)
        assert cluster.restart() == ["worker1"]
        os.kill(keeper_of(cluster, "worker0").record.pid, signal.SIGKILL)
        wait_until(lambda: cluster.find("worker0").lost and cluster.find("worker1").lost)
        keepers.grow(cluster)
        assert cluster.names[-1] == "worker3"
        assert cluster.restart() == ["worker0", "worker1"]
        assert sum_of_ranks(cluster) == [6.0] * 4
        # The place of a worker that has joined is filled by another that joins.
        first.kill()
        wait_until(lambda: cluster.find("worker2").lost)
        keepers.another(cluster)
        assert cluster.restart() == ["worker2"]
        assert sum_of_ranks(cluster) == [6.0] * 4
        folder, here = cluster.folder, keeper_of(cluster, "worker0").record.pid
    assert not os.path.exists(folder)
    wait_until(lambda: not psutil.pid_exists(here))


def test_a_start_on_this_host_that_fails_says_why(monkeypatch):
    monkeypatch.setattr("nbdist.cluster.hosts.launchers.open_local._INVITED_FOR", 1e-9)
    with pytest.raises(ResourceError, match=r"the process that starts the workers of this host has ended: .*expired"):
        nbdist.Cluster(1, host="127.0.0.1", timeout=60).start()


def test_a_cluster_for_other_hosts_is_freed_after_its_end(tmp_path):
    cluster = nbdist.Cluster(1, host="127.0.0.1", timeout=60)
    assert cluster.evaluate("1") == [1]
    cell = cluster.execute("rank", keep=True)
    cluster.shutdown()
    hub = weakref.ref(cluster.lifecycle.launcher.hub)
    known = weakref.ref(cluster)
    del cluster, cell
    gc.collect()
    assert (known(), hub()) == (None, None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        unused = dict.fromkeys(("on_arrival", "on_gone", "on_end", "on_parcels"))
        with pytest.raises(ChannelError, match="are taken"):
            Hub("127.0.0.1", tmp_path, (port, port), **unused)


@pytest.mark.soak
def test_a_shutdown_while_a_worker_joins_leaves_nothing(keepers):
    with keepers.cluster() as cluster:
        folder = cluster.folder
        process = keepers.another(cluster)
        wait_until(lambda: cluster.lifecycle.launcher.wanted or len(cluster.lifecycle.launcher.placed) > 1, within=60)
    assert process.wait(20) is not None
    assert not os.path.exists(folder)
    assert not [thread for thread in threading.enumerate() if thread.name == "nbdist-growing" and thread.is_alive()]


@pytest.mark.soak  # tests/cluster/test_joining.py fills a place
@pytest.mark.skipif(not can_make_hosts(), reason="only root can make hosts, and only where the kernel allows it")
def test_a_worker_of_another_host_joins_and_its_place_is_filled_again(tmp_path):
    with hosts(3) as (address, others), cluster_on(others[:1], address, tmp_path, timeout=60) as cluster:
        file = tmp_path / "another.json"
        for other in others[1:]:
            count = len(cluster.workers)
            cluster.invite(str(file))
            other.start("-m", "nbdist", "worker", "--connect", "-", stdin=file.read_bytes())
            if count == 1:
                cluster.wait_for_workers(2, timeout=60)
                assert sum_of_ranks(cluster) == [1.0, 1.0]
                module = nbdist.nn.RemoteModule("worker1", torch.nn.Linear, (3, 2))
                assert module.forward(torch.ones(1, 3)).shape == (1, 2)
                other.kill()
                wait_until(lambda: cluster.find("worker1").lost, within=30)
            else:
                assert cluster.restart() == ["worker1"]
        assert len(cluster.workers) == 2
        assert sum_of_ranks(cluster) == [1.0, 1.0]


def test_a_new_worker_without_a_keeper_does_not_wait_for_another(tmp_path):
    spec = Spec(count=1, launcher="join", host="127.0.0.1", invitation=str(tmp_path / "invitation.json"))
    launcher = JoinLauncher(spec, lambda name, how: None)
    try:
        file = tmp_path / "connection.json"
        file.write_text("{}")
        setup = WorkerSetup("worker1", 2, 1, 2, str(file), str(tmp_path), "", 0, "gloo")
        launcher.expect(["worker1"])
        with pytest.raises(WorkerLost, match=r"worker1 has lost its place: the process that came for it has ended"):
            launcher.start(setup, {}).result(0)
        launcher.keep(["worker1"])
        assert not launcher.start(setup, {}).done()
    finally:
        launcher.close()


def test_a_notebook_says_below_the_cell_that_invites_who_has_joined(keepers):
    file = keepers.file.with_name("more.json")
    with Notebook() as notebook:
        assert notebook.run("%dist_init -n 1 --launcher local --host 127.0.0.1 -t 60").error is None
        invited = notebook.run(f"%dist_invite {file}")
        assert "Invited 1 worker: on each host, with a copy of the file, run `python -m nbdist" in invited.stdout
        keepers.start(file=file)
        notebook.until(lambda: "2 workers. The process group is formed anew." in invited.stdout, timeout=60)
        assert notebook.run("%remote all world_size").result == "[2, 2]"
        assert "worker1" in repr(notebook.run("%dist_status").result)
        assert (
            notebook.run("%dist_init -n 1 --launcher local --host 127.0.0.1").stdout
            == "The cluster runs: worker0, worker1.\n"
        )
        assert (
            notebook.run("%dist_init -n 2 --launcher local --host 127.0.0.1").stdout
            == "The cluster runs: worker0, worker1.\n"
        )
        refused = notebook.run("%dist_init -n 3 --launcher local --host 127.0.0.1", check=False)
        assert refused.error["evalue"].startswith("another cluster runs, of 2 workers")
        assert notebook.run("%dist_shutdown").stdout == "0 processes left.\n"
