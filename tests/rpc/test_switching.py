"""The length of Python threads' turns, while there are agents: short while somebody waits for one of them."""

import os
import sys
import threading

import pytest
from helpers.waiting import wait_until

import nbdist
from nbdist import rpc
from nbdist.errors import UsageError
from nbdist.rpc.api import finish, initialize
from nbdist.rpc.thread_switching import switching

release = threading.Event()
WAIT_FOR_LONG_TURNS = """
import sys, time
until = time.monotonic() + 60
while (turns := sys.getswitchinterval()) < 0.0049 and time.monotonic() < until:
    pass
"""
SHORT, PYTHON = pytest.approx(0.0001), pytest.approx(0.005)


@pytest.fixture(autouse=True)
def as_before():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def test_the_shortest_holds_until_all_have_ended():
    first, second = switching.shorten(0.001), switching.shorten(0.0005)
    same, longer = switching.shorten(0.0005), switching.shorten(0.1)
    for end in (longer, first, second):
        assert sys.getswitchinterval() == pytest.approx(0.0005)
        end()
    assert sys.getswitchinterval() == pytest.approx(0.0005)
    same()
    assert sys.getswitchinterval() == pytest.approx(0.005)
    switching.shorten(0)()
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_what_the_user_sets_stays():
    end = switching.shorten(0.001)
    sys.setswitchinterval(0.002)
    end()
    assert sys.getswitchinterval() == pytest.approx(0.002)


@pytest.fixture
def start(tmp_path):
    started = []

    def start(**chosen):
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path / str(len(started))}", **chosen)
        started.append(initialize("alone", 0, 1, options))
        return started[-1]

    yield start
    for agent in started:
        if not agent.closed:
            finish(agent)


def wait_for_release():
    release.wait()


def turns_of_a_child():
    """Return the switch interval of a process that is forked while it is short here."""
    assert sys.getswitchinterval() == SHORT
    reads, writes = os.pipe()
    if not (pid := os.fork()):
        os.write(writes, repr(sys.getswitchinterval()).encode())
        os._exit(0)
    os.close(writes)
    with open(reads) as child:
        found = float(child.read())
    os.waitpid(pid, 0)
    return found


def is_relaxed():
    return sys.getswitchinterval() == PYTHON


def test_an_agent_shortens_turns_while_it_is_used(start):
    agent = start()
    for _ in range(2):
        wait_until(is_relaxed)
        assert rpc.rpc_sync("alone", sys.getswitchinterval) == SHORT
    finish(agent)
    assert sys.getswitchinterval() == PYTHON


def test_turns_stay_short_until_a_call_is_answered(start):
    start()
    answer = rpc.rpc_async("alone", wait_for_release, timeout=0)
    looks = set()
    wait_until(lambda: looks.add(switching.look_at) or len(looks) > 3)
    assert sys.getswitchinterval() == SHORT
    release.set()
    answer.wait()
    wait_until(is_relaxed)


def test_only_calls_shorten_the_turns_of_a_worker():
    """A cell computes with long turns, though the notebook and the other worker are there; a call finds short ones."""
    with nbdist.Cluster(2) as cluster:
        cluster.execute(WAIT_FOR_LONG_TURNS)
        assert cluster.pull("turns", "worker0") == PYTHON
        assert rpc.rpc_sync("worker0", sys.getswitchinterval) == SHORT


def test_a_forked_process_has_long_turns(start):
    start()
    wait_until(is_relaxed)
    assert rpc.rpc_sync("alone", turns_of_a_child) == PYTHON


def test_what_the_user_wants_is_kept(start):
    finish(start(switch_interval=0))
    assert sys.getswitchinterval() == PYTHON
    agent = start(switch_interval=0.002)
    wait_until(is_relaxed)
    assert rpc.rpc_sync("alone", sys.getswitchinterval) == pytest.approx(0.002)
    finish(agent)
    with pytest.raises(UsageError):
        rpc.RpcBackendOptions(switch_interval=-1)
