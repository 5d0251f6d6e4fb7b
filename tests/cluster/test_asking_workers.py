"""A question to all workers of a cluster tells every failure, and waits for nobody beyond its limit.

While somebody steps through a backward pass, the clocks of calls stand still. A worker that hangs then is given up all
the same, and its call does not stay pending.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.autograd import inspection
from nbdist.cluster import cell_values, interrupting
from nbdist.cluster.inspection import comparing, holdings, status, status_report
from nbdist.cluster.processes.probe import Probe
from nbdist.rpc.agent import active_agent
from nbdist.testing import World
from nbdist.views.passes import scouts

release = threading.Event()
ended: list[str] = []
"""The workers on which `hang` has ended."""


@pytest.fixture
def world():
    release.clear()
    ended.clear()
    with World(3) as world, world[0].activate():
        yield world
        release.set()


@pytest.fixture
def paused(world):
    """A world in which the clocks of the calls of the first agent stand still."""
    world[0].freeze(world[0].me.incarnation)
    return world


@pytest.fixture
def cluster(paused):
    """What a module needs of a cluster: an agent, and two workers."""
    workers = [SimpleNamespace(name=name, alive=True, step="ready", cells=[]) for name in ("worker1", "worker2")]
    return SimpleNamespace(
        agent=paused[0],
        workers=workers,
        kernel_thread=SimpleNamespace(soon=lambda *_: True),
        probe=probed,
        stops=SimpleNamespace(place=lambda _: ""),
    )


def probed(name):
    """Return the future of an answer of a worker's host, which knows nothing."""
    answer = Future()
    answer.set_result(Probe())
    return answer


def hang(*_):
    """Return the worker's name; on worker1 and worker2 not before the test ends."""
    name = active_agent().me.name
    if name != "worker0":
        release.wait(10)
        ended.append(name)
    return name


def fail(*_):
    raise ValueError(f"no, says {active_agent().me.name}")


def given_up(agent):
    """Return whether no call is pending, although the workers still hang."""
    return not agent.statistics()["pending_calls"] and not ended


# --- silence while the clocks stand still ---------------------------------------------------------


def test_the_holdings_of_silent_workers_are_missing(paused, monkeypatch):
    monkeypatch.setattr(holdings, "_REPORT_WITHIN", 0.1)
    assert holdings.ask_all(hang) == ({"worker0": "worker0"}, ["worker1", "worker2"])
    assert given_up(paused[0])


def test_the_status_of_silent_workers_is_what_the_notebook_knows(cluster, monkeypatch):
    monkeypatch.setattr(status, "_REPORT_WITHIN", 0.1)
    monkeypatch.setattr(status, "make_report", hang)
    facts = {"rank": 0, "state": "idle", "pid": 7, "device": "cpu", "gpu": None, "lost": None, "present_cell": None}
    for worker in cluster.workers:
        vars(worker).update(facts, log=SimpleNamespace(timed_lines=list))
    assert [(each.name, each.report.calls) for each in status.collect(cluster).rows] == [
        ("worker1", None),
        ("worker2", None),
    ]
    assert given_up(cluster.agent)


def test_an_interrupt_does_not_wait_for_silent_workers(cluster, monkeypatch):
    monkeypatch.setattr(interrupting, "_CALLS_STOP_WITHIN", 0.1)
    monkeypatch.setattr(interrupting, "stop_served_calls", hang)
    interrupting.Interrupts(Mock(), Mock(), cluster.agent, Mock()).stop_workers(cluster.workers)
    assert given_up(cluster.agent)


class Watcher:
    """A watcher that no scout asks anything."""


def test_a_watch_begins_without_silent_workers(paused, monkeypatch):
    monkeypatch.setattr(scouts, "_ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(scouts, "_send_out", hang)
    scouts.Scouts(Watcher(), held=False)
    assert given_up(paused[0])


# --- every error is told --------------------------------------------------------------------------


def notes_of(raised):
    return [note for note in raised.value.__notes__ if not note.startswith("raised on ")]


class Unhashable(torch.nn.Module):
    def state_dict(self, *_, **__):
        fail()


def test_each_worker_whose_value_cannot_be_compared_is_told(world):
    rrefs = {name: rpc.remote(name, Unhashable) for name in ("worker1", "worker2")}
    with pytest.raises(ValueError, match="no, says worker1") as raised:
        comparing.differences(rrefs)
    assert notes_of(raised) == ["1 more worker failed:\n  worker2: ValueError: no, says worker2"]


def local_nodes(*_):
    """Return what worker0 knows of a context: no nodes, and that all workers have some. The others fail."""
    if active_agent().me.name != "worker0":
        fail()
    return [], [], [record.incarnation for record in active_agent().members()]


def test_each_worker_that_cannot_tell_what_a_context_recorded_is_told(world, monkeypatch):
    monkeypatch.setattr(inspection, "local_nodes", local_nodes)
    with dist_autograd.context() as context_id, pytest.raises(ValueError, match="no, says worker1") as raised:
        dist_autograd.trace(context_id)
    assert notes_of(raised) == ["1 more worker failed:\n  worker2: ValueError: no, says worker2"]


def test_each_worker_whose_value_cannot_be_sent_is_told(world, monkeypatch):
    monkeypatch.setattr(cell_values, "take_last_value", fail)
    parts = {name: SimpleNamespace(worker=name, id=name) for name in ("worker1", "worker2")}
    dropped = []
    cell = SimpleNamespace(parts=parts, kept="its values", when_done=dropped.append)
    sender = Mock(execute=lambda *_, **__: cell)
    with pytest.raises(ValueError, match="no, says worker1") as raised:
        cell_values.CellValues(Mock(), sender, world[0]).evaluate("x")
    assert notes_of(raised) == ["1 more worker failed:\n  worker2: ValueError: no, says worker2"]
    assert dropped == ["its values"]


def test_a_workers_report_does_not_count_the_question(world):
    hanging = rpc.rpc_async("worker1", hang)
    report = rpc.rpc_sync("worker1", status_report.make_report)
    while report.calls < 1:  # the call may not have begun
        report = rpc.rpc_sync("worker1", status_report.make_report)
    assert report.calls == 1
    assert report.doing.startswith("hang for worker0 since "), report.doing
    assert "more" not in report.doing
    release.set()
    hanging.wait()
    assert rpc.rpc_sync("worker1", status_report.make_report).doing == ""
