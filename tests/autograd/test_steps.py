"""What has nothing in common does not wait for each other, though it is of one pass and on one worker."""

import random
import threading
import time

import pytest
import torch
from helpers.models import autograd_functions
from helpers.models.autograd_functions import each_by_way_of_worker2, gradient_of, stage, weights
from helpers.models.autograd_programs import WORKERS, assert_same, programs
from helpers.suite.examples import quick
from hypothesis import given

from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.autograd.passes import claims, ddp, worker_part
from nbdist.autograd.passes.gradient_store import GradientStore
from nbdist.channel import machine
from nbdist.testing import Faults, World

PATIENCE = 20


@pytest.fixture(params=["smart", "fast"])
def mode(request):
    return request.param


@pytest.fixture
def threads(monkeypatch):
    """So many may run a pass on a worker."""

    def limit(most):
        monkeypatch.setattr(machine, "cores", lambda: most * torch.get_num_threads())
        monkeypatch.setattr(ddp, "living", {})  # with such modules a pass has one thread, and other tests have some

    return limit


@pytest.fixture
def hooks(monkeypatch):
    found = {}
    monkeypatch.setattr(autograd_functions, "hooks", found)
    return found


def forward(count):
    """Micro-batches over two workers."""
    outs = []
    for index in range(count):
        middle = rpc.rpc_sync("worker1", stage, args=(torch.full((3,), float(index + 1)), "first", index))
        outs.append(rpc.rpc_sync("worker2", stage, args=(middle, "second", index)))
    return outs


def test_two_micro_batches_run_at_the_same_time(world, threads, hooks, mode):
    threads(2)
    door = threading.Barrier(2)
    hooks["second"] = lambda index: door.wait(PATIENCE)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [sum(forward(2)).sum()], mode=mode)
        assert rpc.rpc_sync("worker1", gradient_of, args=("first", context_id)) == [2.0 * 1 + 2.0 * 2] * 3


def test_tensors_of_one_message_run_one_after_the_other(world, threads, hooks, mode):
    """Their gradients come in several messages and go back in one, which two steps at a time would both complete."""
    threads(2)
    now, most, lock = [0], [0], threading.Lock()
    arrived = [threading.Event() for _ in range(6)]

    def first(index):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        arrived[index].set()
        time.sleep(0.05)  # the time in which another step would begin, if it could
        with lock:
            now[0] -= 1

    def second(index):
        if index:
            arrived[index - 1].wait(0.05)  # so a gradient comes while another one is under way

    hooks.update(first=first, second=second)
    tensors = [torch.ones(3, requires_grad=True) for _ in range(6)]
    with dist_autograd.context() as context_id:
        out = rpc.rpc_sync("worker1", each_by_way_of_worker2, args=tensors)
        dist_autograd.backward(context_id, [out.sum()], mode=mode)
        found = dist_autograd.get_gradients(context_id)
        assert [found[tensor].tolist() for tensor in tensors] == [[4.0] * 3] * 6
    assert most[0] == 1


def test_there_are_no_more_threads_than_allowed(world, threads, hooks, mode):
    threads(2)
    now, most, lock = [0], [0], threading.Lock()

    def count(_):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1

    hooks["second"] = count
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [sum(forward(6)).sum()], mode=mode)
    assert most[0] <= 2


def test_one_thread_sends_each_back_before_it_goes_on_with_the_next(world, threads, hooks, mode):
    threads(1)
    came_through = threading.Event()
    begun = []

    def first(index):
        came_through.set()

    def second(index):
        begun.append(index)
        if len(begun) == 2:
            assert came_through.wait(PATIENCE), "the first one waits for the second"

    hooks.update(first=first, second=second)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [sum(forward(2)).sum()], mode=mode)


def test_shared_leaves_get_all_gradients_and_keep_their_own(world, threads, hooks, mode):
    threads(4)
    hooks["first"] = hooks["second"] = lambda index: time.sleep(random.random() * 0.003)
    for weight in weights.values():
        weight.grad = torch.full((3,), 5.0)
    try:
        for _ in range(5):
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [sum(forward(8)).sum()], mode=mode)
                # 1 to 8, by the 2 of the other worker.
                assert rpc.rpc_sync("worker1", gradient_of, args=("first", context_id)) == [72.0] * 3
                assert rpc.rpc_sync("worker2", gradient_of, args=("second", context_id)) == [72.0] * 3
            assert all(weight.grad.tolist() == [5.0] * 3 for weight in weights.values())
    finally:
        for weight in weights.values():
            weight.grad = None


def test_a_hook_on_a_shared_leaf_runs_once_with_all_of_its_gradient(world, threads, hooks):
    threads(4)
    seen = []
    handle = weights["second"].register_hook(lambda gradient: seen.append(gradient.tolist()))
    try:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [sum(forward(3)).sum()])
    finally:
        handle.remove()
    assert seen == [[2.0 * (1 + 2 + 3)] * 3]


def test_an_error_in_one_ends_the_others(world, threads, hooks, mode):
    threads(2)
    failed = threading.Event()
    begun = []

    def second(index):
        begun.append(index)
        if len(begun) == 1:
            failed.set()
            raise ValueError("not this one")
        failed.wait(PATIENCE)
        time.sleep(0.05)

    hooks["second"] = second
    with dist_autograd.context() as context_id, pytest.raises(ValueError, match="not this one"):
        dist_autograd.backward(context_id, [sum(forward(6)).sum()], mode=mode)
    assert len(begun) < 6


@pytest.fixture(scope="module")
def disorderly():
    with World(WORKERS, faults=Faults(reorder={"*": 0.3})) as world:
        yield world


@pytest.mark.timeout(600)
@quick(150)
@given(program=programs)
def test_any_program_with_many_threads(disorderly, program):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "cores", lambda: 4 * torch.get_num_threads())
        run, moments = worker_part.run_backward, random.Random(0)

        def slowly(*args, **options):
            time.sleep(moments.random() * 0.002)
            run(*args, **options)
            time.sleep(moments.random() * 0.002)

        patch.setattr(worker_part, "run_backward", slowly)
        assert_same(program, disorderly)


def accumulator(leaf):
    return leaf.expand_as(leaf).grad_fn.next_functions[0][0]


def test_a_leaf_that_lies_where_another_one_has_died_is_not_taken_for_it():
    """Checkpoints make leaves that live no longer than their own call; Python gives their place to others."""
    one, other = (claims.Claim([], GradientStore(), "group") for _ in range(2))
    for _ in range(1000):
        leaf = torch.ones(1, requires_grad=True)
        place = id(leaf)
        assert not one.adopt([accumulator(leaf)])
        assert other.adopt([accumulator(leaf)])  # while it lives it is the first one's
        del leaf
        following = torch.ones(1, requires_grad=True)
        if id(following) == place:
            break
    else:
        pytest.skip("no leaf came to lie in another one's place")
    assert not other.adopt([accumulator(following)])
    assert one.adopt([accumulator(following)])
    one.release()
    assert one.adopt([accumulator(following)])  # what has died is not given back in its place
    other.release()
    assert not one.adopt([accumulator(following)])
    one.release()


REENTRANT = ("reentrant", 26, 33)
CHECKPOINTS = (
    (
        ("checkpoint", 11, 8),
        ("call", 1, [38, 18], (REENTRANT, REENTRANT, ("leaf", [1, 0], 0), ("leaf", [0, 0], 3)), "sync", 1),
        ("call", 1, [38, 18], (REENTRANT, REENTRANT, ("leaf", [1, 0], 0), ("leaf", [1, 0], 0)), "sync", 1),
        REENTRANT,
        ("leaf", [1, 0], 0),
        ("leaf", [0, 0], 0),
    ),
    [[0]],
)


def test_reentrant_checkpoints_in_several_threads(threads):
    threads(2)
    with World(WORKERS, channel="local", options=rpc.RpcBackendOptions(arena_bytes=0)) as world:
        for _ in range(400):
            assert_same(CHECKPOINTS, world)
