"""Programs for tests of distributed autograd: drawn at random, run in one process or over workers.

A program is a block: operations on a list of tensors, which is the block's environment. A ``call`` runs an inner
block somewhere else on some of them. All numbers are small integers in float64 and all operations exact, so that
the gradients of both runs must be equal, bit by bit, whatever the order in which sums were made.
"""

import itertools
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from nbdist import autograd as dist_autograd
from nbdist import rpc

WORKERS = 3

_indices = st.integers(0, 40)
_plain = st.one_of(
    st.tuples(st.just("leaf"), st.lists(st.integers(-2, 2), min_size=2, max_size=2), st.integers(0, 31)),
    st.tuples(st.sampled_from(["add", "sub", "mul", "unbind", "alias"]), _indices, _indices),
    st.tuples(
        st.sampled_from(["double", "inplace", "view", "custom", "hook", "node hook", "detach"]), _indices, _indices
    ),
    st.tuples(st.sampled_from(["reentrant", "checkpoint"]), _indices, _indices),
)
_HOW = ["sync", "sync", "async", "remote", "twice", "method", "no_grad"]


def _call(inner):
    return st.tuples(
        st.just("call"),
        st.integers(0, WORKERS - 1),
        st.lists(_indices, min_size=1, max_size=3),
        inner,
        st.sampled_from(_HOW),
        st.integers(1, 3),
    )


blocks = st.recursive(
    st.lists(_plain, min_size=1, max_size=5).map(tuple),
    lambda inner: st.lists(st.one_of(_plain, _call(inner), _call(inner)), min_size=1, max_size=7).map(tuple),
    max_leaves=8,
)
roots = st.lists(st.lists(_indices, min_size=1, max_size=3), min_size=1, max_size=2)
programs = st.tuples(blocks, roots)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors  # freed by now if it ran before
        return g * 2 + 0 * x


@dataclass
class Trial:
    """One run of a program: the leaves that it made, and how often each hook ran."""

    leaves: dict = field(default_factory=dict)
    hooks: dict = field(default_factory=dict)
    kept: list = field(default_factory=list)

    def count(self, *key):
        self.hooks[key] = self.hooks.get(key, 0) + 1


trials = {}
_numbers = itertools.count()


class Here:
    """Runs inner blocks in the same thread; what is handed over is copied, as it would be on its way."""

    def __init__(self, me=0):
        self.me = me

    def call(self, trial, path, to, block, args, how):
        there, copies = Here(to), _copied(args)
        if how == "no_grad":
            with torch.no_grad():
                return [[out.detach() for out in run_block(there, trial, path, block, copies)]]
        made = run_block(there, trial, path, block, copies)
        times = 2 if how == "twice" else 1
        if how in ("remote", "twice") and to == self.me:
            return [made] * times  # who owns a value gets the value itself
        return [_copied(made) for _ in range(times)]


def _copied(tensors):
    """What is one tensor on this side is one on the other."""
    copies = {id(tensor): tensor.clone() for tensor in tensors}
    return [copies[id(tensor)] for tensor in tensors]


class There:
    """Runs inner blocks on other workers."""

    def __init__(self, number):
        self.number = number

    def call(self, trial, path, to, block, args, how):
        name, what = f"worker{to}", (self.number, path, block, args)
        if how == "no_grad":
            with torch.no_grad():  # a leaf that comes back is one of its own
                return [[out.detach() for out in rpc.rpc_sync(name, remote_block, args=what)]]
        if how == "sync":
            return [rpc.rpc_sync(name, remote_block, args=what)]
        if how == "async":
            return [rpc.rpc_async(name, remote_block, args=what).wait()]
        if how == "method":
            runner = rpc.remote(name, Runner, args=(self.number,))
            return [runner.rpc_sync().run(*what[1:])]
        rref = rpc.remote(name, remote_block, args=what)
        return [rref.to_here() for _ in range(2 if how == "twice" else 1)]


class Runner:
    def __init__(self, number):
        self.number = number

    def run(self, path, block, args):
        return remote_block(self.number, path, block, args)


def remote_block(number, path, block, args):
    return run_block(There(number), trials[number], path, block, args)


def run_block(mover, trial, path, block, args):
    """Run a block; its last values."""
    env, leaves = list(args), []
    for number, (what, *rest) in enumerate(block):
        here = (*path, number)
        if what == "leaf":
            made = [_leaf(trial, here, *rest)]
            leaves += made
        elif what == "call":
            to, chosen, inner, how, used = rest
            given = [env[i % len(env)] for i in chosen] if env else []
            made = [out for outs in mover.call(trial, here, to, inner, given, how) for out in outs[:used]]
        elif not env:
            continue
        else:
            made = _apply(trial, here, what, env[rest[0] % len(env)], env[rest[1] % len(env)], leaves, rest[1])
        env += made
    return env[-3:]


def _leaf(trial, key, values, flags):
    leaf = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    trial.leaves[key] = leaf
    if flags & 1 and flags & 2:
        leaf.register_hook(lambda g: (trial.count(key, "leaf"), None if g is None else g * 2)[1])
    if flags & 4 and flags & 2:
        leaf.register_post_accumulate_grad_hook(lambda p: trial.count(key, "accumulated", p.grad is not None))
    if flags & 8 and flags & 4:
        node = torch.autograd.graph.get_gradient_edge(leaf).node
        node.register_hook(lambda _, g: trial.count(key, "node"))
        node.register_prehook(lambda g: trial.count(key, "before"))
        trial.kept.append(node)  # with it go its hooks
    return leaf


def _apply(trial, key, what, a, b, leaves, number):
    if what == "add":
        return [a + b]
    if what == "sub":
        return [a - b]
    if what == "mul":
        return [a * (leaves[number % len(leaves)] if leaves else 2)]
    if what == "double":
        return [a * 2]
    if what == "unbind":
        return list(torch.stack([a, b]).unbind(0))
    if what == "alias":
        return [a]
    if what == "inplace":
        changed = a.clone()
        changed[0].add_(3)
        return [changed.mul_(2)]
    if what == "view":
        return [a.view(2, 1).squeeze(1)]
    if what == "custom":
        return [Doubled.apply(a)]
    if what == "detach":
        return [a.detach()]
    if not a.requires_grad or not torch.is_grad_enabled():
        return []
    if what == "hook":
        a.register_hook(lambda g: (trial.count(key), None if g is None else g + 1)[1])
        return []
    if what == "node hook":  # on a node of its own: tensors that come in one message share theirs
        made = a * 1
        made.grad_fn.register_hook(lambda *_: trial.count(key, "after"))
        made.grad_fn.register_prehook(lambda *_: trial.count(key, "before"))
        return [made]
    return [checkpoint(_region, a, b, use_reentrant=what == "reentrant")]


def _region(a, b):
    return (a + b) * 2 - a


def _totals(chosen, env):
    totals = []
    for indices in chosen:
        values = [env[i % len(env)] for i in indices if env]
        total = sum(value.sum() for value in values)
        if isinstance(total, torch.Tensor) and total.grad_fn is not None:
            totals.append(total)
    return totals


def run_here(program):
    """Gradients by leaf, and counts by hook, of an ordinary run."""
    block, chosen = program
    trial = Trial()
    totals = _totals(chosen, run_block(Here(), trial, (), block, []))
    for number, total in enumerate(totals):
        total.backward(retain_graph=number < len(totals) - 1)
    return {key: leaf.grad for key, leaf in trial.leaves.items()}, trial.hooks


def run_there(program, world, backward=dist_autograd.backward):
    """The same, over the workers of a world, beginning on the first."""
    block, chosen = program
    number, trial = next(_numbers), Trial()
    trials[number] = trial
    try:
        with world[0].activate(), dist_autograd.context() as context_id:
            totals = _totals(chosen, run_block(There(number), trial, (), block, []))
            for leaf in trial.leaves.values():
                leaf.grad = torch.full_like(leaf, 7)
            for which, total in enumerate(totals):
                backward(context_id, [total], retain_graph=which < len(totals) - 1)
            gradients = {}
            for agent in world:
                context = agent.recorder.contexts.find(context_id)
                if context is not None:
                    gradients.update({id(leaf): gradient for leaf, gradient in context.gradients().items()})
        for leaf in trial.leaves.values():
            assert leaf.grad.eq(7).all(), ".grad was touched"
        return {key: gradients.get(id(leaf)) for key, leaf in trial.leaves.items()}, trial.hooks
    finally:
        del trials[number]


def assert_same(program, world, **how):
    """One process and several give the same."""
    expected, expected_hooks = run_here(program)
    gradients, hooks = run_there(program, world, **how)
    assert gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        found = gradients[key]
        if gradient is None:
            assert found is None or not found.any(), f"{key} has {found}, should have none"
        else:
            assert found is not None, f"{key} has none, should have {gradient}"
            assert torch.equal(found, gradient), f"{key} has {found}, should have {gradient}"
    assert hooks == expected_hooks
