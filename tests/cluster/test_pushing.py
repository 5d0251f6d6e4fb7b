"""A push that fails, or is interrupted, leaves nothing on the workers."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
from helpers.waiting import wait_until

import nbdist
from nbdist.cluster.worker.values import PushedValues

LIMIT = 60
LOOK = "list(__import__('nbdist').rpc.api.current_agent().named.find('pushed').arrived)"


@pytest.fixture
def cluster(shared_cluster, own_variables):
    return shared_cluster


def arrived(cluster):
    """Return how many pushes wait on each worker for the cell that places their variables."""
    return [len(cluster.agent.ask(worker.name, eval, LOOK)) for worker in cluster.workers]


class FailsOnTheFirst:
    """A value that cannot be rebuilt on worker0."""

    def __reduce__(self):
        return eval, ("1 / __import__('__main__').rank",)


def test_an_interrupted_push_leaves_nothing(cluster):
    busy = []

    class KeepsBusy:
        """A value that, when it is sent, has the workers busy until the push is interrupted."""

        def __reduce__(self):
            if not busy:
                busy.append(cluster.execute("import time; time.sleep(600)", block=False))
            return int, (1,)

    def press():
        wait_until(lambda: arrived(cluster) == [1, 1])
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        cluster.push({"pushed": KeepsBusy()})
    pressing.join()
    wait_until(lambda: arrived(cluster), equals=[0, 0])
    busy[0].cancel()
    assert cluster.evaluate("'pushed' in globals()") == [False, False]


def test_a_push_that_one_worker_cannot_read_leaves_nothing_on_the_others(cluster):
    with pytest.raises(nbdist.NbdistError):
        cluster.push({"pushed": FailsOnTheFirst()})
    wait_until(lambda: arrived(cluster), equals=[0, 0])
    assert cluster.evaluate("'pushed' in globals()") == [False, False]


def test_values_that_arrive_too_late_are_dropped():
    namespace = {}
    pushed = PushedValues(SimpleNamespace(push=namespace.update))
    pushed.forget("late")
    pushed.receive("late", {"x": 1})
    assert not pushed.arrived
    pushed.receive("late", {"x": 2})  # only once, or the token would be kept for ever
    pushed.place("late")
    assert namespace == {"x": 2}
