"""Workers keep the values of last expressions as long as somebody can fetch them, and no longer."""

import gc

import psutil
import pytest
from helpers.waiting import wait_until

import nbdist
from nbdist.cluster.kernels import routing

LIMIT = 60
MANY = 1100


@pytest.fixture
def cluster(shared_cluster, own_variables):
    return shared_cluster


def kept(cluster):
    """Return how many values each worker keeps."""
    look = "len(__import__('nbdist').rpc.api.current_agent().named.find('output').values)"
    return [cluster.agent.ask(worker.name, eval, look) for worker in cluster.workers]


def test_a_value_that_some_workers_lack_is_kept_on_none(cluster):
    cluster.execute("y = torch.ones(3)", 0)
    with pytest.raises(NameError):
        cluster.pull("y")
    wait_until(lambda: kept(cluster), equals=[0, 0])
    with pytest.raises(NameError):
        cluster.execute("y", keep=True)
    wait_until(lambda: kept(cluster), equals=[0, 0])


def test_a_value_whose_cell_is_interrupted_is_kept_on_none(cluster):
    with pytest.raises(TimeoutError):
        cluster.evaluate("__import__('time').sleep(600 * rank)", timeout=1)
    wait_until(lambda: kept(cluster), equals=[0, 0])


def test_a_value_that_is_a_list_is_one_value(cluster):
    cluster.push({"pair": [1, 2], "single": 3})
    assert cluster.pull(["pair"], 0) == {"pair": [1, 2]}
    assert cluster.pull(["pair", "single"], "worker1") == {"pair": [1, 2], "single": 3}
    assert cluster.pull(["pair"], [0]) == [{"pair": [1, 2]}]
    assert cluster.pull(["pair"]) == [{"pair": [1, 2]}] * 2


def test_no_names_give_an_empty_dict(cluster):
    assert cluster.pull([]) == [{}, {}]
    assert cluster.pull([], 0) == {}


def test_a_value_that_cannot_be_sent_is_not_kept(cluster):
    with pytest.raises(nbdist.NbdistError):
        cluster.evaluate("__import__('threading').Lock()")
    wait_until(lambda: kept(cluster), equals=[0, 0])


def test_values_are_kept_as_long_as_the_handle_of_the_cell(cluster, monkeypatch):
    monkeypatch.setattr(cluster._router, "_cells", {})  # else those of tests before are forgotten first
    monkeypatch.setattr(routing, "_CELLS_KEPT", 0)
    cell = cluster.execute("rank", keep=True)
    for _ in range(100):  # each makes the router forget one that has ended
        cluster.execute("pass", 0)
    gc.collect()
    assert kept(cluster) == [1, 1]
    del cell
    gc.collect()
    wait_until(lambda: kept(cluster), equals=[0, 0])


def test_any_number_of_values_is_kept(cluster):
    cells = [cluster.execute(f"{number}", 0, block=False, keep=True, quiet=True) for number in range(MANY)]
    cluster.sync()
    for number, cell in enumerate(cells):
        assert cluster.references(cell, 0).to_here(timeout=LIMIT) == number
    assert kept(cluster) == [0, 0]


def test_the_rref_of_a_dead_worker_says_so_and_the_others_have_values(cluster):
    cell = cluster.execute("rank + 5", block=False, keep=True)
    cell.wait(LIMIT)
    psutil.Process(cluster.workers[1].pid).kill()
    with pytest.raises(nbdist.WorkerLost):
        cluster.execute("while True: pass", 1, timeout=LIMIT)
    first, second = cluster.references(cell)
    assert first.to_here(timeout=LIMIT) == 5
    with pytest.raises(nbdist.WorkerLost, match="worker1"):
        second.to_here(timeout=LIMIT)
    cluster.restart()


def test_the_rref_of_a_worker_that_was_restarted_since_says_so(cluster):
    cell = cluster.execute("rank + 5", block=False, keep=True)
    cell.wait(LIMIT)
    cluster.restart("worker1")
    first, second = cluster.references(cell)
    assert first.to_here(timeout=LIMIT) == 5
    with pytest.raises(nbdist.WorkerLost, match="worker1 has ended since it was sent this cell"):
        second.to_here(timeout=LIMIT)
