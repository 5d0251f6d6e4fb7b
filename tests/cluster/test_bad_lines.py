"""Workers at the end of a bad line: delay, lost frames, reset connections, a line that freezes or is cut."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import psutil
import pytest
import torch
from helpers.hosts.keepers import cluster_on
from helpers.hosts.other_hosts import can_make_hosts, hosts
from helpers.hosts.relay import can_relay, relay
from helpers.waiting import wait_until

from nbdist import rpc
from nbdist.errors import WorkerLost

pytestmark = pytest.mark.skipif(
    not (can_make_hosts() and can_relay()),
    reason="only root can make hosts and TAP devices, where the kernel allows it",
)

DEFINITIONS = """
import time
from nbdist import rpc
counted = []
def count(number):
    counted.append(number)
    return number
def rank_there():
    return rank
def sleep_at(worker):
    return rpc.rpc_sync(worker, time.sleep, args=(1000,), timeout=0)
"""
"""Run on the workers: `count` notes each of its calls."""


@contextlib.contextmanager
def behind_a_relay(count, folder, **options):
    """Hosts, the first of them behind a relay, and a cluster with a worker on each; yields (hosts, relay, cluster)."""
    with (
        hosts(count) as (address, others),
        relay(others[0], **options) as line,
        cluster_on(others, address, folder, timeout=60) as cluster,
    ):
        cluster.execute(DEFINITIONS)
        yield others, line, cluster


def behind(cluster, other) -> str:
    """Return the name of the worker on a host."""
    records = [record for record in cluster.agent.members() if any(other.address in at for at in record.addresses)]
    return records[0].name


def count(worker: str, number: int):
    """Call `count` on a worker; return the future."""
    return rpc.rpc_async(worker, eval, args=(f"__import__('__main__').count({number})",))


def expect_each_once(cluster, worker: str, calls: list) -> None:
    """Check that each of the calls has its own answer, and that the worker ran it once."""
    assert [call.wait() for call in calls] == list(range(len(calls)))
    assert sorted(cluster.evaluate("counted", worker)) == list(range(len(calls)))


@pytest.mark.parametrize("loss", [0.0, pytest.param(0.03, marks=pytest.mark.soak)])
def test_everything_works_over_a_line_of_50_ms(tmp_path, loss):
    """Frames are lost from the beginning: also while the worker joins and the process group forms."""
    with behind_a_relay(2, tmp_path, delay=0.025, loss=loss) as (others, line, cluster):
        far = behind(cluster, others[0])
        cluster.execute("total = torch.ones(300_000) * (rank + 1); dist.all_reduce(total)")
        assert [tensor.sum().item() for tensor in cluster.pull("total")] == [900_000.0] * 2
        tensor = torch.arange(1_000_000)
        assert torch.equal(rpc.rpc_sync(far, torch.Tensor.clone, args=(tensor,)), tensor)
        cluster.execute("said = rpc.rpc_sync(f'worker{1 - rank}', rank_there)")
        assert cluster.pull("said") == [1, 0]
        reference = rpc.remote(far, torch.ones, args=(3,))
        assert reference.to_here().tolist() == [1, 1, 1]
        expect_each_once(cluster, far, [count(far, number) for number in range(100)])
        assert line.counts()["carried"] > 2000


@pytest.mark.parametrize("loss", [0.01, pytest.param(0.05, marks=pytest.mark.soak)])
def test_lost_frames_lose_and_repeat_no_call(tmp_path, loss):
    with behind_a_relay(1, tmp_path, delay=0.005) as (_, line, cluster):
        line.set(loss=loss)
        calls = []
        for number in range(200):
            calls.append(count("worker0", number))
            if number % 3 == 0:
                calls[-1].wait()
        expect_each_once(cluster, "worker0", calls)
        printed = cluster.execute("for number in range(300): print(number, flush=True)")
        assert "".join(each["text"] for each in printed.outputs["worker0"]).split() == [str(i) for i in range(300)]
        assert line.counts()["lost"]


def test_reset_connections_lose_and_repeat_no_call(tmp_path):
    """A reset loses what is on the way: the agents connect again, and send what was not acknowledged once more."""
    moments = random.Random(0)
    with behind_a_relay(1, tmp_path, delay=0.005) as (_, line, cluster):
        over = threading.Event()

        def reset() -> None:
            while not over.wait(moments.uniform(0.5, 1.5)):
                line.reset()

        resetting = threading.Thread(target=reset)
        resetting.start()
        try:
            calls = []
            deadline = time.monotonic() + 60
            while len(calls) < 200 or (line.counts()["reset"] < 4 and time.monotonic() < deadline):
                calls.append(count("worker0", len(calls)))
                time.sleep(0.02)
            expect_each_once(cluster, "worker0", calls)
        finally:
            over.set()
            resetting.join()
        assert line.counts()["reset"] >= 4


def test_a_line_frozen_for_three_seconds_loses_and_repeats_nothing(tmp_path):
    with behind_a_relay(2, tmp_path) as (others, line, cluster):
        far = behind(cluster, others[0])
        cell = cluster.execute(
            "import time\nfor i in range(50):\n    print(i, flush=True); time.sleep(0.1)", block=False
        )
        calls = [count(far, number) for number in range(10)]
        time.sleep(1)
        line.freeze()
        calls += [count(far, number) for number in range(10, 40)]
        time.sleep(3)
        line.thaw()
        expect_each_once(cluster, far, calls)
        cell.wait()
        for outputs in cell.outputs.values():
            assert "".join(output["text"] for output in outputs).split() == [str(i) for i in range(50)]


@pytest.mark.soak
@pytest.mark.parametrize("how", ["both", "from", "to", "cut"])
def test_a_line_that_is_dead_for_thirty_seconds_is_named(tmp_path, how):
    """A frozen line leaves every connection open at both ends; a cut one loses its frames.

    A line that is frozen one way is half open: one end hears the other, which hears nothing.
    """
    with behind_a_relay(2, tmp_path) as (others, line, cluster):
        far = behind(cluster, others[0])
        near = behind(cluster, others[1])
        cell = cluster.execute(
            f"if rank == {far[-1]}: time.sleep(1000)\nelse: dist.all_reduce(torch.ones(1))", block=False
        )
        waiting = rpc.rpc_async(far, eval, args=("__import__('time').sleep(1000)",), timeout=0)
        between = rpc.rpc_async(near, eval, args=(f"__import__('__main__').sleep_at({far!r})",), timeout=0)
        time.sleep(1)
        began = time.monotonic()
        others[0].cut() if how == "cut" else line.freeze(how)
        try:
            with pytest.raises(WorkerLost, match=rf"{far} (is lost: its keeper on .* )?has been silent for 1\d"):
                waiting.wait()
            assert 10 < time.monotonic() - began < 20
            with pytest.raises(WorkerLost, match=far):
                cell.wait()
            with pytest.raises(WorkerLost, match=far):
                between.wait()
            with pytest.raises(WorkerLost, match=far):
                rpc.rpc_sync(far, eval, args=("1",))
            assert time.monotonic() - began < 25
            assert [worker.name for worker in cluster.workers if worker.lost] == [far]
            assert cluster.evaluate("rank", near) == int(near[-1])
            time.sleep(max(0.0, began + 30 - time.monotonic()))
        finally:
            others[0].mend() if how == "cut" else line.thaw()
        wait_until(lambda: not others[0].pids(), within=20)
        assert cluster.evaluate("rank", near) == int(near[-1])
        file = tmp_path / "another.json"
        cluster.invite(str(file))
        others[0].start("-m", "nbdist", "worker", "--connect", "-", stdin=file.read_bytes())
        assert cluster.restart() == [far]
        cluster.execute("total = torch.tensor(float(rank + 1)); dist.all_reduce(total)")
        assert [float(total) for total in cluster.pull("total")] == [3.0, 3.0]


@pytest.mark.soak
def test_connections_of_a_host_without_power_are_closed(tmp_path):
    """Nothing ever comes from such a host, not even the end of a connection: TCP must ask, after 30 to 60 seconds."""
    with hosts(1) as (address, (other,)), cluster_on([other], address, tmp_path, timeout=60) as cluster:

        def connections() -> int:
            found = psutil.Process().net_connections("tcp")
            return sum(bool(each.raddr) and each.raddr.ip == other.address for each in found)

        assert connections() >= 4
        other.cut()
        other.kill()
        wait_until(lambda: cluster.find("worker0").lost)
        wait_until(lambda: not connections(), within=100)
