"""When a thread that waits looks without sleeping first."""

import pytest

from nbdist.channel.spinning import POLL_SECONDS, Spinning


def looks(seconds_of, waits=1000):
    """Run through waits, each as long as ``seconds_of(number, looks)`` says; return which began with a look."""
    spinning, looked = Spinning(), []
    for number in range(waits):
        looks = spinning.is_worth_while
        looked.append(looks)
        seconds = seconds_of(number, looks)
        spinning.waited(seconds, min(seconds, POLL_SECONDS) if looks else 0.0)
    return looked


def test_where_messages_follow_quickly_each_wait_begins_with_a_look():
    assert looks(lambda number, looks: 30e-6) == [False] + [True] * 999


def test_two_that_sleep_begin_to_look_though_both_take_longer_to_wake():
    assert all(looks(lambda number, looks: 30e-6 if looks else 1.5 * POLL_SECONDS)[1:])


def test_long_waits_begin_with_no_look():
    assert not any(looks(lambda number, looks: 0.01))


def test_a_long_wait_in_between_costs_one_look():
    found = looks(lambda number, looks: 0.5 if number % 10 == 9 else 30e-6)
    assert sum(found[number] for number in range(9, 1000, 10)) == 100  # each long one came as a surprise
    assert not any(found[number] for number in range(10, 1000, 10))


def test_looks_that_are_all_in_vain_become_rare():
    """The other side has no core while this one looks, and answers once it sleeps."""
    found = looks(lambda number, looks: POLL_SECONDS + 100e-6 if looks else 100e-6)
    assert 50 < sum(found) < 150


def test_looks_that_another_thread_stalls_become_very_rare():
    """A thread that computes on the same core has it for milliseconds each time that the looking one lets go of it."""
    spinning, looked = Spinning(), 0
    for _ in range(1000):
        looked += (looks := spinning.is_worth_while)
        spinning.waited(3 * POLL_SECONDS if looks else 300e-6, 3 * POLL_SECONDS if looks else 0.0)
    assert 10 < looked < 20


@pytest.mark.parametrize("burst", range(3))
def test_a_few_hiccups_do_not_end_the_looks(burst):
    found = looks(lambda number, looks: 1.5 * POLL_SECONDS if number % 50 < burst else 30e-6)
    assert sum(found) > 990
