"""The findings of the doctor, from made-up facts and numbers, and the bounds of a measurement, with a made-up clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.cluster.examination.findings import ExaminedMember, find_all, of_clock, of_machine, of_process
from nbdist.cluster.examination.machine import GpuFacts, MachineFacts
from nbdist.cluster.examination.speed import LARGEST, LinkSpeed, rate_of, round_trips

FINE = MachineFacts(
    host="one",
    nbdist="0.1.0",
    python="3.12.4",
    torch="2.13.0",
    cuda="12.8",
    nccl="2.27.5",
    has_driver=False,
    gpu_count=0,
    gpus=(),
    unpinned="",
    can_share=True,
    memory=64_000_000_000,
    memory_left=30_000_000_000,
    shared_files_left=32_000_000_000,
    files_open=100,
    files_limit=1024,
    ports=(32768, 60999),
)
H100 = GpuFacts(0, "NVIDIA H100", (9, 0), True)


def member(name: str, facts: MachineFacts | None = FINE, place: str = "one", state: str = "idle", **more):
    return ExaminedMember(name, state, place, more.pop("is_alive", True), facts, **more)


def link(sender: str, receiver: str, latency: float | None = 1e-4, rate: float | None = 1e9, **more) -> LinkSpeed:
    return LinkSpeed(sender, receiver, latency, rate, more.pop("ahead", 0.0), **more)


def all_links(members, **more) -> list[LinkSpeed]:
    names = [each.name for each in members]
    return [link(one, other, **more) for one in names for other in names if one != other]


THREE = [member("notebook", state=""), member("worker0"), member("worker1")]


def test_nothing_is_found_where_nothing_is_wrong():
    assert of_machine(FINE) == of_process(FINE) == of_clock(0.3) == of_clock(-0.9) == []
    assert find_all(THREE, all_links(THREE)) == []
    assert find_all(THREE[:1], []) == []
    with_gpu = replace(FINE, has_driver=True, gpu_count=1, gpus=(H100,))
    assert of_process(with_gpu) == []
    assert of_machine(replace(FINE, ports=None)) == of_process(replace(FINE, files_limit=-1)) == []


@pytest.mark.parametrize(
    ("changed", "topic", "problem", "remedy"),
    [
        (
            {"memory_left": 12_000_000},
            "shared memory",
            "only 12.0 MB of 64.0 GB of memory are left",
            "docker run --mem",
        ),
        ({"shared_files_left": 64_000_000}, "shared memory", "only 64.0 MB are free in /dev/shm", "--shm-size 1g"),
        ({"shared_files_left": None}, "shared memory", "there is no /dev/shm", "--shm-size 1g"),
        ({"can_share": False}, "shared memory", "shares no memory with others", "Unset NBDIST_ARENA_BYTES=0"),
        ({"files_open": 900}, "open files", "900 of at most 1,024 files are open", "ulimit -n 65536"),
        ({"ports": (40000, 40099)}, "ports", "only 100 ports for programs", "ip_local_port_range"),
        ({"has_driver": True, "cuda": ""}, "GPUs", "but torch is built without CUDA", "built for CUDA"),
        ({"has_driver": True}, "GPUs", "but torch sees no GPU", "docker run --gpus all"),
        ({"gpu_count": 2, "nccl": ""}, "NCCL", "torch has no NCCL", "built for CUDA with NCCL"),
        (
            {"gpu_count": 1, "gpus": (GpuFacts(0, "Tesla P100", (6, 0), False),)},
            "GPUs",
            "no code for GPU 0, a Tesla P100 of compute capability 6.0",
            "%dist_init -g",
        ),
        (
            {
                "gpu_count": 1,
                "gpus": (replace(H100, lacks_convolutions="a P100, runs no convolutions. After `x` it does"),),
            },
            "GPUs",
            "GPU 0, a P100, runs no convolutions",
            "After `x` it does",
        ),
        (
            {"gpu_count": 1, "gpus": (replace(H100, unshared="CUDA refuses cuDeviceGet: CUDA_ERROR_NOT_PERMITTED"),)},
            "GPUs",
            "the memory of GPU 0 cannot be shared between processes (CUDA refuses cuDeviceGet",
            "A newer driver",
        ),
        (
            {"gpu_count": 1, "unpinned": "CUDA error: out of memory"},
            "GPUs",
            "without pinned memory, which is slower: CUDA error: out of memory",
            "restart the worker",
        ),
    ],
)
def test_each_finding_about_a_machine_says_what_to_do(changed, topic, problem, remedy):
    facts = replace(FINE, **changed)
    (found,) = [*of_machine(facts), *of_process(facts)]
    assert (found.topic, found.about) == (topic, "")
    assert problem in found.problem
    assert remedy in found.remedy
    assert str(found) == f"{found.problem}. {found.remedy}."


def test_a_clock_that_is_off_is_found_in_both_directions():
    assert "2.50 s ahead of the notebook's" in of_clock(2.5)[0].problem
    assert "90.00 s behind the notebook's" in of_clock(-90.0)[0].problem
    members = [THREE[0], THREE[1]]
    links = [link("notebook", "worker0", ahead=-4.0), link("worker0", "notebook", ahead=4.0)]
    (found,) = find_all(members, links)
    assert (found.about, found.topic) == ("worker0", "clocks")


def test_equal_findings_are_said_once_and_those_of_a_host_by_one_of_its_members():
    little = replace(FINE, shared_files_left=64_000_000, can_share=False)
    members = [
        member("notebook", state=""),
        *(member(f"worker{number}", little, "two") for number in range(3)),
        member("worker3", replace(little, memory_left=1000), "three"),
    ]
    found = {str(each) for each in find_all(members, [])}
    assert len(found) == 3
    assert any(each.startswith("worker0,3: only 64.0 MB are free in /dev/shm") for each in found)
    assert any(each.startswith("worker3: only 1.0 KB of 64.0 GB") for each in found)
    assert any(each.startswith("worker0-3: this process shares no memory") for each in found)


def test_versions_that_differ_are_told_with_their_holders():
    other = replace(FINE, torch="2.12.0", nccl="2.26.2", python="3.12.5")
    members = [*THREE, member("worker2", other)]
    told = {each.problem for each in find_all(members, [])}
    assert told == {
        "the members have different versions of torch: 2.13.0 on notebook, worker0,1; 2.12.0 on worker2",
        "the members have different versions of Python: 3.12.4 on notebook, worker0,1; 3.12.5 on worker2",
        "the members have different versions of NCCL: 2.27.5 on notebook, worker0,1; 2.26.2 on worker2",
    }
    without = [member("notebook", replace(FINE, nccl=""), state=""), member("worker0")]
    assert find_all(without, []) == [], "a member without GPU needs no NCCL"


def test_dead_silent_and_starting_workers_are_named_with_the_remedy():
    members = [
        THREE[0],
        member("worker0", None, state="was killed by SIGKILL", is_alive=False),
        member("worker1", None, state="busy", error="no answer within 3 s"),
        member("worker2", None, state="kernel", error="it is starting"),
    ]
    dead, silent, starting = find_all(members, [])
    assert str(dead) == "worker0: was killed by SIGKILL. Start it again with %dist_restart worker0."
    assert str(silent).startswith("worker1: it does not answer: no answer within 3 s. %dist_status shows the line")
    assert str(starting).startswith("worker2: it is still starting, and has reached the step 'kernel'. Examine")


def test_a_way_that_fails_is_told_with_its_error_and_the_kind_of_remedy():
    members = [*THREE, member("worker2", place="two")]
    links = [link("worker0", "worker2", None, None, error="RpcTimeout: no answer"), *all_links(THREE)]
    (found,) = find_all(members, links)
    assert str(found).startswith("worker0 → worker2: calls fail: RpcTimeout: no answer. Open all TCP ports between")
    (found,) = find_all(members, [link("worker0", "worker1", None, None, error="RemoteError: no")])
    assert "%dist_restart worker1" in found.remedy


def test_a_way_is_slow_beside_the_others_of_its_kind_only():
    members = [*THREE, member("worker2", place="two"), member("worker3", place="three")]
    inside = all_links(THREE)
    across = [link(one, other, 0.02, 1e7) for one in ("worker0", "worker1") for other in ("worker2", "worker3")]
    assert find_all(members, [*inside, *across]) == [], "a way between hosts is slower than one within a host"
    slow = [*inside, *across, link("worker2", "worker3", 0.5, 1e5)]
    (found,) = find_all(members, slow)
    assert found.about == "worker2 → worker3"
    assert found.problem == (
        "a small call takes 500.0 ms, and 20.0 ms elsewhere and a tensor moves at 100 KB/s, and at 10.0 MB/s elsewhere"
    )
    assert "a slow line" in found.remedy
    late = [link("worker1", "worker0", latency=0.009), *inside]
    assert find_all(members, late) == [], "a few milliseconds are no finding"
    assert find_all(members, [link("notebook", "worker2"), link("notebook", "worker3", 5.0, 1.0)]) == [], "two are few"


def test_one_slow_host_is_found_among_three_although_most_ways_are_slow():
    members = [THREE[0], member("worker0", place="two"), member("worker1", place="three")]
    slow = [
        link(one, other, rate=5e5)
        for one, other in (("notebook", "worker1"), ("worker0", "worker1"), ("worker1", "notebook"))
    ]
    found = find_all(members, [*slow, link("notebook", "worker0", rate=1e8), link("worker0", "notebook", rate=9e7)])
    assert [each.about for each in found] == [f"{each.sender} → {each.receiver}" for each in slow]
    fast = [link(one.name, other.name, rate=5e9) for one in THREE for other in THREE if one is not other]
    assert find_all(THREE, [*fast, link("worker0", "worker1", rate=3e8)]) == [], "fast enough"


def test_a_busy_worker_is_the_reason_for_a_slow_way():
    members = [THREE[0], THREE[1], member("worker1", state="busy")]
    found = find_all(members, [*all_links(members), link("worker0", "worker1", 0.2)])
    assert [each.about for each in found] == ["worker0 → worker1"]
    assert "when worker1 is idle" in found[0].remedy


def test_ways_without_time_are_counted():
    (found,) = find_all(THREE, [], left_out=5)
    assert str(found) == "there was no time to measure 5 links. Allow more time: %dist_doctor -t 300."


# -- measuring --------------------------------------------------------------------------------------


class Line:
    """A line of some bytes a second and some latency, whose clock moves only while it carries bytes."""

    def __init__(self, rate: float, latency: float) -> None:
        self.now, self.rate, self.latency = 100.0, rate, latency
        self.sent: list[int] = []

    def move(self, nbytes: int) -> None:
        self.sent.append(nbytes)
        self.now += self.latency + nbytes / self.rate

    def measured(self, seconds: float = 0.5) -> float:
        return rate_of(self.move, self.latency, seconds, lambda: self.now)


def test_a_fast_line_is_measured_with_the_largest_message_sent_twice():
    line = Line(1e9, 1e-4)
    assert line.measured() == pytest.approx(1e9)
    assert line.sent == [1 << 17, 1 << 20, LARGEST, LARGEST]


def test_a_slow_line_gets_only_what_it_can_carry_in_time():
    for rate in (1e3, 1e5, 1e6, 1e7, 3e7):
        line = Line(rate, 0.05)
        assert line.measured() == pytest.approx(rate)
        assert line.now - 100 <= max(0.5, 0.05 + (1 << 17) / rate) + 1e-6


def test_latency_is_not_taken_for_a_low_rate():
    line = Line(1e8, 0.05)
    assert line.measured() == pytest.approx(1e8)


def test_round_trips_are_counted_by_their_number_and_their_time():
    times = iter(range(1000))
    found = round_trips(lambda: float(next(times)), 10.0)
    assert next(times) == 20
    assert 0 < found.fastest <= found.latency < 1
    assert found.ahead < -1e9  # a clock that has just left 1970
    asked = []
    round_trips(lambda: asked.append(1) or 0.0, 0.0)
    assert asked == [1]
