"""A reference that is let go of by hand: what is under way with it is not harmed, and nothing more can be asked."""

import copy
import gc
import threading

import pytest
import torch
from helpers.waiting import wait_until

from nbdist import RRefError, rpc
from nbdist.testing import Faults, World


@pytest.fixture(params=["", "disorderly"])
def world(request):
    faults = Faults(reorder={"*": 0.5}) if request.param else None
    with World(3, **({"faults": faults} if faults else {})) as world, world[0].activate():
        yield world


class Slow:
    def answer(self, x):
        threading.Event().wait(0.02)
        return x + 1


def value_of(rref):
    return rref.to_here()


def test_calls_under_way_have_their_answers(world):
    for _ in range(20):
        rref = rpc.remote("worker1", Slow)
        answers = [rref.rpc_async().answer(n) for n in range(3)]
        rref.release()
        assert [answer.wait() for answer in answers] == [1, 2, 3]


def test_messages_on_their_way_keep_it(world):
    for n in range(20):
        rref = rpc.remote("worker1", int, args=(n,))
        answer = rpc.rpc_async("worker2", value_of, args=(rref,))
        rref.release()
        assert answer.wait() == n


def test_while_others_hand_it_over(world):
    """Each hand-over goes through or says that it was let go of."""
    for n in range(20):
        rref = rpc.remote("worker1", int, args=(n,))
        found = []

        def hand_over(rref=rref, found=found):
            with world[0].activate():
                try:
                    found.append(rpc.rpc_sync("worker2", value_of, args=(rref,)))
                except RRefError as error:
                    found.append(str(error))

        threads = [threading.Thread(target=hand_over) for _ in range(2)]
        for thread in threads:
            thread.start()
        rref.release()
        for thread in threads:
            thread.join(30)
        assert all(answer == n or "release()" in answer for answer in found)
        assert len(found) == 2


def test_nothing_more_can_be_asked(world):
    for rref in (rpc.remote("worker1", torch.ones, args=(2,)), rpc.RRef(1)):
        rref.release()
        rref.release()
        for ask in (rref.to_here, rref.peek, lambda rref=rref: rpc.rpc_sync("worker2", value_of, args=(rref,))):
            with pytest.raises(RRefError, match="release"):
                ask()
        assert "released" in repr(rref)


def test_the_owner_lets_go_of_the_value(world):
    rref = rpc.remote("worker1", torch.ones, args=(2,))
    rref.to_here()
    owner = world[1].references.forks
    assert owner.owns(rref.id)
    rref.release()
    for _ in range(200):
        rpc.rpc_sync("worker1", int)
        if not owner.owns(rref.id):
            break
    assert not owner.owns(rref.id)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda rref: copy.deepcopy([rref])[0]])
@pytest.mark.parametrize("owner", ["worker0", "worker1"])
def test_a_copy_keeps_the_value_when_the_other_is_released(world, owner, copied):
    def owned():
        return len(world[int(owner[-1])].references.owned())

    rref = rpc.remote(owner, int, args=(5,))
    assert rref.to_here() == 5
    second = copied(rref)
    third = copied(second)
    assert (second.owner(), second.confirmed_by_owner()) == (rref.owner(), rref.confirmed_by_owner())
    rref.release()
    with pytest.raises(RRefError, match="nothing to copy"):
        copied(rref)
    assert second.to_here() == 5
    assert rpc.rpc_sync("worker2", value_of, args=(second,)) == 5
    del second
    gc.collect()
    assert third.rpc_sync().conjugate() == 5
    assert owned() == 1
    del third
    gc.collect()
    wait_until(lambda: owned() == 0)


class Unmakeable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fail(kind):
    raise ValueError("no value") if kind is ValueError else Unmakeable(1, 2)


@pytest.mark.parametrize("kind", [ValueError, Unmakeable])
def test_the_error_of_an_own_value_is_raised_again_and_again(world, kind):
    rref = rpc.remote("worker0", fail, args=(kind,))
    for _ in range(2):
        with pytest.raises(kind, match=r"no value|1 and 2") as raised:
            rref.to_here()
        assert sum(entry.name == "local_value" for entry in raised.traceback) == 1
        assert getattr(raised.value, "__notes__", []).count("mine") == 0 or kind is Unmakeable
        raised.value.add_note("mine")


def test_the_error_of_an_own_value_does_not_keep_what_its_frames_refer_to(world):
    def owned():
        return len(world[0].references.owned())

    def look():
        rref = rpc.remote("worker0", fail, args=(ValueError,))
        with pytest.raises(ValueError, match="no value"):
            rref.to_here()

    look()
    gc.collect()
    wait_until(lambda: owned() == 0)
