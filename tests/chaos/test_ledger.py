"""The ledger finds what cannot be, and nothing else. Pure: entries go in, findings come out."""

import pytest

from chaos.ledger import PATIENCE, Answered, Ledger, Noted, Ran, Sent, Settled, Struck

SENT = Sent("call", "worker0", 10, "worker1", "small", 5.0, 100.0)
RAN = Ran("call", "worker1", 11, "value")
ANSWERED = Answered("call", "value", None, False, 101.0)
KILLED = Struck("kill", "worker1", 11, 100.5, 100.5)


def answered(error, *, own=False, at=101.0):
    return Answered("call", None, error, own, at)


HARMLESS = {
    "a call that ran once and returned that": [SENT, RAN, ANSWERED],
    "in any order": [ANSWERED, RAN, SENT],
    "a call that failed and never ran": [SENT, answered("RpcTimeout: late")],
    "a call that failed after it ran": [SENT, RAN, answered("RpcTimeout: late")],
    "a call whose function raised": [SENT, Ran("call", "worker1", 11, None), answered("LookupError: x", own=True)],
    "a worker that was killed": [SENT, KILLED, answered("WorkerLost: worker1 died")],
    "a caller that was killed": [SENT, RAN, Struck("kill", "worker0", 10, 101.0, 101.0)],
    "a caller that was stopped for long": [
        SENT,
        RAN,
        Struck("stop", "worker0", 10, 100.0, 190.0),
        Answered("call", "value", None, False, 195.0),
    ],
}

FOUND = {
    "ran twice": [SENT, RAN, RAN, ANSWERED],
    "did not run": [SENT, ANSWERED],
    "other value": [SENT, RAN, Answered("call", "another", None, False, 101.0)],
    "ran elsewhere": [SENT, Ran("call", "worker2", 12, "value"), ANSWERED],
    "forged": [SENT, RAN, ANSWERED, Ran("other", "worker1", 11, "value")],
    "never ended": [SENT, RAN, Settled("worker0", 10, 160.0)],
    "ended late": [SENT, RAN, Answered("call", "value", None, False, 105.5 + PATIENCE)],
    "counted as dead": [SENT, answered("WorkerLost: worker1 died")],
    "wrong": [Noted("wrong", "worker0", "a gradient")],
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_storm_explains_is_no_finding(name):
    assert Ledger(HARMLESS[name]).compare() == []


@pytest.mark.parametrize("kind", FOUND)
def test_what_cannot_be_is_found(kind):
    assert [finding.kind for finding in Ledger(FOUND[kind]).compare()] == [kind]


def test_a_kill_after_the_answer_explains_nothing():
    late = Struck("kill", "worker1", 11, 102.0, 102.0)
    assert [each.kind for each in Ledger([SENT, answered("WorkerLost: x"), late]).compare()] == ["counted as dead"]


def test_a_call_that_failed_may_have_run_but_not_twice():
    found = Ledger([SENT, RAN, RAN, answered("RpcTimeout: late")]).compare()
    assert [finding.kind for finding in found] == ["ran twice"]


def test_counts():
    counts = Ledger([SENT, RAN, ANSWERED, KILLED]).counts()
    assert counts == {
        "call small": 1,
        "calls": 1,
        "calls that failed": 0,
        "calls whose caller died": 0,
        "calls with a value": 1,
        "struck kill": 1,
    }
