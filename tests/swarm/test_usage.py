"""Who uses a swarm: each client's sessions, tokens a second and caches, as every client's map shows them."""

import os
import subprocess
import sys

import openai
import pytest
import torch
from helpers.models import swarm_models, tiny_tokenizer
from helpers.processes import swarm_clients
from helpers.suite.python_path import TESTS, python_path
from helpers.waiting import wait_until

from nbdist.rpc import api
from nbdist.swarm import connect, model_cache, serve
from nbdist.testing import World
from nbdist.views.map import as_html, snapshot_of

_PROGRAM = """
import sys, time
from helpers.models import swarm_models
from nbdist.swarm import connect, model_cache

model = connect(sys.argv[1]).causal_lm()
caches = [model_cache.new_cache(model.config) for _ in range(2)]
swarm_models.generate(model, "one", past_key_values=caches[0])
class Slowly:
    def put(self, tokens): time.sleep(0.02)
    def end(self): pass
print("it writes", flush=True)
swarm_models.generate(model, "one", tokens=100, past_key_values=caches[1], streamer=Slowly())
print("it has written", flush=True)
sys.stdin.readline()
caches.clear()
sys.stdin.readline()
"""


@pytest.fixture
def swarm(three):
    swarm = serve(swarm_models.make("llama"), workers=[0, 1, 2])
    yield swarm
    swarm.close()


@pytest.fixture
def program(swarm):
    """A client in a process of its own, with two caches."""
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    environment = {**os.environ, **python_path(TESTS)}
    program = subprocess.Popen([sys.executable, "-c", _PROGRAM, swarm.address()], text=True, env=environment, **pipes)
    yield program
    program.kill()
    program.communicate()


def clients(swarm):
    return {each["name"]: each for each in swarm.snapshot()["clients"]}


def test_another_program_that_writes_and_keeps_caches(swarm, program):
    name = f"client{program.pid}"
    assert program.stdout.readline()
    rate = wait_until(lambda: clients(swarm).get(name, {}).get("rate"))
    assert 0 < rate < 1000
    live = "\n".join(snapshot_of(swarm)["users"])
    assert f"used by {name}: " in live
    assert "tokens/s" in live
    assert program.stdout.readline() == "it has written\n"
    reserved = sum(info.cache for info in swarm.info().values())  # nobody else has caches
    wait_until(lambda: (each := clients(swarm)[name])["cache"] == reserved and not each["rate"])
    assert clients(swarm)[name]["sessions"] == 2
    assert clients(swarm) == api.rpc_sync("worker2", swarm_clients.clients, (swarm.address(),))  # all see the same
    saved = as_html(snapshot_of(swarm), lasting=True)
    assert "used by another program: 2 sessions<" in saved
    assert str(program.pid) not in saved
    program.stdin.write("drop them\n"), program.stdin.flush()
    wait_until(lambda: not clients(swarm))


def test_a_program_that_is_killed_uses_nothing(swarm, program):
    assert program.stdout.readline()
    wait_until(lambda: clients(swarm))
    program.kill()
    wait_until(lambda: not clients(swarm))
    assert not swarm.crew.usage


def test_texts_over_http(three):
    swarm = serve(tiny_tokenizer.model(2000), workers=[0, 1])
    endpoint = swarm.http(tokenizer=tiny_tokenizer.make(), name="tiny", at_once=1)
    client = openai.OpenAI(base_url=endpoint.url, api_key=endpoint.key)
    stream = client.completions.create(model="tiny", prompt="x", max_tokens=1900, n=3, stream=True)
    next(iter(stream))
    own = clients(swarm)["notebook"]
    assert (own["sessions"], own["texts"]) == (1, [1, 2])
    assert snapshot_of(swarm)["users"][0].endswith("over HTTP 1 text, and 2 wait")
    wait_until(
        lambda: api.rpc_sync("worker2", swarm_clients.clients, (swarm.address(),))["notebook"]["texts"] == [1, 2]
    )
    stream.close()
    wait_until(lambda: not clients(swarm))
    wait_until(lambda: not api.rpc_sync("worker2", swarm_clients.clients, (swarm.address(),)))
    endpoint.close()
    swarm.close()


@torch.no_grad()
def test_the_own_use_is_known_at_once_and_told_only_when_it_changes(monkeypatch):
    monkeypatch.setattr("nbdist.swarm.client.sessions._TELLING_SECONDS", 0.05)
    with World(3) as world, world[0].activate():
        swarm = serve(swarm_models.make("llama"), workers=[1])
        with world[2].activate():
            other = connect(swarm.address())
        remote = swarm.causal_lm()
        cache = model_cache.new_cache(remote.config)
        remote(swarm_models.batch()["input_ids"], past_key_values=cache)
        (own,) = swarm.snapshot()["clients"]
        assert own == {**own, "name": "worker0", "sessions": 1, "rate": 0.0, "cache": 2 * 9 * 2 * 2 * 8 * 4 * 6}
        remote(swarm_models.batch()["input_ids"][:, :1], past_key_values=cache)
        assert swarm.snapshot()["clients"][0]["rate"] == 1.0  # a token of two sequences, within two seconds
        wait_until(lambda: other.snapshot()["clients"] == swarm.snapshot()["clients"])
        wait_until(lambda: swarm.snapshot()["clients"][0]["rate"] == 0.0)
        wait_until(lambda: other.snapshot()["clients"] == swarm.snapshot()["clients"])
        version = swarm._placer.news().changes
        told = []
        forget = other.listen(lambda: told.append(other.snapshot()))
        wait_until(lambda: threads_have_looked(swarm))
        assert (swarm._placer.news().changes, told) == (version, [])
        forget()
        del cache
        assert not swarm.snapshot()["clients"]
        wait_until(lambda: not other.snapshot()["clients"])
        other.close()
        swarm.close()
        assert swarm.snapshot()["clients"] == []


def threads_have_looked(swarm):
    """The thread that tells the directory has looked again."""
    looks, usage = [], swarm.sessions.usage
    swarm.sessions.usage = lambda: looks.append(1) or usage()
    wait_until(lambda: len(looks) >= 2)
    del swarm.sessions.usage
    return True
