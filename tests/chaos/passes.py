"""The workload of members that run backward passes over each other."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from chaos import tasks
from chaos.calling import Caller
from nbdist import autograd as dist_autograd

LIMIT = 15.0
_ROUNDING = 1e-5


class Passes:
    """One thread's passes."""

    THREADS = 2

    def __init__(self, caller: Caller, others: Sequence[str], dice: random.Random) -> None:
        self._caller = caller
        self._others = others
        self._dice = dice

    def step(self) -> None:
        """Run one pass over two or three members, and compare its gradients with those that this process computes."""
        route = [
            (self._dice.choice(self._others), self._dice.uniform(0.5, 2.0)) for _ in range(self._dice.choice((2, 3)))
        ]
        size = self._dice.choice((8, 50_000))
        start = torch.linspace(0, 1, size)
        ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
        with dist_autograd.context() as context:
            values = [ours]
            for to, factor in route:
                values.append(self._caller.sync(to, "recorded", tasks.wave, values[-1], factor, limit=LIMIT))
            loss = torch.stack([value.sum() for value in values[1:]]).sum()
            dist_autograd.backward(context, [loss])
            found = dist_autograd.get_gradients(context)[ours]
        value, sums = theirs, []
        for _, factor in route:
            value = torch.sin(value * factor)
            sums.append(value.sum())
        torch.stack(sums).sum().backward()
        if theirs.grad is None or not torch.allclose(found, theirs.grad, atol=_ROUNDING):
            raise AssertionError(f"the gradients of a pass over {route} differ by {(found - theirs.grad).abs().max()}")

    def once_more(self) -> None:
        """Run one pass undisturbed."""
        self.step()

    def let_go(self) -> None:
        """Hold nothing."""
