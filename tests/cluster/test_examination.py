"""`Cluster.examine` and `%dist_doctor`: real workers, of which some are busy, dead, stopped or interrupted."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace

import pytest
from helpers.notebook.frontend import Notebook
from helpers.processes import workers
from helpers.waiting import wait_until

from nbdist.errors import UsageError


@pytest.fixture
def two(shared_cluster, own_variables):
    return shared_cluster


def of(found, *topics):
    return [str(each) for each in found.findings if each.topic in topics]


def test_every_way_is_measured_and_every_member_tells_its_facts(two):
    found = two.examine()
    names = ["notebook", "worker0", "worker1"]
    assert [each.name for each in found.members] == names
    assert all(each.facts.torch == found.members[0].facts.torch for each in found.members)
    ways = {(one, other) for one in names for other in names if one != other}
    assert {(each.sender, each.receiver) for each in found.links} == ways
    for each in found.links:
        assert not each.error
        assert 0 < each.latency < 1
        assert each.rate > 1e6
        assert abs(each.ahead) < 0.5
    assert of(found, "members", "versions", "clocks") == []
    assert found.link("worker0", "worker1").sender == "worker0"
    assert found.link("worker0", "worker7") is None


def test_it_shows_itself_as_text_and_as_html(two):
    found = two.examine()
    text, html = repr(found), found._repr_html_()
    lines = text.splitlines()
    assert lines[0].split()[:4] == ["member", "state", "device", "host"]
    (head,) = [line for line in lines if line.startswith("from \\ to")]
    assert head.split()[3:] == ["notebook", "worker0", "worker1"]
    (row,) = [line for line in lines[lines.index(head) :] if line.startswith("worker0")]
    assert row.count("B/s") == 2
    for part in ("<table>", "worker1", "memory left", "/dev/shm"):
        assert part in html
    told = [str(each) for each in found.findings] or ["Nothing is wrong with this cluster."]
    assert lines[-len(told) :] == told


def test_a_busy_worker_takes_part(two):
    cell = two.execute("import time\nwhile True: time.sleep(0.01)", 0, block=False)
    try:
        wait_until(lambda: "busy" in repr(two))
        found = two.examine()
        assert found.members[1].state == "busy"
        assert len(found.links) == 6
        assert all(each.rate for each in found.links)
    finally:
        cell.cancel()


def test_a_dead_worker_is_named_and_takes_no_time(two):
    os.kill(two.workers[1].pid, signal.SIGKILL)
    assert two.workers[1].ended.wait(20)
    began = time.monotonic()
    found = two.examine()
    assert time.monotonic() - began < 10
    assert {(each.sender, each.receiver) for each in found.links} == {("notebook", "worker0"), ("worker0", "notebook")}
    (told,) = of(found, "members")
    assert told.startswith("worker1: was killed by SIGKILL")
    assert told.endswith("Start it again with %dist_restart worker1.")


def test_a_stopped_worker_is_named_and_holds_nobody_up(two):
    workers.stop(two.workers[0].pid)
    try:
        began = time.monotonic()
        found = two.examine()
        assert time.monotonic() - began < 15
    finally:
        os.kill(two.workers[0].pid, signal.SIGCONT)
    (told,) = of(found, "members")
    assert told.startswith("worker0: it does not answer: no answer within 3 s")
    assert {(each.sender, each.receiver) for each in found.links} == {("notebook", "worker1"), ("worker1", "notebook")}


def test_a_worker_that_is_stopped_meanwhile_fails_its_ways_and_no_others(two):
    """The facts are known by then, so only the ways tell."""
    from nbdist.cluster.examination import examination

    seen = threading.Event()
    real = examination.measure_from_here

    def measure(to, part):
        workers.stop(two.workers[0].pid)
        seen.set()
        return real(to, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "measure_from_here", measure)
        patch.setattr(examination, "pairs_of", lambda names: [("notebook", "worker0"), ("worker0", "worker1")])
        try:
            found = two.examine()
        finally:
            os.kill(two.workers[0].pid, signal.SIGCONT)
    assert seen.is_set()
    (failed,) = found.links
    assert failed.error.startswith("RpcTimeout: ")
    (told,) = of(found, "links")
    assert told.startswith("notebook → worker0: calls fail: RpcTimeout: ")


@pytest.mark.parametrize("times", [1, 2])
def test_a_way_that_is_slow_is_measured_once_more(two, times):
    """A machine that does something else for a moment is no finding; a way that is slow twice is one."""
    from nbdist.cluster.examination import examination

    real, slow = examination.measure_link, []

    def measure(agent, sender, receiver, part):
        link, silent = real(agent, sender, receiver, part)
        if (sender, receiver) == ("worker0", "worker1") and len(slow) < times:
            slow.append(link)
            link = replace(link, latency=5.0, rate=1e3)
        return link, silent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "measure_link", measure)
        # No other way is slow, if the machine is.
        patch.setattr("nbdist.cluster.examination.findings._FAST_ENOUGH", 2.0)
        patch.setattr("nbdist.cluster.examination.findings._MOVES_FAST_ENOUGH", 1e4)
        found = two.examine()
    assert len(slow) == times
    told = of(found, "links")
    assert len(told) == times - 1
    assert all(each.startswith("worker0 → worker1: a small call takes 5.00 s") for each in told), told


def test_an_interrupted_measurement_is_a_failed_way(two):
    stop = threading.Event()

    def interrupt() -> None:
        while not stop.wait(0.02):
            two.interrupt(0)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        found = two.examine()
    finally:
        stop.set()
        thread.join()
    failed = [each for each in found.links if each.error]
    assert {each.sender for each in failed} | {each.receiver for each in failed} <= {"notebook", "worker0", "worker1"}
    assert all(each.rate for each in two.examine().links)


def test_ways_for_which_there_is_no_time_are_counted(two):
    found = two.examine(timeout=1e-6)
    assert found.links == []
    assert of(found, "links") == ["there was no time to measure 6 links. Allow more time: %dist_doctor -t 300."]
    with pytest.raises(UsageError, match="timeout must be more than 0 s, not 0"):
        two.examine(timeout=0)


def test_the_magic_shows_the_same():
    with Notebook() as notebook:
        assert notebook.run("%dist_doctor", check=False).error["ename"] == "UsageError"
        notebook.run("%dist_init -n 2 --backend none")
        data = notebook.run("%dist_doctor -t 30").of("execute_result")[-1]["data"]
        assert data["text/plain"].startswith("member")
        assert "<table>" in data["text/html"]
        failed = notebook.run("%dist_doctor -t 0", check=False).error
        assert "the time must be more than 0 s" in failed["evalue"]
