"""The workload of a cluster that trains a pipeline."""

from __future__ import annotations

import copy
import itertools
import os
import random
import time

import torch
from torch import nn

import nbdist
from chaos import recorder, tasks
from chaos.ledger import Answered, Sent
from nbdist import Cluster, rpc
from nbdist import autograd as dist_autograd
from nbdist.nn import Pipeline, Reference

LIMIT = 30.0
_WIDTH = 16


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


class Pipelines:
    """Training steps, each compared with the same step in one process."""

    EXPECTED = (nbdist.NbdistError,)

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        torch.manual_seed(0)
        self._stages = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in cluster.names]
        self._cluster = cluster
        self._dice = dice
        self._numbers = itertools.count()
        self._pipe: Pipeline | None = None

    def step(self) -> None:
        """Train one step, and compare its loss and gradients."""
        if self._pipe is None:
            self._pipe = Pipeline(copy.deepcopy(self._stages), self._cluster.names, micro_batches=2)
        rows = self._dice.choice((4, 4096))  # large ones go by shared memory
        x, y = torch.randn(rows, _WIDTH), torch.randn(rows, _WIDTH)
        call = f"driver/{os.getpid()}/{next(self._numbers)}"
        recorder.write(Sent(call, "driver", os.getpid(), "", "step", LIMIT, time.monotonic()))
        try:
            with dist_autograd.context() as context_id:
                found = self._pipe.train_step(x, y, _loss)
                gradients = self._gradients(context_id)
        except BaseException as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            recorder.write(Answered(call, None, text, False, time.monotonic()))
            raise
        recorder.write(Answered(call, "done", None, False, time.monotonic()))
        reference = Reference(copy.deepcopy(self._stages), micro_batches=2)
        expected = reference.train_step(x, y, _loss)
        theirs = [parameter.grad for stage in reference.stages for parameter in stage.parameters]
        if float(found) != float(expected):
            raise AssertionError(f"the loss of a step is {found}, not {expected}")
        if not all(map(torch.equal, gradients, theirs)):
            raise AssertionError("the gradients of a step differ from those of one process")

    def _gradients(self, context_id: int) -> list[torch.Tensor]:
        assert self._pipe is not None
        found = []
        for rref in self._pipe.parameter_rrefs():
            found += rpc.rpc_sync(rref.owner(), tasks.gradients, args=(context_id, [rref]))
        return found

    def heal(self) -> None:
        """Replace the dead, and make the pipeline anew."""
        self.let_go()
        if any(worker.lost for worker in self._cluster.workers):
            self._cluster.restart()

    def let_go(self) -> None:
        """Drop the pipeline."""
        self._pipe = None
