"""The workload of a cluster that serves a language model."""

from __future__ import annotations

import itertools
import os
import random
import time

import torch
from helpers.models import swarm_models

import nbdist
from chaos import recorder
from chaos.ledger import Answered, Sent
from nbdist import Cluster
from nbdist.swarm import serve

LIMIT = 60.0
_TOKENS = 12


class Swarms:
    """Texts, each compared with the same text out of one process."""

    EXPECTED = (nbdist.NbdistError,)

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        self._cluster = cluster
        self._dice = dice
        self._numbers = itertools.count()
        self._model = swarm_models.make("llama")
        self._expected = {
            mode: swarm_models.generate(self._model, mode, tokens=_TOKENS) for mode in ("greedy", "beams")
        }
        self._serve()

    def _serve(self) -> None:
        self._swarm = serve(self._model, workers=list(range(len(self._cluster.names))), step_timeout=10.0)
        self._remote = self._swarm.causal_lm()

    def step(self) -> None:
        """Generate a text. The swarm goes on without the dead; whoever died is replaced afterwards."""
        mode = self._dice.choice(sorted(self._expected))
        call = f"driver/{os.getpid()}/{next(self._numbers)}"
        recorder.write(Sent(call, "driver", os.getpid(), "", mode, LIMIT, time.monotonic()))
        try:
            found = swarm_models.generate(self._remote, mode, tokens=_TOKENS)
        except BaseException as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            recorder.write(Answered(call, None, text, False, time.monotonic()))
            raise
        recorder.write(Answered(call, "done", None, False, time.monotonic()))
        if not torch.equal(found, self._expected[mode]):
            raise AssertionError(f"a text by {mode} came out different")
        if any(worker.lost for worker in self._cluster.workers):
            raise nbdist.WorkerLost("the text is right, and somebody has died")

    def heal(self) -> None:
        """Replace the dead, and let them serve again; without anybody left, serve anew."""
        dead = [worker.rank for worker in self._cluster.workers if worker.lost]
        if dead:
            self._cluster.restart()
        if len(dead) == len(self._cluster.workers):
            self._swarm.close()
            self._serve()
            return
        serving = set(self._swarm.blocks)
        for worker in self._cluster.workers:
            if worker.name not in serving:
                self._swarm.join(worker.rank)

    def let_go(self) -> None:
        """End the swarm."""
        self._swarm.close()
