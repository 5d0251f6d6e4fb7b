"""The length of Python threads' turns, while there are agents."""

import sys
import threading
import time

import pytest
import workers

from nbdist import rpc
from nbdist.errors import UsageError
from nbdist.rpc import turntaking
from nbdist.rpc.api import finish, initialize


@pytest.fixture(autouse=True)
def as_before():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def test_the_shortest_holds_until_all_have_ended():
    first, second = turntaking.shorten(0.001), turntaking.shorten(0.0005)
    same, longer = turntaking.shorten(0.0005), turntaking.shorten(0.1)
    for end in (longer, first, second):
        assert sys.getswitchinterval() == pytest.approx(0.0005)
        end()
    assert sys.getswitchinterval() == pytest.approx(0.0005)
    same()
    assert sys.getswitchinterval() == pytest.approx(0.005)
    turntaking.shorten(0)()
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_what_the_user_sets_stays():
    end = turntaking.shorten(0.001)
    sys.setswitchinterval(0.002)
    end()
    assert sys.getswitchinterval() == pytest.approx(0.002)


def test_an_agent_shortens_turns_while_it_lives(tmp_path):
    def start(name, **chosen):
        return initialize("alone", 0, 1, rpc.RpcBackendOptions(init_method=f"file://{tmp_path / name}", **chosen))

    agent = start("a")
    assert sys.getswitchinterval() < 0.001
    finish(agent)
    assert sys.getswitchinterval() == pytest.approx(0.005)
    finish(start("b", switch_interval=0))
    agent = start("c", switch_interval=0.002)
    assert sys.getswitchinterval() == pytest.approx(0.002)
    finish(agent)
    with pytest.raises(UsageError):
        rpc.RpcBackendOptions(switch_interval=-1)


def test_a_busy_main_thread_keeps_nobody_waiting(tmp_path):
    agent = initialize("alone", 0, 1, rpc.RpcBackendOptions(init_method=f"file://{tmp_path / 'd'}"))
    taken, over = [], threading.Event()

    def call():
        with agent.activate():
            for value in range(100):
                assert rpc.rpc_sync("alone", workers.identity, args=(value,)) == value
        taken.append(time.perf_counter())
        over.set()

    thread = threading.Thread(target=call)
    start = time.perf_counter()
    thread.start()
    while not over.is_set() and time.perf_counter() - start < 30:  # with turns of 5 ms it takes 1 s and more
        sum(range(100))
    finish(agent)
    thread.join()
    assert taken
