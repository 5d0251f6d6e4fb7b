"""A worker that takes a dead one's name and id: its contexts have the same ids, and are others."""

import pytest
import torch
from helpers.waiting import wait_until

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.autograd.passes.contexts import Contexts
from nbdist.testing import World


def gradient_over(to, between=lambda: None):
    """The gradient of (3 x)² for x = 2, where 3 x is computed on ``to``: 36. Before the pass, do ``between()``."""
    x = torch.tensor(2.0, requires_grad=True)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync(to, torch.mul, args=(x, 3.0))
        between()
        dist_autograd.backward(context_id, [y * y])
        return dist_autograd.get_gradients(context_id)[x].item()


def test_a_successors_gradients_are_right():
    with World(2, dynamic=True) as world:
        for _ in range(3):
            with world[-1].activate():
                assert [gradient_over("worker0") for _ in range(4)] == [36.0] * 4
            world.kill(len(world) - 1)
            world.add("worker1", 1)


def test_the_end_of_a_dead_workers_context_comes_late_and_leaves_its_successors_alone():
    with World(3, dynamic=True) as world:
        with world[1].activate():
            context = dist_autograd.context()
            x = torch.ones(2, requires_grad=True)
            with context:
                rpc.rpc_sync("worker0", torch.mul, args=(x, 3.0))
                pool, submitted = world[0].pool, []
                pool.submit = submitted.append  # its end on worker0 comes late
                world.kill(1)
                del pool.submit
        with world.add("worker1", 1).activate():
            assert gradient_over("worker0", between=lambda: [job() for job in submitted]) == 36.0
            assert gradient_over("worker0") == 36.0
        wait_until(lambda: not world[0].recorder.contexts.all(), "the end of all contexts")


def test_a_pass_that_needs_the_dead_one_fails_although_its_name_is_taken_again():
    with World(2, dynamic=True) as world, world[0].activate(), dist_autograd.context() as context_id:
        x = torch.tensor(2.0, requires_grad=True)
        lost = rpc.rpc_sync("worker1", torch.mul, args=(x, 5.0))
        world.kill(1)
        world.add("worker1", 1)
        y = rpc.rpc_sync("worker1", torch.mul, args=(x, 3.0))  # its message has the same number as the dead one's
        with pytest.raises(nbdist.WorkerLost, match=r"worker1 .+; a new worker has taken its name"):
            dist_autograd.backward(context_id, [lost + y])


@pytest.mark.parametrize("known", [True, False])
def test_a_late_message_of_a_dead_maker_neither_takes_a_context_away_nor_makes_one(known):
    dead, successor, id = 7, 9, 1 << 48
    contexts = Contexts(0, 1)
    if known:
        assert contexts.enter(id, dead) is not None
    contexts.is_gone = lambda maker: maker == dead
    assert known or contexts.enter(id, dead) is None
    theirs = contexts.enter(id, successor)
    assert theirs is not None
    assert contexts.enter(id, dead) is None
    assert contexts.release(id, dead) is None
    assert contexts.enter(id, successor) is theirs
    assert contexts.release(id, successor) is theirs
    assert contexts.enter(id, successor) is None
