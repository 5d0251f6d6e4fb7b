"""torch's flight recorder as plain data, and where the members of a group part: `flight_recorder` and `partings`.

The folder `flights` has what several versions of torch have recorded of programs that hang (`record_flights.py`).
"""

import json
import pathlib

import pytest

from nbdist.cluster.group_history import Given, GroupHistory, Transfers, Wait
from nbdist.cluster.partings import find_odd_one, find_partings
from nbdist.cluster.worker.flight_recorder import decode, histories
from nbdist.cluster.worker.roots import Root

FLIGHTS = sorted(pathlib.Path(__file__).with_name("flights").glob("*.json"))
GROUPS = {"0": [0, 1, 2], "1": [0, 1], "2": [0, 2]}
TITLES = {"0": "default group", "1": "group 'pair'", "2": "mesh dim tp"}
NAMES = ["worker0", "worker1", "worker2"]


def read(entries, rank=0):
    groups = {name: ranks for name, ranks in GROUPS.items() if rank in ranks}
    return histories(entries, groups, TITLES, {})


@pytest.fixture(params=FLIGHTS, ids=lambda file: file.stem)
def flight(request):
    """The entries of each member, by program, as one version of torch has recorded them."""
    return json.loads(request.param.read_text())


def test_who_has_not_come_is_found(flight):
    told = {NAMES[rank]: read(entries, rank) for rank, entries in enumerate(flight["absent"])}
    [parting] = find_partings(told, NAMES)
    assert parting.text == "worker2 has not come to all_reduce #15, float32[1024], default group"
    assert (parting.absent, parting.present) == (("worker2",), ["worker0", "worker1"])


def test_different_collectives_are_found(flight):
    told = {NAMES[rank]: read(entries, rank) for rank, entries in enumerate(flight["different"])}
    [parting] = find_partings(told, NAMES)
    assert parting.text == (
        "#15 of the default group is not the same collective everywhere: worker0,2 all_reduce float32[4], "
        "worker1 broadcast float32[4]"
    )


def test_a_healthy_program_parts_nowhere(flight):
    """Scatter, gather and uneven all-to-all give different sizes; a group of its own is not everybody's."""
    told = {
        NAMES[rank]: read([entry for entry in entries if entry["retired"]], rank)
        for rank, entries in enumerate(flight["absent"])
    }
    assert find_partings(told, NAMES, at_rest=True) == []


def entry(number, *, group="0", kind="all_reduce", sizes=((2,),), dtypes=("Float",), retired=True, **more):
    return {
        "process_group": [group, ""],
        "collective_seq_id": number,
        "profiling_name": f"gloo:{kind}",
        "input_sizes": sizes,
        "input_dtypes": dtypes,
        "output_sizes": sizes,
        "output_dtypes": dtypes,
        "retired": retired,
        "is_p2p": False,
        "thread_id": "1",
        **more,
    }


def test_a_group_is_read_from_its_oldest_known_number():
    [history, *_] = read([entry(7), entry(8, kind="barrier", sizes=(), dtypes=()), entry(9)])
    assert (history.first, history.last) == (7, 9)
    assert history.kinds == [Given("all_reduce", "float32[2]", 2, "float32"), Given("barrier")]
    assert history.given == [0, 1, 0]


def test_a_group_that_formed_again_numbers_anew():
    [history, *_] = read([entry(1), entry(2), entry(1, kind="broadcast")])
    assert (history.first, history.last, [each.kind for each in history.kinds]) == (1, 1, ["broadcast"])


def test_operations_that_nccl_puts_together_share_a_number():
    [history, *_] = read([entry(1), entry(2, kind="broadcast"), entry(2, kind="coalesced"), entry(3)])
    assert (history.first, [history.kinds[index].kind for index in history.given]) == (
        1,
        ["all_reduce", "coalesced", "all_reduce"],
    )


@pytest.mark.parametrize(("backend", "elements"), [("gloo", 2), ("nccl", None)])
def test_members_may_gather_different_sizes_on_nccl(backend, elements):
    [history, *_] = read([entry(1, profiling_name=f"{backend}:all_gather")])
    assert history.kinds[0].elements == elements


def test_a_group_that_has_done_nothing_is_told():
    assert [(each.name, each.ranks, each.last) for each in read([])] == [
        ("0", [0, 1, 2], 0),
        ("1", [0, 1], 0),
        ("2", [0, 2], 0),
    ]


def test_several_tensors_are_counted_together():
    [history, *_] = read([entry(1, sizes=((2, 3), (4,)), dtypes=("BFloat16", "BFloat16"))])
    assert history.kinds == [Given("all_reduce", "bfloat16[2, 3] and 1 more", 10, "bfloat16")]


def history(last, *kinds, first=1, waits=(), **more):
    kinds = list(kinds) or [Given("all_reduce", "float32[4]", 4, "float32")]
    given = [min(index, len(kinds) - 1) for index in range(last - first + 1)]
    return GroupHistory("0", "default group", [0, 1], first, given, kinds, list(waits), **more)


def broadcasts(*roots):
    """Return what each worker tells that has called one broadcast with the root in ``roots``."""
    told = {}
    for name, root in zip(NAMES, roots, strict=True):
        kind = Given("broadcast", "float32[4]", 4, "float32", root=root)
        told[name] = [GroupHistory("0", "default group", [0, 1, 2], 1, [0], [kind])]
    return told


def test_different_roots_are_told_also_if_the_first_workers_is_not_known():
    text = (
        "#1 of the default group is not the same collective everywhere: worker0 broadcast float32[4], "
        "worker1 broadcast float32[4] from rank 2, worker2 broadcast float32[4] from rank 0"
    )
    assert [each.text for each in find_partings(broadcasts(None, 2, 0), NAMES)] == [text]


@pytest.mark.parametrize("roots", [(0, 0, 0), (1, None, 1), (None, None, None)])
def test_equal_and_unknown_roots_are_no_difference(roots):
    assert find_partings(broadcasts(*roots), NAMES, at_rest=True) == []


def test_a_root_belongs_to_its_group_number_and_kind_and_was_noted_before():
    entries = [entry(n, group="2", kind=kind, time_created_ns=100) for n, kind in ((1, "broadcast"), (2, "all_reduce"))]
    for key, at, known in [
        (("2", 1, "broadcast"), 90, 2),  # the rank in the group is 1
        (("2", 1, "broadcast"), 110, None),
        (("2", 1, "scatter"), 90, None),
        (("0", 1, "broadcast"), 90, None),
        (("2", 2, "broadcast"), 90, None),
    ]:
        [told] = histories(entries, {"2": [0, 2]}, TITLES, {}, True, {key: Root(1, at)})
        assert [each.root for each in told.kinds] == [known, None]


def test_nothing_is_claimed_of_a_worker_that_tells_nothing():
    assert find_partings({"worker0": [history(3, waits=[Wait(3)])]}, NAMES) == []


def test_nothing_is_claimed_of_what_the_recorder_has_lost():
    other = Given("broadcast", "float32[4]", 4, "float32")
    told = {
        "worker0": [history(9, first=8)],
        "worker1": [history(9, other, Given("all_reduce", "", 4, "float32"), first=7)],
    }
    assert find_partings(told, NAMES, at_rest=True) == []


def test_who_is_behind_is_told_only_if_another_waits_or_all_rest():
    told = {"worker0": [history(3)], "worker1": [history(2)]}
    assert find_partings(told, NAMES) == []
    [parting] = find_partings(told, NAMES, at_rest=True)
    assert parting.text == "worker1 has not come to all_reduce #3, float32[4], default group"


def test_who_is_in_the_same_collective_does_not_part():
    assert find_partings({name: [history(3, waits=[Wait(3)])] for name in NAMES[:2]}, NAMES) == []


def test_the_call_and_the_lines_are_those_of_the_users_code():
    scattered = Given("all_reduce", "float32[4]", 4, "float32", "reduce_scatter_tensor", "In[2]:1")
    told = {"worker0": [history(3, scattered, waits=[Wait(3, "module 0")])], "worker1": [history(2)]}
    [parting] = find_partings(told, NAMES)
    assert parting.text == (
        "worker1 has not come to reduce_scatter_tensor #3 (In[2]:1), float32[4], default group, for module 0"
    )
    shorter = Given("all_reduce", "float32[3]", 3, "float32")
    longer = Given("all_reduce", "float32[4]", 4, "float32", "all_reduce", "In[2]:1")
    told = {"worker0": [history(1, longer)], "worker1": [history(1, shorter)]}
    [parting] = find_partings(told, NAMES)
    assert parting.text == (
        "#1 of the default group is not the same collective everywhere: worker0 all_reduce float32[4] (In[2]:1), "
        "worker1 all_reduce float32[3]"
    )


def test_a_group_without_a_name_is_named_by_its_members():
    nameless = GroupHistory("4", "", [0, 2], 1, [0], [Given("barrier")], [Wait(1)])
    told = {"worker0": [nameless], "worker2": [GroupHistory("4", "", [0, 2])]}
    [parting] = find_partings(told, NAMES)
    assert parting.text == "worker2 has not come to barrier #1, group of worker0,2"


@pytest.mark.parametrize(
    ("given", "expected", "sent", "odd"),
    [
        # What each living worker gave, in elements; the bytes that worker1 expected and was sent, as gloo said.
        ({0: 1000, 2: 1500}, 668, 1000, "worker2"),
        ({0: 1500, 2: 1000}, 668, 1000, "worker0"),
        ({0: 30, 2: 60}, 20, 40, "worker2"),
        ({0: 1000, 2: 1000}, 336, 668, "worker1"),
        ({0: 1000, 2: 1500}, 100, 1000, None),  # worker1 gave a third size
        ({0: 1000}, 668, 1000, None),  # worker2 has not answered
        ({0: None, 2: 1000}, 668, 1000, None),  # a collective in which sizes may differ
    ],
)
def test_the_worker_that_gave_another_size_than_all_others_is_found(given, expected, sent, odd):
    told = {}
    for rank, elements in given.items():
        kind = Given("all_reduce", f"float32[{elements}]", elements, "float32")
        told[NAMES[rank]] = [GroupHistory("0", "default group", [0, 1, 2], 1, [0], [kind])]
    assert find_odd_one(told, NAMES, "worker1", expected / sent) == odd
    for each in told.values():  # in which group worker1 died is not known then
        each.append(GroupHistory("1", "", [0, 1, 2], 1, [0], [Given("all_reduce", "float32[2]", 2, "float32")]))
    assert find_odd_one(told, NAMES, "worker1", expected / sent) is None


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 12), ("bfloat16", 6), ("complex128", 48), ("bool", 3), ("", 0)]
)
def test_the_bytes_of_a_collective(dtype, size):
    assert Given("all_reduce", "", 3, dtype).bytes == size


@pytest.mark.parametrize(
    ("first", "formed_at", "told"),
    [
        (0, 0, {"0": 3, "1": 0}),  # group 1 has called nothing
        (7, 0, {"0": 3}),  # what group 1 has called may have been dropped
        (7, 150, {"0": 2, "1": 0}),  # but not since it formed
    ],
)
def test_a_record_of_another_process_claims_nothing_that_it_may_have_dropped(first, formed_at, told):
    record = {"entries": [entry(n + 1, record_id=first + n, time_created_ns=100 * (n + 1)) for n in range(3)]}
    groups = [GroupHistory("0", "default group", [0, 1]), GroupHistory("1", "group 'pair'", [0, 1])]
    assert {each.name: len(each.given) for each in decode(json.dumps(record).encode(), formed_at, groups)} == told


def test_a_process_that_has_called_nothing_at_all_says_so():
    assert decode(b'{"version": "2.10"}', 5, [GroupHistory("0", "", [0, 1])]) == [GroupHistory("0", "", [0, 1])]


def test_a_collective_that_all_recorders_have_dropped_is_not_missed():
    told = {"worker0": [history(12, first=10, waits=[Wait(12)])], "worker1": [history(5)]}
    assert find_partings(told, NAMES, at_rest=True) == []


# -- sends and receives ---------------------------------------------------------------------------

SEND = Given("send", "float32[4]", place="In[7]:3")
RECV = Given("recv", "float32[4]", place="In[7]:12")


def sends(peer, count, *, tag=0, waits=False):
    return Transfers(True, peer, tag, count, [SEND], waits)


def receives(peer, count, *, tag=0, waits=False):
    return Transfers(False, peer, tag, count, [RECV], waits)


def unmatched(*transfers, at_rest=False):
    """Return the texts about the default group, of whose members each argument has the transfers, by rank."""
    told = {
        NAMES[rank]: [GroupHistory("0", "default group", [0, 1, 2], transfers=each)]
        for rank, each in enumerate(transfers)
    }
    return [(each.text, each.absent, each.present) for each in find_partings(told, NAMES, at_rest=at_rest)]


def test_a_receive_without_its_send_is_told():
    text = "worker0 has not come to send #3 to worker1 (recv at In[7]:12), float32[4], default group"
    assert unmatched([sends(1, 2)], [receives(0, 3, waits=True)], []) == [(text, ("worker0",), ["worker1"])]
    assert unmatched([sends(1, 2)], [receives(0, 3, waits=True)], [], at_rest=True) == []


def test_a_send_without_its_receive_is_told_with_its_tag():
    text = "worker2 has not come to recv #1 from worker0 (send at In[7]:3), float32[4], tag 5, default group"
    found = unmatched([sends(2, 1, tag=5, waits=True)], [], [receives(0, 1, tag=4)])
    assert found == [(text, ("worker2",), ["worker0"])]


def test_a_receive_from_any_member_may_take_a_send_and_is_not_told_itself():
    assert unmatched([receives(-1, 2, waits=True)], [sends(0, 2, waits=True)], []) == []
    [(text, *_)] = unmatched([receives(-1, 3, waits=True)], [sends(0, 4, waits=True)], [])
    assert text.startswith("worker0 has not come to recv #4 from worker1 (send at In[7]:3)")


def test_of_a_chain_its_end_is_told_and_of_a_circle_all():
    chain = [[], [receives(0, 1, waits=True)], [receives(1, 1, waits=True)]]
    assert [absent for _, absent, _ in unmatched(*chain)] == [("worker0",)]
    circle = [[receives(2, 1, waits=True)], *chain[1:]]
    assert [absent for _, absent, _ in unmatched(*circle)] == [("worker2",), ("worker0",), ("worker1",)]


def test_nothing_is_claimed_of_transfers_that_are_not_known_or_for_which_nobody_waits():
    waiting = [receives(0, 1, waits=True)]
    assert unmatched(None, waiting, []) == []  # it holds the GIL
    assert unmatched([], [receives(0, 1)], []) == []
    told = {"worker1": [GroupHistory("0", "default group", [0, 1], transfers=waiting)]}
    assert find_partings(told, NAMES) == []
