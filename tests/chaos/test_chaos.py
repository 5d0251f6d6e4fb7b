"""Storms over the package as it is find nothing, and storms over a broken one exactly what was broken.

`make soak` ends with half an hour of storms over every workload: `make chaos`.
"""

import subprocess

import pytest
from planted import SABOTAGE, plant

from chaos import disturbances, phases
from chaos.recorder import digest
from chaos.storm import Storm

REPORTS = {"resend twice": {"ran twice"}, "drop a delete": {"left behind"}}
MAY_FOLLOW = {"resend twice": {"other error", "never ended", "stuck"}, "drop a delete": set()}
"""What else may come of the same fault: a call that runs twice at once is in one entry of its table twice.

Its end is missed then, and so is the end of the world that waits for it.
"""


@pytest.mark.timeout(300)
def test_a_short_storm_over_calls_finds_nothing():
    outcome = Storm("calls", seed=1, seconds=4, members=3).run()
    assert outcome.findings == [], f"in {outcome.folder}"
    assert outcome.counts["calls with a value"] > 20


@pytest.mark.soak  # it tests `make chaos`, which only the soak runs
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SABOTAGE)
def test_a_storm_reports_exactly_what_was_broken_on_purpose(tmp_path, name):
    plant(SABOTAGE[name], tmp_path)
    storm = Storm("calls", 2, seconds=1, strikes=("cut links",), members=2, leaks_after=4, package=tmp_path)
    outcome = storm.run()
    found = {finding.kind for finding in outcome.findings}
    assert REPORTS[name] <= found <= REPORTS[name] | MAY_FOLLOW[name], f"in {outcome.folder}"


def test_a_process_that_a_storm_has_killed_is_not_counted_as_there():
    with subprocess.Popen(["sleep", "600"]) as process:
        assert phases.is_running(process.pid)
        disturbances.kill(process.pid)
        assert not phases.is_running(process.pid)


def test_the_same_seed_throws_the_same_dice():
    one, other, third = (Storm("calls", seed, number)._dice.random() for seed, number in [(1, 2), (1, 2), (1, 3)])
    assert one == other != third


def test_equal_values_have_equal_digests():
    assert digest({"a": [1, 2.0]}) == digest({"a": [1, 2.0]}) != digest({"a": [1, 3.0]})
