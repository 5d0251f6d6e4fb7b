"""What `make bench` writes, and where it puts it."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("benchmarks_report", BENCHMARKS / "report.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    sys.modules.pop("harness", None)
    return module


def test_the_readme_has_a_place_for_each_table(report):
    text = (ROOT / "README.md").read_text()
    rows = report.rows({"a call": {"nbdist": [1e-4, 3e-4, 2e-4], "torch": [4e-4]}}, "torch")
    assert rows == ["| a call | 200 µs | 400 µs | 0.50 |"]
    for name in ("rpc", "autograd"):
        once = report.in_readme(text, name, rows)
        assert once.count(rows[0]) == 1
        assert report.in_readme(once, name, rows) == once
        assert once.count("<!-- measured") == text.count("<!-- measured") == 4


def test_sections_are_found_again(report):
    parts = {name: report.section(name, f"| {name} |") for name in report.BENCHMARKS}
    assert report.sections("\n".join([report.HEAD, *parts.values()])) == parts


def test_the_table_beside_other_libraries(report):
    """Ours is compared with the fastest of the peers, and whoever has no numbers is named."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import peers
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in ("harness", "rpc", "peers"):
            sys.modules.pop(name, None)
    times = {"empty call": {"nbdist": [1e-4, 3e-4, 2e-4], "Ray": [4e-4], "Dask": [9e-4]}}
    assert peers.table(times).splitlines()[2] == "| empty call | 200 µs | 400 µs | 900 µs | 0.50 |"
    assert peers.table({"empty call": {"nbdist": [2e-4]}}).splitlines()[2] == "| empty call | 200 µs | - |"
    assert peers.left_out({"Ray": "not installed"}) == "Left out: Ray (not installed)."
    assert peers.left_out({}) == "Left out: none."
    assert "peers" in report.BENCHMARKS


def test_the_tables_of_the_readme_are_those_of_the_report():
    """Both are written by one command; whoever changes one by hand is found out."""
    written = (BENCHMARKS / "README.md").read_text()
    table = (ROOT / "README.md").read_text().partition("<!-- measured: rpc -->")[2]
    found = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)
    rows = [row for row in found if row[3].replace(".", "").isdigit()]
    assert len(rows) >= 10
    for case, ours, theirs, ratio in rows:
        lines = [line for line in written.splitlines() if line.startswith(f"| {case} | {ours} |")]
        assert any(theirs in line and f"| {ratio} |" in line for line in lines)
