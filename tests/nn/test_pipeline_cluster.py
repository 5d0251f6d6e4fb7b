"""Pipelines over real workers: a language model trained as in one process, and workers that die in the midst of it."""

import copy
import os
import random
import signal
import threading
import time

import pytest
import torch
from helpers.models.pipeline_models import Slow, gpt, inboxes, memory, next_token, square
from helpers.waiting import wait_until

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.nn import Pipeline, Reference, cut
from nbdist.optim import DistributedLRScheduler, DistributedOptimizer, clip_grad_norm_


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.soak)])
def test_a_worker_dies_in_a_step_and_the_training_goes_on_with_another(kills):
    moments = random.Random(kills)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    outcomes, said = {"ended": 0, "lost": 0}, []
    with nbdist.Cluster(3, backend="none") as cluster:
        pipe, state = None, None
        for _ in range(kills):
            if pipe is None:
                pipe = Pipeline([Slow(), Slow(), Slow()], cluster.names)
                if state is not None:
                    pipe.load_state_dict(state)
                optimizer = DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.1)
            with dist_autograd.context() as context_id:
                before = pipe.train_step(x, y, square)
                optimizer.step(context_id)
            state = pipe.state_dict()
            victim = moments.choice(cluster.names)
            pid = next(worker.pid for worker in cluster.workers if worker.name == victim)
            killer = threading.Timer(moments.random() * 0.15, os.kill, (pid, signal.SIGKILL))
            with dist_autograd.context() as context_id:
                killer.start()
                try:
                    after = pipe.train_step(x, y, square)
                    assert after < before
                    outcomes["ended"] += 1
                except nbdist.WorkerLost as error:
                    said.append((victim, str(error)))
                    outcomes["lost"] += 1
            killer.join()
            for survivor in set(cluster.names) - {victim}:
                wait_until(lambda survivor=survivor: rpc.rpc_sync(survivor, inboxes) == 0)
            pipe = None
            assert cluster.restart(victim) == [victim]
    assert all(victim in text for victim, text in said), said
    assert outcomes["lost"] > kills // 4, outcomes


@pytest.mark.timeout(600)
@pytest.mark.soak  # tests/nn/test_pipeline.py compares the same numbers, with workers in threads
@pytest.mark.parametrize("steps", [6, 50])
def test_a_language_model_is_trained_as_in_one_process(steps, monkeypatch):
    # Or the library keeps some megabytes for each thread that has ever multiplied matrices, and a step may run in any.
    monkeypatch.setenv("MKL_DISABLE_FAST_MM", "1")
    model = gpt()
    assert 9e6 < sum(parameter.numel() for parameter in model.parameters()) < 12e6
    stages = cut(model, 3, balance="size")
    options = {"micro_batches": 4, "seed": 5}
    reference = Reference(copy.deepcopy(stages), **options)
    alone = [parameter for stage in reference.stages for parameter in stage.parameters]
    theirs = torch.optim.AdamW(alone, lr=1e-3)
    their_rate = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, 50)
    generator = torch.Generator().manual_seed(1)
    with nbdist.Cluster(3, backend="none") as cluster:
        pipe = Pipeline(stages, cluster.names, **options)
        parameters = pipe.parameter_rrefs()
        ours = DistributedOptimizer(torch.optim.AdamW, parameters, lr=1e-3)
        our_rate = DistributedLRScheduler(torch.optim.lr_scheduler.CosineAnnealingLR, ours, 50)
        used = []
        for step in range(steps):
            tokens = torch.randint(4096, (8, 17), generator=generator)
            x, y = tokens[:, :-1], tokens[:, 1:]
            with dist_autograd.context() as context_id:
                loss = pipe.train_step(x, y, next_token)
                norm = clip_grad_norm_(context_id, parameters, 1.0)
                ours.step(context_id)
            our_rate.step()
            theirs.zero_grad()
            assert torch.equal(loss, reference.train_step(x, y, next_token))
            # The norm is that of all parameters in one order, wherever they are.
            expected = torch.nn.utils.get_total_norm([parameter.grad for parameter in alone], foreach=False)
            assert torch.equal(norm, expected), (norm, expected)
            torch.nn.utils.clip_grads_with_norm_(alone, 1.0, expected, foreach=False)
            theirs.step()
            their_rate.step()
            if step % 5 == 4:
                used.append(sum(rpc.rpc_sync(name, memory) for name in cluster.names))
        found = pipe.state_dict()["model"]
        expected = dict(zip(found, alone, strict=True))
        for name, value in found.items():
            assert torch.equal(value, expected[name]), (name, (value - expected[name]).abs().max())
        assert max(used) - used[0] < 8 << 20, used


@pytest.mark.timeout(120)
def test_ctrl_c_ends_a_step_and_the_stages_code_and_the_next_one_works():
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    with nbdist.Cluster(2, backend="none") as cluster:
        endless = Pipeline([Slow(seconds=1000), Slow()], cluster.names)
        brief = Pipeline([Slow(), Slow()], cluster.names)
        with dist_autograd.context():
            loss = brief.train_step(x, y, square)
            killer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
            killer.start()
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                endless.train_step(x, y, square)
            killer.join()
            assert time.monotonic() - began < 60  # not 1000
            assert torch.equal(brief.train_step(x, y, square), loss)
        for name in cluster.names:
            wait_until(lambda name=name: rpc.rpc_sync(name, inboxes) == 0)
