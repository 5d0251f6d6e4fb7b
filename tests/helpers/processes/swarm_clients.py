"""What a worker does with a swarm that another process serves."""

import torch

from helpers.models import swarm_models
from nbdist.swarm import connect, model_cache


def write(address, count, modes=("greedy",)):
    """So many texts, in turn in these ways."""
    model = connect(address).causal_lm()
    return [swarm_models.generate(model, modes[number % len(modes)]) for number in range(count)]


def session_ids(address):
    """The names of two sessions."""
    swarm = connect(address)
    caches = [model_cache.new_cache(swarm.checkpoint.config) for _ in range(2)]
    return [swarm.session(cache).id for cache in caches]


def blocks(address):
    return connect(address).blocks


def change(address):
    """Let workers come and go, in the middle of a text; what is served after each change."""
    swarm = connect(address)
    model, found = swarm.causal_lm(), [swarm.blocks]
    cache = model_cache.new_cache(swarm.checkpoint.config)
    ids = swarm_models.one()["input_ids"]
    changes = [lambda: swarm.join("worker3", 0, 3), lambda: swarm.move(1, 3, "worker3"), lambda: swarm.leave("worker0")]
    whole = model(ids, use_cache=False).logits[:, -1]
    with torch.no_grad():
        model(ids[:, :-3], past_key_values=cache)
        for number, act in enumerate(changes):
            act()
            found.append(swarm.blocks)
            at = ids.shape[1] - 3 + number
            last = model(ids[:, at : at + 1], past_key_values=cache).logits[:, -1]
    assert torch.allclose(last, whole, atol=1e-5)
    return found
