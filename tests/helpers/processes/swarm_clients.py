"""What a worker does with a swarm that another process serves."""

import contextlib
import os
import signal

import torch

from helpers.models import swarm_models
from helpers.processes import workers
from nbdist.rpc import api
from nbdist.swarm import connect, model_cache, serve
from nbdist.swarm.directory.placing import PlacerReplaced


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


def clients(address):
    """What is told here of all clients."""
    swarm = connect(address)
    try:
        return {each["name"]: each for each in swarm.snapshot()["clients"]}
    finally:
        swarm.close()


# -- who serves, and may be lost ------------------------------------------------------------------


def serve_here(names):
    """Serve, and keep the swarm and its placer; where it is, and the folder of its weights."""
    swarm = serve(swarm_models.make("llama"), workers=names)
    workers.kept[:] = swarm, swarm.crew.placing
    return swarm.address(), str(swarm.checkpoint.folder)


def move_and_die(begin, end, worker):
    """The placer of this process loads blocks elsewhere, and is killed before it has told so."""
    swarm, placer = workers.kept
    placer._directory.change_all = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    swarm.move(begin, end, worker)


def die_at(method):
    """Let the placer of this process be killed when it is called so."""
    setattr(workers.kept[1], method, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def give_old_orders(worker):
    """What becomes of orders of the placer that was here; and which blocks its swarm knows by then."""
    swarm, placer = workers.kept
    found = []
    for order in (
        lambda: placer.shift(0, 6, worker),
        lambda: placer.join("client", 0, 1),
        lambda: placer._answer(swarm.crew.member(worker), "unload", []),
        lambda: placer._answer(swarm.crew.member(worker), "close"),
    ):
        try:
            found.append(order())
        except PlacerReplaced as error:
            found.append(type(error).__name__)
    return found, swarm.blocks


def move(*where):
    """By the swarm that this process has served."""
    workers.kept[0].move(*where)


def servers():
    """The servers of this process, with the blocks in their memory."""
    return {name: server.info().blocks for name, server in swarm_models.servers_here().items()}


def open_sessions():
    """On a worker: the names of all sessions on its servers."""
    return sorted({id for server in swarm_models.servers_here().values() for id, _ in list(server._sessions)})


def members():
    """The members of the world, as this one knows them."""
    return sorted((each.name, each.incarnation) for each in api.current_agent().members())


def withdraw(name):
    """On a worker: let nobody call an object any more."""
    api.current_agent().named.withdraw(name)


# -- in a `World` ---------------------------------------------------------------------------------


@contextlib.contextmanager
def another(world, address):
    """The swarm as worker3 uses it."""
    with world[3].activate():
        other = connect(address)
    yield other
    with world[3].activate():
        other.close()
