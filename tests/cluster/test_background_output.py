"""The output of a thread that a cell has started stays with this cell while the process group forms anew."""

import io

import pytest
from helpers.waiting import wait_until

from nbdist.cluster.kernels.workers import StartError

STARTED = """
import threading
said, ended = threading.Event(), threading.Event()
def work():
    said.wait(60)
    print("from the thread", flush=True)
    rpc.rpc_sync("worker1", print, args=("from a call of the thread",))
    ended.set()
threading.Thread(target=work).start()
"""


@pytest.fixture
def cluster(shared_cluster, own_variables):
    return shared_cluster


def printed(cell, worker):
    return "".join(each.get("text", each["output_type"]) for each in cell.outputs[worker])


def test_it_stays_with_its_cell_while_the_process_group_forms(cluster, capfd):
    cell = cluster.execute(STARTED, 0)
    cluster.rebuild_process_group()
    cluster.agent.ask("worker0", eval, "__import__('__main__').said.set()")
    wait_until(lambda: cluster.agent.ask("worker0", eval, "__import__('__main__').ended.is_set()"))
    wait_until(lambda: printed(cell, "worker0"), equals="from the thread\n")
    shown = io.StringIO()
    wait_until(lambda: shown.write(capfd.readouterr().out) >= 0 and "from a call of the thread" in shown.getvalue())


def test_the_error_of_a_silent_request_is_not_shown_below_the_cell_before(cluster):
    cell = cluster.execute("print('whole')", 0)

    async def fail():
        await cluster.find("worker0").call("missing()")

    with pytest.raises(StartError, match="missing"):
        cluster.kernel_thread.run(fail()).result(60)
    cluster.sync()
    assert printed(cell, "worker0") == "whole\n"


def test_a_silent_request_runs_after_a_cell_that_was_called_off(cluster):
    running = cluster.execute("import time; time.sleep(600)", block=False)
    waiting = cluster.execute("called_off = True", block=False)
    waiting.cancel()
    running.cancel()
    for cell in (running, waiting):
        with pytest.raises(KeyboardInterrupt):
            cell.wait(60)
    cluster.rebuild_process_group()
    assert cluster.evaluate("'called_off' in globals()") == [False, False]
