"""G1: any program has the gradients over workers that it has in one process, and each hook runs as often."""

import pytest
from helpers.models.autograd_programs import WORKERS, assert_same, programs
from helpers.suite.examples import long, quick
from hypothesis import given

from nbdist.rpc import RpcBackendOptions
from nbdist.testing import Faults, World

QUICK = quick(250)
LONG = long(QUICK)
DISORDER = {"*": 0.3}


@pytest.fixture(scope="module")
def orderly():
    with World(WORKERS) as world:
        yield world


@pytest.fixture(scope="module")
def disorderly():
    with World(WORKERS, faults=Faults(reorder=DISORDER)) as world:
        yield world


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


WAYS = {
    "unix sockets, all tensors in shared memory": ("local", {"arena_threshold": 1}),
    "unix sockets, none": ("local", {"arena_bytes": 0}),
    "ZeroMQ, all": ("zeromq", {"arena_threshold": 1}),
    "ZeroMQ, none": ("zeromq", {"arena_bytes": 0}),
}


@pytest.fixture(scope="module", params=WAYS)
def really(request):
    channel, options = WAYS[request.param]
    with World(WORKERS, channel=channel, options=RpcBackendOptions(**options)) as world:
        yield world


@pytest.mark.timeout(600)
@quick(150)
@given(program=programs)
def test_any_program_over_each_channel(really, program):
    assert_same(program, really)


@pytest.mark.soak
@pytest.mark.timeout(7000)
@long(quick(500))
@given(program=programs)
def test_very_many_programs_over_each_channel(really, program):
    assert_same(program, really)


def backward_in_steps(context_id, roots, retain_graph):
    with context_id.watch(paused=True, norms=True) as watch:
        handle = context_id.backward_async(roots, retain_graph)
        ran = watch.step(3)
        while halted := watch.run(until="message"):
            assert halted in watch.halted
            ran += watch.step(2)
        handle.wait()
        assert ran
        assert watch.passes[-1].complete


@pytest.mark.timeout(600)
@quick(60)
@given(program=programs)
def test_any_program_step_by_step(disorderly, program):
    assert_same(program, disorderly, backward=backward_in_steps)


@pytest.mark.soak
@pytest.mark.timeout(14000)
@LONG
@given(program=programs)
def test_very_many_programs(orderly, program):
    assert_same(program, orderly)
