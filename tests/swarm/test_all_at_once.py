"""Two clients, a stream over HTTP and somebody who moves blocks, while workers are killed: all texts are right."""

import contextlib
import os
import random
import signal
import threading
import time

import openai
import pytest
import torch
from helpers.models import swarm_models, tiny_tokenizer
from helpers.processes import swarm_clients

import nbdist
from nbdist.errors import NbdistError
from nbdist.rpc import api
from nbdist.swarm import serve

MODES = ("greedy", "beams", "sampling")
SERVING = ("worker0", "worker1", "worker2")  # worker3 is a client
AT_MOST = 1.5  # seconds between two deaths; a worker that comes back takes longer


class Killer:
    """Moves blocks and kills workers, at moments drawn by a seed, and lets them come back."""

    def __init__(self, cluster, swarm, seed):
        self.cluster, self.swarm, self.draw = cluster, swarm, random.Random(seed)
        self.begun = threading.Event()  # a text of this process
        self.over = threading.Event()
        self.kills = dict.fromkeys((self.prefill, self.step, self.move, self.repair), 0)

    def run(self):
        """Until the texts are written, and everything has happened."""
        while not self.over.is_set() or not all(self.kills.values()):
            how = min(self.kills, key=lambda each: (self.kills[each], self.draw.random()))
            dead = [victim for victim in how() if self.cluster.workers[int(victim[-1])].ended.wait(20)]
            self.kills[how] += len(dead)
            for victim in dead:
                self.cluster.restart(victim[-1])
                self.swarm.join(victim)

    def kill(self, victim, within):
        time.sleep(self.draw.uniform(0, within))
        os.kill(self.cluster.workers[int(victim[-1])].pid, signal.SIGKILL)

    def prefill(self):
        self.begun.clear()
        self.begun.wait(2)
        (victim,) = self.draw.sample(SERVING, 1)
        self.kill(victim, 0.01)
        return [victim]

    def step(self):
        (victim,) = self.draw.sample(SERVING, 1)
        self.kill(victim, AT_MOST)
        return [victim]

    def move(self):
        victim, to = self.draw.sample(SERVING, 2)
        begin, end = sorted(self.draw.sample(range(swarm_models.BLOCKS + 1), 2))
        if self.draw.random() < 0.5:
            victim = to
        killing = threading.Thread(target=self.kill, args=(victim, 0.03))
        killing.start()
        with contextlib.suppress(NbdistError):  # says that the worker died: nothing has moved
            self.swarm.move(begin, end, to)
        killing.join()
        return [victim]

    def repair(self):
        victims = self.draw.sample(SERVING, 2)
        self.kill(victims[0], 0.1)
        self.kill(victims[1], 0.05)
        return victims


@pytest.fixture
def cluster():
    with nbdist.Cluster(4, backend="none", preload=["nbdist.swarm"]) as cluster:
        yield cluster


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("texts", "seed"), [(24, 0), *[pytest.param(200, seed, marks=pytest.mark.soak) for seed in (1, 2, 3)]]
)
def test_two_clients_a_stream_and_a_mover_under_kills(cluster, texts, seed):
    model = tiny_tokenizer.model(2000)
    expected = {mode: swarm_models.generate(model, mode) for mode in MODES}
    swarm = serve(model, workers=[0, 1, 2], route_timeout=60.0)
    endpoint = swarm.http(tokenizer=tiny_tokenizer.make(), name="tiny")
    killer, wrong, streams = Killer(cluster, swarm, seed), [], []

    def stream():
        client = openai.OpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0)
        while not killer.over.is_set() or not streams:
            asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 40, "temperature": 0}
            chunks = client.completions.create(**asked, stream=True)
            streams.append("".join(chunk.choices[0].text for chunk in chunks))

    far = api.rpc_async("worker3", swarm_clients.write, args=(swarm.address(), texts // 2, MODES), timeout=1500)
    threads = [threading.Thread(target=each) for each in (killer.run, stream)]
    for each in threads:
        each.start()
    try:
        remote = swarm.causal_lm()
        for number in range(texts // 2):
            mode = MODES[number % len(MODES)]
            killer.begun.set()
            if not torch.equal(swarm_models.generate(remote, mode), expected[mode]):
                wrong.append((number, mode))
        found = far.wait()
    finally:
        killer.over.set()
        for each in threads:
            each.join()
    assert wrong == []
    assert len(found) == texts // 2
    for number, text in enumerate(found):
        assert torch.equal(text, expected[MODES[number % len(MODES)]]), number
    assert set(streams) == {alone(model)}
    assert all(killer.kills.values())
    endpoint.close()
    swarm.close()


def alone(model):
    """The text of the stream, by the model in one process."""
    tokenizer = tiny_tokenizer.make()
    inputs = tokenizer("Hello", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=40, do_sample=False, pad_token_id=0)
    return tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
