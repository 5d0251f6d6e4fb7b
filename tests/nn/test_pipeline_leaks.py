"""A step that failed keeps neither the pipeline at the driver nor the stages on the workers (G4)."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import pytest
import torch
from helpers.processes import workers
from helpers.waiting import wait_until

from nbdist import autograd as dist_autograd
from nbdist.nn import Pipeline
from nbdist.nn.pipeline_part import PipelinePart
from nbdist.testing import World


class Fails(torch.nn.Module):
    """Fails for large inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 10:
            raise ValueError("too large")
        return x * 1


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def known(cls: type) -> int:
    """Count the objects of a class that the collector knows; weak references to what it must keep are cleared."""
    gc.collect()
    return sum(type(each) is cls for each in gc.get_objects())


def stage_raises(world: World, pipe: Pipeline) -> None:
    with dist_autograd.context(), contextlib.suppress(ValueError):
        pipe.train_step(torch.full((4, 2), 11.0), torch.zeros(4, 2), squares)


def forward_raises(world: World, pipe: Pipeline) -> None:
    with contextlib.suppress(ValueError):
        pipe(torch.full((4, 2), 11.0))


def loss_cannot_be_sent(world: World, pipe: Pipeline) -> None:
    unsendable = workers.Unpicklable()
    with dist_autograd.context(), contextlib.suppress(RuntimeError):
        pipe.train_step(torch.ones(4, 2), torch.zeros(4, 2), lambda output, target: unsendable)


def worker_dies(world: World, pipe: Pipeline) -> None:
    world.kill(1)
    for _ in range(2):
        with dist_autograd.context(), contextlib.suppress(RuntimeError):
            pipe.train_step(torch.ones(4, 2), torch.zeros(4, 2), squares)


@pytest.mark.parametrize("fail", [stage_raises, forward_raises, loss_cannot_be_sent, worker_dies])
def test_a_failed_step_keeps_neither_the_pipeline_nor_its_stages(fail: Callable[[World, Pipeline], None]) -> None:
    with World(4) as world, world[3].activate():
        before = known(Pipeline), known(PipelinePart)

        def use() -> None:
            modules = [torch.nn.Linear(2, 2), Fails(), torch.nn.Linear(2, 2)]
            pipe = Pipeline([modules[1], modules[0], modules[2]], ["worker0", "worker1", "worker2"])
            fail(world, pipe)

        use()
        lost = fail is worker_dies  # what a dead worker had is gone with its process, which a World has not
        wait_until(lambda: known(Pipeline) <= before[0])
        wait_until(lambda: known(PipelinePart) <= before[1] + lost)
