"""Every way to interrupt ends everything that a worker can be in (issue H, item 6).

The stop button of a real front end is in `test_interrupting`: it is the same SIGINT as Ctrl-C.
"""

import os
import signal
import threading
import time

import pytest
from helpers.processes import workers
from helpers.waiting import wait_until

import nbdist
from nbdist.cluster.interrupting import Interrupts

LIMIT = 20


@pytest.fixture
def cluster(shared_cluster, own_variables):
    """Two idle workers in a process group that works."""
    shared_cluster.execute("import time")
    yield shared_cluster
    shared_cluster.rebuild_process_group()
    shared_cluster.execute("t = torch.ones(1); dist.all_reduce(t); assert t.item() == 2", timeout=LIMIT)


def by_interrupt(cluster):
    cluster.interrupt("worker0")


def by_panel(cluster):
    widgets = pytest.importorskip("nbdist.views.widgets.panel")
    from nbdist.views.workers.panel import Panel

    widgets.PanelView(Panel(cluster)).press({"press": "interrupt", "worker": "worker0"})


def by_ctrl_c(cluster):
    os.kill(os.getpid(), signal.SIGINT)


WAYS = {"interrupt()": by_interrupt, "the panel's button": by_panel, "Ctrl-C": by_ctrl_c}

NAP = "def nap(mark):\n    open(mark, 'w').close()\n    while True: time.sleep(0.01)\n"
WORK = {
    "a sleep": "open(mark, 'w').close(); time.sleep(600)",
    "a loop": "open(mark, 'w').close()\nwhile True: pass",
    "a call": NAP + "rpc.rpc_sync('worker1', nap, args=(mark,))",
    "a collective": "open(mark, 'w').close(); dist.all_reduce(torch.ones(1))",
    "an asynchronous collective": "open(mark, 'w').close(); dist.all_reduce(torch.ones(1), async_op=True).wait()",
    "a collective in a call": (
        "def join(mark):\n    open(mark, 'w').close()\n    dist.all_reduce(torch.ones(1))\n"
        "rpc.rpc_sync('worker1', join, args=(mark,))"
    ),
}


def reach(ready):
    """Return when ``ready()``, and a worker that has said so has come into the wait that follows."""
    wait_until(ready, within=LIMIT)
    time.sleep(0.3)  # from the mark into the wait: of that nothing tells


def press_when(way, cluster, ready):
    """Interrupt in another thread as soon as ``ready()``; return that thread."""

    def press():
        try:
            reach(ready)
        finally:  # the test fails, but does not wait for ever
            WAYS[way](cluster)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("way", WAYS)
def test_work_ends(cluster, tmp_path, way, work):
    cluster.push({"mark": str(tmp_path / "mark")}, "worker0")
    pressing = press_when(way, cluster, (tmp_path / "mark").exists)
    began = time.monotonic()
    with pytest.raises(BaseException) as ended:  # noqa: PT011 (its type is made for it)
        cluster.execute(WORK[work], "worker0")
    pressing.join()
    assert time.monotonic() - began < LIMIT / 2
    assert type(ended.value).__name__ == "KeyboardInterrupt", ended.value
    assert "did not stop within" not in str(ended.value)
    shown = "\n".join(ended.value.traceback)
    assert ("%dist_restart" in shown) == ("collective" in work and "call" not in work), shown
    cluster.execute("pass", timeout=LIMIT)  # neither worker is stuck in a cell


@pytest.mark.parametrize("way", WAYS)
def test_half_a_tensor_whose_sender_stands_still_ends(cluster, tmp_path, way):
    # The receiver stands still until the connection is full, and then the sender does.
    receiver, sender = (cluster.find(name).pid for name in ("worker0", "worker1"))
    cluster.execute(f"large, mark = torch.ones(10_000_000), f'{tmp_path}/{{rank}}'")

    def press():
        reach((tmp_path / "0").exists)
        workers.stop(receiver)
        sending.append(cluster.execute("open(mark, 'w').close(); dist.send(large, dst=0)", "worker1", block=False))
        reach((tmp_path / "1").exists)
        workers.stop(sender)
        os.kill(receiver, signal.SIGCONT)
        time.sleep(0.3)  # until it has read what the connection held
        WAYS[way](cluster)

    sending = []
    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        with pytest.raises(BaseException) as ended:  # noqa: PT011 (its type is made for it)
            cluster.execute("open(mark, 'w').close(); dist.recv(large, src=1)", "worker0")
        pressing.join()
    finally:
        for pid in (receiver, sender):
            os.kill(pid, signal.SIGCONT)
    assert type(ended.value).__name__ == "KeyboardInterrupt", ended.value
    assert "did not stop within" not in str(ended.value)
    cluster.interrupt("worker1")  # whose transfer gloo may have forgotten, too
    with pytest.raises(nbdist.NbdistError) as ended:
        sending[0].wait(LIMIT)
    assert type(ended.value).__name__ in ("KeyboardInterrupt", "GroupError"), ended.value


@pytest.mark.parametrize("way", ["interrupt()", "the panel's button"])
def test_a_cell_that_has_not_begun_does_not_run(cluster, way):
    first = cluster.execute("time.sleep(600)", 0, block=False)
    second = cluster.execute("second = True", 0, block=False)
    wait_until(lambda: first.parts["worker0"].began is not None)
    WAYS[way](cluster)
    for cell in (first, second):
        with pytest.raises(nbdist.NbdistError) as ended:
            cell.wait(LIMIT)
        assert type(ended.value).__name__ == "KeyboardInterrupt"
    assert cluster.evaluate("'second' in globals()", 0) is False


def test_any_number_of_cells_can_be_called_off(cluster):
    cluster.execute("number = 0", 0)
    first = cluster.execute("time.sleep(600)", 0, block=False)
    waiting = [cluster.execute("number += 1", 0, block=False) for _ in range(1100)]
    for cell in waiting:
        cluster.agent.at("worker0", "output").ask("call_off", cell.parts["worker0"].id)
    first.cancel()
    assert cluster.evaluate("number", 0, timeout=LIMIT) == 0
    assert all(cell.errors for cell in waiting)
    assert cluster.evaluate("len(rpc.api.current_agent().named.find('output').called_off)", 0) == 0


@pytest.mark.parametrize("way", ["interrupt()", "the panel's button"])
def test_a_cell_behind_a_request_that_is_no_cell_does_not_run(cluster, way):
    sent = threading.Event()

    work = "import builtins, time\nbuiltins.busy = True\ntry: time.sleep(600)\nfinally: del builtins.busy"

    async def do_something_else():
        call = cluster.find("worker0").call(f"setup and exec({work!r})")
        sent.set()
        await call

    other = cluster.kernel_thread.run(do_something_else())
    assert sent.wait(LIMIT)
    cell = cluster.execute("third = True; time.sleep(600)", 0, block=False)
    reach(lambda: cluster.agent.ask("worker0", eval, "hasattr(__import__('builtins'), 'busy')"))
    WAYS[way](cluster)
    with pytest.raises(nbdist.NbdistError) as ended:
        cell.wait(LIMIT)
    assert type(ended.value).__name__ == "KeyboardInterrupt"
    with pytest.raises(nbdist.NbdistError, match="KeyboardInterrupt"):
        other.result(LIMIT)
    assert cluster.evaluate("'third' in globals()", 0) is False


def test_ctrl_c_calls_off_the_cell_that_is_waited_for_and_no_other(cluster):
    first = cluster.execute("time.sleep(8); first = True", 0, block=False)
    pressing = press_when("Ctrl-C", cluster, lambda: first.parts["worker0"].began is not None)
    with pytest.raises(KeyboardInterrupt, match="worker0 has not begun this cell"):
        cluster.execute("second = True", 0)
    pressing.join()
    first.wait(LIMIT)
    assert cluster.evaluate("first, 'second' in globals()", 0) == (True, False)


def test_an_interrupt_leaves_one_group_which_says_so_and_others_work_on(cluster, tmp_path):
    cluster.execute("pair = dist.new_group([0, 1])")
    cluster.push({"mark": str(tmp_path / "mark")}, "worker0")
    pressing = press_when("interrupt()", cluster, (tmp_path / "mark").exists)
    with pytest.raises(nbdist.NbdistError, match=r"^stopped in dist.all_reduce\(\), In\[\d+\]:1$"):
        cluster.execute("open(mark, 'w').close(); dist.all_reduce(torch.ones(1), group=pair)", 0)
    pressing.join()
    cluster.execute("t = torch.ones(1); dist.all_reduce(t); assert t.item() == 2", timeout=LIMIT)
    with pytest.raises(nbdist.GroupError, match="an interrupt has broken this process group off") as ended:
        cluster.execute("dist.all_reduce(torch.ones(1), group=pair)", timeout=LIMIT)
    assert {error.worker for error in ended.value.errors} == {"worker0", "worker1"}
    for error in ended.value.errors:
        assert "%dist_restart -p" in "\n".join(error.traceback)


def test_interrupt_ends_calls_that_a_worker_runs_for_others(cluster, tmp_path):
    cluster.push({"mark": str(tmp_path / "mark")}, "worker0")
    cell = cluster.execute(WORK["a call"], "worker0", block=False)
    wait_until(lambda: (tmp_path / "mark").exists())
    cluster.interrupt("worker1")
    with pytest.raises(nbdist.NbdistError, match="KeyboardInterrupt"):
        cell.wait(LIMIT)


def test_what_is_sent_after_an_interrupt_runs(cluster):
    for number in range(10):
        cluster.interrupt()
        cluster.execute(f"number = {number}", timeout=LIMIT)
        assert cluster.evaluate("number") == [number, number]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_goes_through_one_function(cluster, tmp_path, monkeypatch, way):
    used = []
    plain = Interrupts.interrupt

    async def interrupt(*arguments):
        used.append(arguments)
        return await plain(*arguments)

    monkeypatch.setattr(Interrupts, "interrupt", interrupt)
    cluster.push({"mark": str(tmp_path / "mark")}, "worker0")
    pressing = press_when(way, cluster, (tmp_path / "mark").exists)
    with pytest.raises(BaseException):  # noqa: B017, PT011
        cluster.execute(WORK["a sleep"], "worker0")
    pressing.join()
    assert len(used) == 1
