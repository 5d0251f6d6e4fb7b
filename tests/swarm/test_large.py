"""Inputs and results that are large messages: the same to the last bit, and with time to travel."""

import pytest
import torch
from helpers.models import swarm_models

from nbdist.rpc import links
from nbdist.swarm import serve
from nbdist.swarm.carriage import carriage
from nbdist.testing import World
from nbdist.wire.peer import Peer


@pytest.fixture
def world():
    with World(4) as world, world[0].activate():
        yield world


@pytest.fixture
def large(monkeypatch):
    """Have messages of 600 bytes or more be large, as some of the tiny models are; return those that are sent."""
    monkeypatch.setattr(links, "LARGE_BYTES", 600)
    send, sent = Peer.send, []

    def noted(peer, message, *args, **kwargs):
        if peer.is_large:
            sent.append(message)
        return send(peer, message, *args, **kwargs)

    monkeypatch.setattr(Peer, "send", noted)
    return sent


def test_a_slow_connection_has_time_for_large_tensors():
    assert carriage() == carriage("word", None, torch.ones(1000)) == 0
    assert carriage(torch.zeros(5_000_000, dtype=torch.uint8)) == 10
    assert carriage(torch.zeros(3_000_000, dtype=torch.uint8), None, torch.zeros(500_000)) == 10


@pytest.mark.parametrize("recover", ["exact", "fast"])
@pytest.mark.parametrize("mode", ["greedy", "beams", "prompt lookup"])
def test_texts(world, large, mode, recover):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2])
    remote = swarm.causal_lm(recover=recover)

    def lose(ids, scores, **_):
        if ids.shape[1] == 13:
            world.kill(2)  # whose history, a large message, is taken again
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    found = swarm_models.generate(remote, mode, stopping_criteria=[lose])
    assert torch.equal(found, swarm_models.generate(model, mode))
    assert swarm.states["worker2"] == "gone"
    assert swarm.states["worker1"] == "online"
    assert large
    swarm.close()


def test_gradients(world, large):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2])
    assert torch.equal(*swarm_models.gradients((model, swarm.causal_lm())))
    assert large
    swarm.close()
