"""After a restart the process group is whole again, or says why not; what held the old one says so too."""

import time

import psutil
import pytest
from helpers.waiting import wait_until

import nbdist

LIMIT = 30
SAYS_OLD = "this process group is from before the last %dist_restart"
HOLDERS = """
from torch.nn.parallel import DistributedDataParallel
pair, whole = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
model = DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
"""
# The function finds the other worker's own group.
USE = """
def use():
    import __main__
    dist.barrier(group=__main__.pair)
rpc.rpc_sync("worker1", use)
"""
SUM = "t = torch.ones(1); dist.all_reduce(t); assert t.item() == 3"


@pytest.fixture(scope="module")
def shared():
    with nbdist.Cluster(3) as cluster:
        yield cluster


@pytest.fixture
def three(shared):
    """Three idle workers in a process group that works."""
    yield shared
    shared.restart(process_group=True)
    shared.execute(SUM, timeout=LIMIT)


def kill(cluster, rank):
    worker = cluster.workers[rank]
    psutil.Process(worker.pid).kill()
    wait_until(lambda: worker.lost is not None and worker.ended.is_set())


def fail(cluster, code, targets=None):
    """Execute a cell that fails; return its error, and the text with which it is shown."""
    with pytest.raises(nbdist.NbdistError) as caught:
        cluster.execute(code, targets, timeout=LIMIT)
    assert not isinstance(caught.value, TimeoutError)
    return caught.value, "\n".join(caught.value.traceback)


def test_a_restart_forms_the_group_anew(three):
    kill(three, 2)
    assert three.restart() == ["worker2"]
    assert three.awaited == []
    three.execute(SUM, timeout=LIMIT)


def test_a_living_worker_that_is_restarted_joins_it_too(three):
    assert three.restart("worker1") == ["worker1"]
    three.execute(SUM, timeout=LIMIT)


def test_nobody_to_restart_is_no_error(three):
    assert three.restart() == []
    three.execute(SUM, timeout=LIMIT)


def test_while_one_is_busy_it_waits_and_collectives_say_so(three, tmp_path):
    go = tmp_path / "go"
    busy = three.execute(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)", 0, block=False)
    kill(three, 2)
    three.restart()
    assert three.awaited == ["worker0"]
    error, shown = fail(three, "dist.all_reduce(torch.ones(1))", 2)
    assert type(error).__name__ == "GroupError"
    assert "this worker has no process group: it is formed anew once all workers are idle" in shown
    error, shown = fail(three, "dist.all_reduce(torch.ones(1))", 1)
    assert type(error).__name__ == "WorkerLost"
    assert "forms the process group anew once all workers are idle" in shown
    go.touch()
    busy.wait(LIMIT)
    three.execute(SUM, timeout=LIMIT)


def test_what_holds_the_old_group_says_so(three):
    three.execute(HOLDERS, timeout=LIMIT)
    kill(three, 2)
    three.restart()
    for code in ("dist.all_reduce(torch.ones(1), group=pair)", "model(torch.ones(1, 2)).sum().backward()"):
        error, shown = fail(three, code, [0, 1])
        assert type(error).__name__ == "GroupError"
        assert shown.count(SAYS_OLD) == 1  # the same on both
        assert "gloo" not in shown
    three.execute(SUM, timeout=LIMIT)


def test_an_old_group_that_somebody_keeps_takes_no_more_files_at_each_death(three):
    three.execute("kept = dist.group.WORLD", [0, 1], timeout=LIMIT)
    kill(three, 2)
    three.restart()
    kill(three, 2)
    time.sleep(0.3)  # what the death itself opens
    before = psutil.Process(three.workers[0].pid).num_fds()
    time.sleep(1)  # 20 looks for groups that form
    assert psutil.Process(three.workers[0].pid).num_fds() < before + 10
    three.restart()
    three.execute("del kept", [0, 1], timeout=LIMIT)


def test_the_same_where_nobody_had_died(three):
    three.execute(HOLDERS, timeout=LIMIT)
    three.rebuild_process_group()
    _, shown = fail(three, "dist.barrier(group=whole)", [0, 1])
    assert SAYS_OLD in shown
    _, shown = fail(three, "model(torch.ones(1, 2)).sum().backward()")
    assert SAYS_OLD in shown
    three.execute(SUM, timeout=LIMIT)


def test_inside_of_a_call_too(three):
    three.execute(HOLDERS, timeout=LIMIT)
    three.rebuild_process_group()
    _, shown = fail(three, USE, 0)
    assert SAYS_OLD in shown


def test_after_a_stop_on_one_worker_no_other_waits_in_the_group(three):
    cell = three.execute("dist.all_reduce(torch.ones(1))", 1, block=False)
    place = three.agent.at("worker1", "collectives")
    wait_until(lambda: (found := place.ask("place")) is not None and found.in_collective)
    cell.cancel()
    # Between worker0 and worker2 all connections are whole.
    code = "dist.send(torch.ones(1), 2) if dist.get_rank() == 0 else dist.recv(torch.ones(1), 0)"
    with pytest.raises(nbdist.GroupError, match="an interrupt has broken this process group off") as ended:
        three.execute(code, [0, 2], timeout=LIMIT)
    assert {error.worker for error in ended.value.errors} == {"worker0", "worker2"}


def test_after_stop_the_next_collective_says_what_to_do_in_one_line(three):
    cell = three.execute("dist.all_reduce(torch.ones(1))", [0, 1], block=False)
    time.sleep(1)
    cell.cancel()
    error, shown = fail(three, "dist.all_reduce(torch.ones(1))")
    assert type(error).__name__ == "GroupError"
    assert shown.count("an interrupt has broken this process group off, or a worker has destroyed it") == 1
    assert "gloo" not in shown
    assert len(shown.splitlines()) < 15


def test_a_restart_names_the_workers_that_it_waits_for(three):
    said = []

    def read(line):
        said.append(line)
        three.interrupt()

    three.on_joined = read
    busy = three.execute("import time; begun = True; time.sleep(600)", 1, block=False)
    wait_until(lambda: three.agent.ask("worker1", eval, "'begun' in __import__('__main__').__dict__"))
    three.restart(process_group=True)
    assert said == [f"The process group forms once all workers are idle: worker1 runs In[{busy.number}]"]
