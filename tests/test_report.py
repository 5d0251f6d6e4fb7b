"""What `make bench` writes, and where it puts it."""

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.suite.python_path import python_path
from helpers.waiting import wait_until

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "MB": 1.0}


@pytest.fixture(scope="module")
def benchmark():
    """Imports a module of the benchmarks. Some have names (`rpc`, `autograd`) that folders of tests have too."""
    names = [path.stem for path in BENCHMARKS.glob("*.py")]
    path, others = list(sys.path), {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path[:] = path
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)


@pytest.fixture(scope="module")
def report(benchmark):
    return benchmark("report")


def test_sections_are_found_again(report):
    parts = {name: report.section(name, f"| {name} |") for name in report.BENCHMARKS}
    text = "\n".join(["# Words\n", *parts.values()])
    assert report.sections(text) == parts
    assert report.head(text) == "# Words\n"


def test_what_people_wrote_stays(report):
    written = (BENCHMARKS / "README.md").read_text()
    known = report.sections(written)
    assert "\n".join([report.head(written), *(known[name] for name in report.BENCHMARKS if name in known)]) == written


def test_the_table_beside_other_libraries(report, benchmark):
    """Ours is compared with the fastest of the peers, and whoever has no numbers is named."""
    peers = benchmark("peers")
    times = {"empty call": {"nbdist": [1e-4, 3e-4, 2e-4], "Ray": [4e-4], "Dask": [9e-4]}}
    assert peers.table(times).splitlines()[2] == "| empty call | 200 µs | 400 µs | 900 µs | 0.50 |"
    assert peers.table({"empty call": {"nbdist": [2e-4]}}).splitlines()[2] == "| empty call | 200 µs | - |"
    assert peers.left_out({"Ray": "not installed"}) == "Left out: Ray (not installed)."
    assert peers.left_out({}) == "Left out: none."
    assert "peers" in report.BENCHMARKS


def test_the_readme_gives_the_figures_of_the_report():
    """It rounds them."""
    text, written = (ROOT / "README.md").read_text(), (BENCHMARKS / "README.md").read_text()
    workers = written.partition("## Workers for a notebook")[2].partition("<!-- measured")[0]
    tables = re.findall(r"(?:^\|.*\n)+", workers, re.MULTILINE)
    measured = [dict(re.findall(r"^\| (\w+) \| ([\d.]+ \S+)", table, re.MULTILINE)) for table in tables]
    costs = text.partition("| | nbdist | ipyparallel | nbdistributed |")[2].partition("\n\n")[0].splitlines()[2:]
    for row, place in zip(costs, (1, 0, 2, 3), strict=True):
        for who, shown in zip(("nbdist", "ipyparallel", "nbdistributed"), row.split(" | ")[1:], strict=True):
            number, unit = shown.rstrip(" |").split()
            exact, its_unit = measured[place][who].split()
            exact = float(exact) * UNITS[its_unit] / UNITS[unit]
            assert round(exact, len(number.partition(".")[2])) == float(number), row
    prose = " ".join(text.partition("## What it costs")[2].partition("\n## ")[0].split())
    for case, said in (("DDP", "{} to {} of its time under `torchrun` with DDP"), ("FSDP2", "{} to {} with FSDP2")):
        runs = re.search(rf"^\| a step of {case} (\|.*)$", written, re.MULTILINE)[1]
        ratios = sorted(re.findall(r"\| \**([\d.]+)", runs))
        assert said.format(ratios[0], ratios[-1]) in prose
    idle, busy = (
        re.search(rf"^\| {case} (?:\| [^|]+){{2}}\| ([\d.]+) \|", written.partition("## Calls\n")[2], re.MULTILINE)[1]
        for case in ("empty call", "empty call, busy")
    )
    assert f"An empty RPC takes {idle} of TensorPipe's time, and {busy} where" in prose


# --- pairs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(benchmark):
    return benchmark("pairs")


def pair_of(pairs, **options):
    turn = pairs.Turn("one", "a call", 2)
    return pairs.Pair("a call", turn, pairs.Turn("other", "a call", 2), **options)


def round_of(pairs, ours, theirs, cpu=(None, None)):
    samples = zip(("ours", "theirs"), (ours, theirs), cpu, strict=True)
    return {side: pairs.Sample(times, len(times), used, used) for side, times, used in samples}


def test_the_order_within_a_pair_is_drawn_and_can_be_drawn_again(pairs):
    compared = [pair_of(pairs), pair_of(pairs)]
    drawn = pairs.schedule(compared, 200, seed=7)
    assert drawn == pairs.schedule(compared, 200, seed=7)
    assert drawn != pairs.schedule(compared, 200, seed=8)
    assert [[pair for pair, _ in turns] for turns in drawn] == [compared] * 200
    orders = [tuple(order) for turns in drawn for _, order in turns]
    assert set(orders) == {("ours", "theirs"), ("theirs", "ours")}
    assert 150 < orders.count(("ours", "theirs")) < 250


def test_more_rounds_begin_as_fewer_do(pairs):
    compared = [pair_of(pairs)]
    assert pairs.schedule(compared, 21, seed=0)[:11] == pairs.schedule(compared, 11, seed=0)


def test_the_ratio_is_taken_within_each_round(pairs):
    """Here the machine is ten times slower in some rounds: the medians over all rounds would say 10 or 0.1, not 0.5."""
    rounds = [
        round_of(pairs, [1.0, 1.0], [2.0, 2.0]),
        round_of(pairs, [10.0, 10.0], [20.0, 20.0]),
        round_of(pairs, [10.0, 10.0], [1.0, 1.0]),
    ]
    (line,) = pairs.lines(pair_of(pairs), rounds)
    assert (line.value, line.faster, line.rounds) == (0.5, 2, 3)
    assert (line.ours, line.theirs) == (10.0, 2.0)


def test_one_slow_operation_does_not_decide_a_round(pairs):
    (line,) = pairs.lines(pair_of(pairs), [round_of(pairs, [1.0, 1.0, 900.0], [2.0, 2.0, 2.0])])
    assert line.value == 0.5


def test_a_share_is_higher_where_ours_is_faster(pairs):
    bound = pairs.Bound(0.9, 0.95, at_least=True)
    (line,) = pairs.lines(pair_of(pairs, share=9 / 8, bound=bound), [round_of(pairs, [10.0, 10.0], [8.0, 8.0])])
    assert line.value == pytest.approx(0.9)
    row = pairs.comparison([line]).splitlines()[2]
    assert "| 0.90 | - | ≥ 0.9 | ≥ 0.95 | held |" in row


def test_cpu_time_is_that_of_both_sides_for_one_operation(pairs):
    cpu = ("CPU", pairs.Bound(0.25))
    rounds = [round_of(pairs, [1.0, 1.0], [1.0, 1.0], cpu=(2e-4, 8e-4)) for _ in range(3)]
    time, used = pairs.lines(pair_of(pairs, cpu=cpu), rounds)
    assert (used.name, used.value, used.faster) == ("CPU", pytest.approx(0.25), 3)
    assert used.ours == pytest.approx(2e-4)
    assert time.spreads["ours"].caller == time.spreads["ours"].others == pytest.approx(1e-4)
    assert "| 100 µs + 100 µs | 400 µs + 400 µs | - |" in pairs.costs([time, used])


def test_there_is_no_line_for_cpu_time_that_could_not_be_read(pairs):
    found = pairs.lines(pair_of(pairs, cpu=("CPU", pairs.Bound())), [round_of(pairs, [1.0], [1.0])])
    assert [line.name for line in found] == ["a call"]


def test_cpu_time_beside_other_work_is_left_out(pairs):
    (line,) = pairs.lines(pair_of(pairs, busy=True), [round_of(pairs, [1.0], [1.0], cpu=(1.0, 1.0))])
    assert line.spreads["ours"].caller is None


@pytest.mark.parametrize(
    ("part", "values", "expected"),
    [(0.1, range(1, 11), 1), (0.99, range(1, 101), 99), (0.99, [5], 5), (0.5, [3, 1, 2], 2), (0.99, range(1, 11), 10)],
)
def test_quantiles(pairs, part, values, expected):
    assert pairs.quantile(list(values), part) == expected


def test_a_mean_has_no_spread(pairs):
    sample = pairs.Sample([1.0], 5000)
    (line,) = pairs.lines(pair_of(pairs), [{"ours": sample, "theirs": sample}])
    assert (line.spreads["ours"].tenth, line.spreads["ours"].ninety_ninth) == (None, None)
    (line,) = pairs.lines(pair_of(pairs), [round_of(pairs, [1.0, 3.0], [1.0, 3.0])])
    assert (line.spreads["ours"].tenth, line.spreads["ours"].ninety_ninth) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("value", "at_least", "expected"),
    [
        (0.3, False, "aim held"),
        (0.5, False, "held"),
        (0.51, False, "missed"),
        (None, False, ""),
        (0.5, True, "aim held"),
        (0.3, True, "held"),
        (0.2, True, "missed"),
    ],
)
def test_verdicts(pairs, value, at_least, expected):
    bound = pairs.Bound(*((0.3, 0.5) if at_least else (0.5, 0.3)), at_least=at_least)
    assert bound.verdict(value) == expected
    assert pairs.Bound().verdict(value) == ""


def test_a_missed_limit_stands_out(pairs):
    (line,) = pairs.lines(pair_of(pairs, bound=pairs.Bound(0.45, 0.3)), [round_of(pairs, [2.0], [1.0])])
    assert pairs.comparison([line]).splitlines()[2] == (
        "| a call | 2000.0 ms | 1000.0 ms | 2.00 | 0 of 1 | 0.45 | 0.3 | **missed** |"
    )


def test_each_case_of_the_issue_has_its_limit(benchmark, pairs):
    """A bound under a name that no case has would never be printed."""
    rpc, autograd = benchmark("rpc"), benchmark("autograd")
    for cases, bounds in (
        (rpc.CASES, rpc.BOUNDS),
        (rpc.BUSY, rpc.BUSY_BOUNDS),
        (rpc.OVER_ZEROMQ, rpc.ZEROMQ_BOUNDS),
        (autograd.CASES, autograd.BOUNDS),
    ):
        assert set(cases) == set(bounds)


def test_two_versions_are_compared_without_limits(benchmark, pairs):
    rpc, versions = benchmark("rpc"), benchmark("versions")
    compared = versions.beside_other([*rpc.TABLES["calls"], *rpc.TABLES["busy"]])
    assert {pair.theirs.contestant for pair in compared} == {versions.OTHER}
    assert {pair.ours.contestant for pair in compared} == {"nbdist"}
    assert {pair.bound for pair in compared} == {pairs.Bound()}
    assert [pair.cpu is None for pair in compared] == [pair.busy for pair in compared]


# --- processes ------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_contestant_is_measured_with_all_its_processes(benchmark, tmp_path):
    """The child computes, the caller waits: CPU time is found on the side where it was spent, and each is pinned."""
    harness = benchmark("harness")
    script = tmp_path / "contestant.py"
    script.write_text(CONTESTANT)
    one = harness.Contestant("one", [sys.executable, str(script)], python_path(BENCHMARKS))
    try:
        said = harness.pin([one])
        sample = one.measure("burn in the child", 2)
        where = [one.run(f"cores of {who}", 1) for who in ("the caller", "the child")]
        harness.unpin([one])
        after = one.run("cores of the child", 1)
        assert one.count_messages("burn in the child", 1) is None
    finally:
        one.close()
    assert len(sample.times) == sample.count == 2
    assert sample.others > 0.19 > 0.05 > sample.caller
    cores = sorted(harness.os.sched_getaffinity(0))
    assert "pinned" in said
    assert "not pinned" not in said
    assert where == [[cores[0]], [cores[1 % len(cores)]]]
    assert after == cores


def test_processes_of_a_contestant_import_nothing_from_the_working_directory(benchmark, monkeypatch):
    """In a checkout, workers that are started with ``-c`` had its nbdist, and their first process the installed one."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    code = "import json, sys; print(json.dumps({'version': sys.path}), flush=True); sys.stdin.read()"
    one = benchmark("harness").Contestant("one", [sys.executable, "-c", code])
    one.close()
    assert "" not in one.version


def test_another_python_is_not_given_the_path_of_this_one(benchmark, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/checkout")
    search_path = benchmark("harness").search_path
    assert search_path("/first", Path("/second")) == "/first:/second:/checkout"
    assert search_path("/first", python="/before/bin/python") == "/first"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_benchmark_that_is_ended_leaves_nothing(benchmark, tmp_path):
    script = tmp_path / "contestant.py"
    script.write_text(CONTESTANT)
    lead = tmp_path / "lead.py"
    lead.write_text(
        "import sys, harness\n"
        "one = harness.Contestant('one', [sys.executable, sys.argv[1]])\n"
        "print(one._process.pid, flush=True)\n"
        "one.run('burn in the child', 600)\n"
    )
    environment = {**os.environ, **python_path(BENCHMARKS)}
    with subprocess.Popen([sys.executable, lead, script], stdout=subprocess.PIPE, env=environment) as process:
        group = int(process.stdout.readline())
        members = benchmark("processes").group(group)
        process.terminate()
    assert len(members) == 2
    assert process.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not benchmark("processes").group(group))


@pytest.mark.soak  # tests/rpc/test_counts.py counts the messages of calls
def test_messages_are_counted_on_both_sides(benchmark):
    """A call and its answer, with both functions; a reference has a confirmation and a deletion besides."""
    one = benchmark("rpc").start("nbdist")
    try:
        for case, expected in (("empty call", 2), ("empty call of `__main__`", 2), ("5,000 outstanding, per call", 2)):
            assert one.count_messages(case, 100) == pytest.approx(expected, abs=0.15)
        assert one.count_messages("remote().to_here()", 100) > 3
        assert one.measure("empty call", 100).cpu() > 0
    finally:
        one.close()


CONTESTANT = """
import os, subprocess, sys
import harness

BURN = '''
import time
for line in iter(input, "end"):
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    print(flush=True)
'''

child = subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

def burn():
    print(file=child.stdin, flush=True)
    child.stdout.readline()

harness.serve("1", {
    "burn in the child": harness.each(burn),
    "cores of the caller": lambda count: sorted(os.sched_getaffinity(0)),
    "cores of the child": lambda count: sorted(os.sched_getaffinity(child.pid)),
})
child.communicate("end\\n")
"""
