"""Sums in a fixed order, whatever the order in which gradients come."""

import itertools

import pytest
import torch
from helpers.models.autograd_functions import times_leaf

from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.autograd.passes.ordering import GateQueues, ordered

LARGE = 1e8
GRADIENTS = {2: LARGE, 1: -LARGE, 0: 1.0}
"""In float32 their sum is 1 if the last ones come first, and 0 where the 1 is added to one of the others."""


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("calls", list(itertools.permutations(range(3))))
def test_gradients_enter_the_last_one_first_in_whatever_order_they_come(world, mode, calls):
    with dist_autograd.context() as context_id:
        outs = {index: rpc.rpc_sync("worker1", times_leaf, args=(index,)) for index in calls}
        loss = sum(outs[index] * GRADIENTS[index] for index in calls)
        dist_autograd.backward(context_id, [loss], mode=mode)
        assert rpc.rpc_sync("worker1", times_leaf, args=(None,)).item() == 1.0


@pytest.mark.parametrize("unused", [0, 1, 2])
def test_what_is_not_used_is_not_waited_for(world, unused):
    with dist_autograd.context() as context_id:
        outs = {index: rpc.rpc_sync("worker1", times_leaf, args=(index,)) for index in range(3)}
        dist_autograd.backward(context_id, [sum(outs[index] for index in outs if index != unused)])
        assert rpc.rpc_sync("worker1", times_leaf, args=(None,)).item() == 2.0


class Gate:
    """What `GateQueues` knows of a slot."""

    def __init__(self, tensor):
        self.edge = (tensor.grad_fn, 0)


def test_lines():
    leaf = torch.ones(1, requires_grad=True)
    gates = {index: Gate(ordered(leaf, "group", index)) for index in range(3)}
    other, plain = Gate(ordered(leaf, "another group", 0)), Gate(leaf * 1)
    lines = GateQueues([*gates.values(), other, plain])
    assert set(lines.places) == {*gates.values(), other}
    turns = []
    while any(not lines.has_turn(gate) for gate in gates.values()):
        assert lines.has_turn(other)
        assert lines.has_turn(plain)
        index = next(index for index in sorted(gates, reverse=True) if index not in turns)
        assert [lines.has_turn(gates[earlier]) for earlier in range(index)] == [False] * index
        assert lines.has_turn(gates[index])
        lines.leave(gates[index])
        lines.leave(gates[index])  # it may be given back, and taken again
        assert lines.has_turn(gates[index])
        turns.append(index)
    assert turns == [2, 1]
