"""How often is looked: by simulated steps."""

import random

import pytest

from nbdist.views.passes.pace import Pace


def train(pace, seconds, step, cost, noise=0.0, began=0.0):
    """How many looks there are in so many seconds, and which part of the time they take."""
    draw = random.Random(0)
    now, looks, spent = began, 0, 0.0
    while now < seconds:
        pace.begins(now)
        now += step * (1 + noise * draw.random())
        if pace.is_due(now):
            pace.looks(now)
            looks += 1
            now += cost
            spent += cost
    return looks, spent / now


@pytest.mark.parametrize("step", [0.002, 0.1, 0.5, 3.0])
@pytest.mark.parametrize("cost", [0.001, 0.1, 1.0])
def test_it_takes_a_twentieth_of_the_time_at_most(step, cost):
    looks, share = train(Pace(), 600, step, cost, noise=0.1)
    assert share < 0.05
    assert looks >= 10


def test_what_is_cheap_is_looked_at_each_second():
    looks, _ = train(Pace(), 60, 0.01, 0.001)
    assert 50 <= looks <= 61


def test_the_first_step_is_looked_at_and_then_some_are_not():
    pace = Pace()
    seen = []
    for number in range(7):
        now = number * 10.0
        pace.begins(now)
        seen.append(pace.is_due(now))
        if seen[-1]:
            pace.looks(now)
    assert seen == [True, False, False, False, False, True, False]


def test_one_look_that_took_long_is_not_believed():
    pace = Pace()
    pace.begins(0.0)
    pace.looks(0.0)  # and a minute of warming up
    looks, _ = train(pace, 120, 0.1, 0.01, began=60.0)
    assert looks > 40


def test_while_somebody_holds_it_up_nothing_is_learnt():
    pace = Pace()
    train(pace, 20, 0.1, 0.001)
    pace.begins(20.1)
    pace.looks(20.1)
    pace.disturbed()  # paused for an hour
    pace.begins(3600.0)
    pace.begins(3600.1)
    assert pace.is_due(3600.2)
