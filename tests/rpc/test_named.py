"""Objects that have a name on an agent, and whose methods other agents call."""

import gc
import threading

import pytest

from nbdist.rpc.named import NotOffered
from nbdist.testing import World


class Counter:
    def __init__(self):
        self.value, self.asked = 0, threading.Event()

    def add(self, amount):
        self.value += amount
        self.asked.set()
        return self.value

    def reset(self):
        self.value = 0


@pytest.fixture
def world():
    with World(2) as world, world[0].activate():
        yield world


@pytest.fixture
def counter(world):
    made = Counter()
    world[1].named.publish("counter", made, "add")
    return made


def test_a_published_method_is_called(world, counter):
    there = world[0].at("worker1", "counter")
    assert there.ask("add", 2) == 2
    assert there.call("add", 3).wait() == 5
    counter.asked.clear()
    there.cast("add", 1)
    assert counter.asked.wait(10)
    assert counter.value == 6


def test_an_agent_calls_its_own_objects_too(world, counter):
    assert world[1].at("worker1", "counter").ask("add", 1) == 1


@pytest.mark.parametrize("method", ["reset", "value", "__init__", "_change", "nothing"])
def test_no_other_method_can_be_called(world, counter, method):
    with pytest.raises(NotOffered, match=rf"worker1 offers no counter\.{method}"):
        world[0].at("worker1", "counter").ask(method)
    assert counter.value == 0


def test_a_name_that_nobody_has_is_an_error(world):
    with pytest.raises(NotOffered, match=r"offers no counter\.add"):
        world[0].at("worker1", "counter").ask("add", 1)
    world[0].at("worker1", "counter").cast("add", 1)
    world[0].at("nobody", "counter").cast("add", 1)


def test_it_is_not_owned(world, counter):
    other = Counter()
    world[1].named.publish("other", other, "add")
    del other
    gc.collect()
    with pytest.raises(NotOffered, match=r"offers no other\.add"):
        world[0].at("worker1", "other").ask("add", 1)


def test_what_is_withdrawn_is_not_called(world, counter):
    assert world[1].named.find("counter") is counter
    world[1].named.withdraw("counter")
    world[1].named.withdraw("counter")
    assert world[1].named.find("counter") is None
    with pytest.raises(NotOffered, match=r"worker1 offers no counter\.add: what offered it has ended"):
        world[0].at("worker1", "counter").begin("add", 1).wait()


def test_errors_call_one_of_several_by_its_kind(world):
    made = Counter()
    world[1].named.publish("counter 7f", made, "add")
    with pytest.raises(TypeError, match="unsupported operand") as raised:
        world[0].at("worker1", "counter 7f").begin("add", "text").wait()
    assert any("in counter.add:" in note for note in raised.value.__notes__), raised.value.__notes__


def test_errors_call_it_by_its_name(world, counter):
    with pytest.raises(TypeError, match="unsupported operand") as raised:
        world[0].at("worker1", "counter").ask("add", "text")
    assert any("counter.add" in note for note in raised.value.__notes__), raised.value.__notes__


def test_what_is_replaced_is_not_called(world, counter):
    replacement = Counter()
    world[1].named.publish("counter", replacement, "add")
    assert world[0].at("worker1", "counter").ask("add", 7) == 7
    assert counter.value == 0


def test_two_agents_of_a_process_have_objects_of_one_name(world, counter):
    mine = Counter()
    world[0].named.publish("counter", mine, "add")
    assert world[0].at("worker0", "counter").ask("add", 1) == world[0].at("worker1", "counter").ask("add", 1) == 1
