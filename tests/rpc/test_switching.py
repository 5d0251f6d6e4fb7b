"""The length of Python threads' turns, while there are agents."""

import sys

import pytest

from nbdist import rpc
from nbdist.errors import UsageError
from nbdist.rpc import thread_switching
from nbdist.rpc.api import finish, initialize


@pytest.fixture(autouse=True)
def as_before():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def test_the_shortest_holds_until_all_have_ended():
    first, second = thread_switching.shorten(0.001), thread_switching.shorten(0.0005)
    same, longer = thread_switching.shorten(0.0005), thread_switching.shorten(0.1)
    for end in (longer, first, second):
        assert sys.getswitchinterval() == pytest.approx(0.0005)
        end()
    assert sys.getswitchinterval() == pytest.approx(0.0005)
    same()
    assert sys.getswitchinterval() == pytest.approx(0.005)
    thread_switching.shorten(0)()
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_what_the_user_sets_stays():
    end = thread_switching.shorten(0.001)
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
