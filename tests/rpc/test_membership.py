"""Names, ids and incarnations, over time."""

import itertools
import pickle

import pytest

from nbdist import NotUnique, UnknownWorker, UsageError, WorkerLost
from nbdist.rpc import WorkerInfo
from nbdist.rpc.core.members import Membership
from nbdist.wire.messages import Record


def record(name, id, incarnation):
    return Record(name, id, incarnation, [], "host", 1, 1, None)


ME = record("worker0", 0, 100)
ONE = record("worker1", 1, 101)
TWO = record("worker2", 2, 102)


def members(*others):
    membership = Membership(ME)
    for other in others:
        membership.add(other)
    return membership


# --- WorkerInfo -----------------------------------------------------------------------------------


def test_a_worker_info_is_a_value():
    info = WorkerInfo("worker1", 1)
    assert info == WorkerInfo("worker1", 1)
    assert info != WorkerInfo("worker1", 2)
    assert info != "worker1"
    assert len({info, WorkerInfo("worker1", 1)}) == 1
    assert pickle.loads(pickle.dumps(info)) == info
    assert str(info) == "WorkerInfo(id=1, name=worker1)"


@pytest.mark.parametrize("name", ["", "a" * 128, "sp ace", "ümlaut", "new\nline", "a/b", "end\n"])
def test_a_bad_name_is_refused(name):
    with pytest.raises(UsageError):
        WorkerInfo(name, 0)


@pytest.mark.parametrize("name", ["a", "a" * 127, "Worker-1_x:y", "0"])
def test_a_good_name_is_taken(name):
    assert WorkerInfo(name, 0).name == name


# --- who is there ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations([ONE, TWO])))
def test_members_are_found_by_name_id_and_info(order):
    membership = members(*order)
    for to in ("worker1", 1, WorkerInfo("worker1", 1)):
        assert membership.find(to) is ONE
    assert membership.find("worker0") is ME
    assert membership.members() == [ME, ONE, TWO]
    assert membership.others() == [ONE, TWO]
    assert membership.get(102) is TWO
    assert membership.info_of(101) == WorkerInfo("worker1", 1)


@pytest.mark.parametrize("to", ["worker9", 9, -1, WorkerInfo("worker9", 1)])
def test_an_unknown_worker_is_named_with_those_there_are(to):
    with pytest.raises(UnknownWorker, match="worker0, worker1"):
        members(ONE).find(to)


@pytest.mark.parametrize("to", [None, True, 1.0, b"worker1", ["worker1"]])
def test_a_worker_is_not_named_by_just_anything(to):
    with pytest.raises(UsageError) as info:
        members(ONE).find(to)
    assert not isinstance(info.value, UnknownWorker)


@pytest.mark.parametrize(
    ("wants", "taken"),
    [(record("worker1", 7, 200), "name"), (record("other", 1, 200), "id"), (record("worker0", 7, 200), "name")],
)
def test_a_name_and_an_id_belong_to_one_living_member(wants, taken):
    membership = members(ONE)
    with pytest.raises(NotUnique, match=taken):
        membership.add(wants)
    assert membership.members() == [ME, ONE]


def test_the_same_member_may_be_added_twice():
    assert members(ONE, ONE).members() == [ME, ONE]


def test_a_name_can_be_taken_again_after_its_bearer_has_gone():
    membership = members(ONE)
    assert membership.remove(101, "died") is ONE
    assert membership.why_gone("worker1") == membership.why_gone(1) == "died"
    assert membership.why_gone(WorkerInfo("worker1", 1)) == "died"
    for to in ("worker1", 1, WorkerInfo("worker1", 1)):
        with pytest.raises(WorkerLost, match="worker1 died"):
            membership.find(to)
    again = record("worker1", 1, 201)
    membership.add(again)
    assert membership.find("worker1") is again
    assert membership.why_gone("worker1") is None
    assert membership.why_gone(1) is None
    assert membership.fate(101) == "died"
    assert membership.fate(201) is None
    assert membership.remove(101, "died again") is None
    assert membership.find("worker1") is again


def test_who_has_gone_is_still_known_by_incarnation():
    membership = members(ONE)
    membership.remove(101, "died")
    assert membership.get(101) is None
    assert membership.ever(101) is ONE
    assert membership.name_of(101) == "worker1"
    assert membership.info_of(101) == WorkerInfo("worker1", 1)
    assert "unknown" in membership.name_of(999)
    with pytest.raises(UnknownWorker):
        membership.info_of(999)


def test_a_name_and_an_id_may_go_to_different_successors():
    membership = members(ONE)
    membership.remove(101, "died")
    membership.add(record("worker1", 5, 205))
    assert membership.why_gone(1) == "died"
    membership.add(record("other", 1, 206))
    assert membership.find("worker1").incarnation == 205
    assert membership.find(1).incarnation == 206
    assert membership.why_gone(1) is None
