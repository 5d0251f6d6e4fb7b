"""Collectives of a timeline, from what torch's recorders of several workers hold: plain data."""

import math

import pytest

from nbdist.cluster.group_history import Given
from nbdist.cluster.worker.flight_recorder import CollectiveCall, CollectiveCalls, add_transfers, choose_calls
from nbdist.cluster.worker.group_hooks import Issued
from nbdist.views.drawing.gantt import Bar, fold
from nbdist.views.timeline.collectives import join, say_gaps

REDUCE = Given("all_reduce", "float32[1000]", 1000, "float32", "all_reduce", "In[3]:2")


def calls(rank, *arrivals, last=9, missing_until=None):
    return CollectiveCalls(list(arrivals), rank, {"0": last}, missing_until)


def came(number, at, *, left=None, is_over=True, given=REDUCE, ranks=(0, 1, 2)):
    return CollectiveCall("0", "default group", list(ranks), number, given, at, at if left is None else left, is_over)


def joined(*told, begun=(0, 0, 0), seconds=10.0):
    names = [f"worker{number}" for number in range(len(told))]
    asked = {name: each for name, each in zip(names, told, strict=True) if each is not None}
    return join(asked, dict(zip(names, begun, strict=False)), seconds)


def test_who_came_last_is_named_with_the_waits_of_the_others():
    [found] = joined(calls(0, came(4, 1.0)), calls(1, came(4, 1.5)), calls(2, came(4, 1.0)))
    assert (found.last, found.waits) == ("worker1", {"worker0": 0.5, "worker2": 0.5})
    assert (min(found.came.values()), found.end) == (1.0, 1.5)
    assert str(found) == (
        "all_reduce float32[1000], 4.0 KB, In[3]:2; worker1 came last: worker0,2 waited 500.0 ms (#4, default group)"
    )


def test_each_worker_has_its_own_clock():
    [found] = joined(calls(0, came(1, 101.0)), calls(1, came(1, 52.0)), calls(2, came(1, 3.0)), begun=(100, 50, 2))
    assert found.came == {"worker0": 1.0, "worker2": 1.0, "worker1": 2.0}


def test_an_end_is_shown_where_torch_has_noted_it():
    [found] = joined(calls(0, came(1, 1.0, left=2.5)), calls(1, came(1, 2.0, left=2.25)), calls(2, came(1, 1.5)))
    assert found.end == 2.5


def test_one_that_has_not_ended_lasts_until_the_end_and_says_who_had_not_come():
    [found] = joined(calls(0, came(4, 1.0, is_over=False)), calls(1, last=3), calls(2, came(4, 2.0, is_over=False)))
    assert (found.end, found.last, found.waits) == (10.0, "", {})
    assert "In[3]:2; worker1 had not come; it had not ended (#4" in str(found)


def test_nobody_is_blamed_where_a_member_is_lost():
    [found] = joined(calls(0, came(4, 1.0)), calls(1, came(4, 2.0)), None)
    assert (found.last, found.waits) == ("", {})
    assert "nothing is known of rank 2" in str(found)


def test_a_collective_is_left_out_if_a_member_came_before_its_calls_are_known():
    assert joined(calls(0, came(4, 1.0)), calls(1), calls(2, came(4, 2.0))) == []
    unknown = CollectiveCalls([], 1, {})  # its recorder has dropped all collectives of the group
    assert joined(calls(0, came(4, 1.0)), unknown, calls(2, came(4, 2.0))) == []


def test_groups_of_one_title_are_told_apart_by_their_members():
    def of_pair(ranks, at):
        return came(1, at, ranks=ranks)._replace(group=str(ranks), title="mesh dim tp")

    told = [
        calls(rank, of_pair((0, 1) if rank < 2 else (2, 3), rank + 1.0), came(1, 9.0, ranks=range(4)))
        for rank in range(4)
    ]
    found = joined(*told, begun=(0, 0, 0, 0))
    assert [(each.title, list(each.came)) for each in found] == [
        ("mesh dim tp of worker0,1", ["worker0", "worker1"]),
        ("mesh dim tp of worker2,3", ["worker2", "worker3"]),
        ("default group", ["worker0", "worker1", "worker2", "worker3"]),
    ]


def test_different_calls_are_told_apart():
    other = Given("broadcast", "float32[3]", 3, "float32", "broadcast", "In[3]:9")
    [found] = joined(calls(0, came(1, 1.0)), calls(1, came(1, 2.0, given=other)), calls(2, came(1, 1.0)))
    assert str(found).startswith("worker0,2 all_reduce float32[1000], 4.0 KB, In[3]:2; worker1 broadcast float32[3], ")


def test_what_is_missing_is_told():
    told = {
        "worker0": calls(0, missing_until=5.0),
        "worker1": calls(1, missing_until=math.inf),
        "worker2": calls(2, missing_until=math.inf),
        "worker3": calls(3, missing_until=2.5),
        "worker4": calls(4),
    }
    assert say_gaps(told, {**dict.fromkeys(told, 0.0), "worker0": 3.0}) == [
        "worker1,2: collectives are missing: TORCH_FR_BUFFER_SIZE=0 switches torch's recorder of them off",
        "worker0,3: collectives before 2.50 s are missing: only the last ones are kept "
        "(TORCH_FR_BUFFER_SIZE; 2000 transfers)",
    ]


def transfers(rank, *issued, counts=(), since=0.0):
    return add_transfers(CollectiveCalls([], rank, {}), issued, [*counts, *issued], since)


def issued(kind, peer, number, at, tag=0):
    return Issued(at, "0", kind == "send", peer, tag, number, Given(kind, "float32[4]", call=kind, place="In[3]:4"))


def test_a_send_with_its_receive_is_one_bar():
    told = [
        transfers(0, issued("send", 1, 1, 1.0), issued("recv", 1, 1, 2.0), issued("send", 1, 1, 5.0, tag=7)),
        transfers(1, issued("recv", 0, 1, 1.5), issued("send", 0, 1, 1.75), issued("recv", 0, 1, 6.0, tag=7)),
    ]
    found = joined(*told)
    assert [(each.title, each.number, each.last, each.is_over) for each in found] == [
        ("worker0 to worker1", 1, "worker1", True),
        ("worker1 to worker0", 1, "worker0", True),
        ("worker0 to worker1", 1, "worker1", True),
    ]
    assert str(found[0]) == (
        "worker0 send float32[4], In[3]:4; worker1 recv float32[4], In[3]:4; worker1 came 500.0 ms later "
        "(#1, worker0 to worker1)"
    )


def test_of_a_receive_without_its_send():
    [found] = joined(transfers(0), transfers(1, issued("recv", 0, 3, 2.0)))
    assert (found.end, found.is_over, found.missing) == (10.0, False, "worker0 had not come")
    came_before = transfers(0, counts=[issued("send", 1, 3, 0.0)], since=1.0)
    assert joined(came_before, transfers(1, issued("recv", 0, 3, 2.0))) == []
    assert joined(transfers(0), transfers(1, issued("recv", -1, 1, 2.0))) == []  # from any member


def test_transfers_that_are_not_kept_are_said():
    many = [issued("send", 1, number, number * 0.01) for number in range(1, 2001)]
    assert transfers(0, *many, since=0.0).missing_until == 0.01
    assert transfers(0, *many[1:], since=0.0).missing_until is None
    assert transfers(0, *many, since=5.0).missing_until is None


def entry(record, number, at, *, group="0", is_p2p=False, ended=None):
    return {
        "record_id": record,
        "process_group": [group, ""],
        "collective_seq_id": number,
        "time_created_ns": int(at * 1e9),
        "time_discovered_completed_ns": int(ended * 1e9) if ended else None,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[2]],
        "input_dtypes": ["Float"],
        "retired": True,
        "is_p2p": is_p2p,
    }


def chosen(*entries, since=10.0):
    return choose_calls(entries, {"0": ("default group", [0, 1])}, 0, since, ahead=1000.0)


def test_entries_of_the_recording_are_chosen_on_its_clock():
    found = chosen(entry(0, 1, 1009), entry(1, 2, 1011), entry(2, 2, 1012, is_p2p=True), entry(3, 1, 1012, group="7"))
    [arrival] = found.arrivals
    assert (arrival.number, arrival.came, arrival.left) == (2, pytest.approx(11), arrival.came)
    assert (found.last, found.missing_until) == ({"0": 2}, None)
    assert chosen(entry(0, 1, 1011, ended=1013)).arrivals[0].left == pytest.approx(13)
    assert chosen().last == {"0": 0}


def test_it_is_told_from_when_on_entries_are_there():
    found = chosen(entry(7, 8, 1011.5), entry(8, 9, 1012))
    assert found.missing_until == pytest.approx(11.5)
    assert chosen(entry(7, 1, 1012, group="7")).last == {}


def test_a_later_group_of_the_same_name_is_not_taken_for_the_earlier_one():
    found = chosen(entry(0, 1, 1011), entry(1, 2, 1012), entry(2, 1, 1013))
    assert [(each.number, round(each.came)) for each in found.arrivals] == [(1, 13)]
    assert found.missing_until == pytest.approx(13)


def bar(start, end, kind="step"):
    return Bar(start, end, "text", kind, f"tip of {start}")


def test_narrow_neighbours_of_a_kind_are_one_bar_with_their_number():
    bars = [bar(0, 0.01), bar(0.02, 0.05), bar(0.06, 0.07), bar(0.08, 0.09, "load"), bar(50, 50.01), bar(60, 70)]
    folded = fold(bars, 100.0)
    assert [(each.start, each.end, each.kind) for each in folded] == [
        (0, 0.07, "step"),
        (0.08, 0.09, "load"),
        (50, 50.01, "step"),
        (60, 70, "step"),
    ]
    assert folded[0].text.startswith("3")
    assert folded[0].tip == "3 optimizer steps; the longest: tip of 0.02"
    assert folded[-1] is bars[-1]


def test_bars_that_overlap_are_one_however_wide():
    [folded] = fold([bar(0, 50), bar(10, 20), bar(30, 60)], 100.0)
    assert (folded.start, folded.end) == (0, 60)
    assert fold([], 100.0) == []
    assert len(fold([bar(0, 50), bar(50, 60)], 100.0)) == 2


def test_fifty_collectives_of_four_workers_stay_readable():
    bars = [bar(number * 0.02, number * 0.02 + 0.001, "collective") for number in range(50)]
    assert len(fold(bars, 1.0)) == 50
    assert len(fold(bars, 10.0)) == 1
