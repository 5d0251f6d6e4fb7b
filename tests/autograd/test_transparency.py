"""G1: any program has the gradients over workers that it has in one process, and each hook runs as often."""

import os

import pytest
from autograd_programs import WORKERS, assert_same, programs
from hypothesis import HealthCheck, given, settings

from nbdist.testing import Faults, World

QUICK = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,  # a commit either passes or does not; new programs are the soak's business
    suppress_health_check=list(HealthCheck),
)
LONG = settings(
    QUICK,
    derandomize=False,
    database=None,
    max_examples=int(os.environ.get("NBDIST_SOAK_EXAMPLES", "10000")),
)
DISORDER = {"*": 0.3}


@pytest.fixture(scope="module")
def orderly():
    with World(WORKERS) as world:
        yield world


@pytest.fixture(scope="module")
def disorderly():
    with World(WORKERS, faults=Faults(reorder=DISORDER)) as world:
        yield world


def no_context_is_left(world):
    return not any(agent.recorder.contexts.all() for agent in world)


@pytest.mark.timeout(900)
@QUICK
@given(program=programs)
def test_any_program(orderly, program):
    assert_same(program, orderly)


@pytest.mark.timeout(900)
@QUICK
@given(program=programs)
def test_any_program_whatever_the_order_of_messages(disorderly, program):
    assert_same(program, disorderly)


@pytest.mark.soak
@pytest.mark.timeout(14000)
@LONG
@given(program=programs)
def test_very_many_programs(orderly, program):
    assert_same(program, orderly)
