"""Blocks whose server has died are loaded elsewhere before anybody asks for them."""

import os
import signal
import threading

import pytest
import torch
from helpers.models import swarm_models
from helpers.waiting import wait_until

from nbdist.swarm import model_cache, serve
from nbdist.swarm.directory.entry import ServerEntry, orphans
from nbdist.swarm.server.neighbours import Address
from nbdist.testing import World
from nbdist.views import map as swarm_map

MODEL = swarm_models.make("llama")
ALL = list(range(6))


def entry(number, state="online", blocks=(), had=(), note=""):
    name = f"worker{number}"
    return ServerEntry(name, number, Address(name, f"server 1.{number}"), state, note, blocks, had)


@pytest.mark.parametrize(
    ("entries", "living", "expected"),
    [
        ([entry(0, blocks=(0, 1)), entry(1, "gone", had=(2, 3))], {}, [2, 3]),
        ([entry(0, blocks=(0, 1, 2)), entry(1, "gone", had=(2, 3))], {}, [3]),
        ([entry(0, blocks=(0, 1)), entry(1, "gone", had=(2,)), entry(2, "gone", had=(4,))], {}, [2, 4]),
        ([entry(0, blocks=(1,))], {}, []),  # nobody ever had block 0: whoever needs it asks
        ([entry(0, blocks=(0,)), entry(1, "joining", had=(2, 3))], {}, []),
        ([entry(0, blocks=(0,)), entry(1, "gone", had=(2, 3))], {"worker1": 1}, [2, 3]),  # it was given up, and lives
        ([entry(0, blocks=(0,)), entry(1, "gone", had=(2, 3))], {"worker1": 7}, []),  # it was restarted, and is back
        ([entry(0, blocks=(0,)), entry(1, "gone", had=(2, 3), note="was restarted, because it hung")], {}, []),
        ([entry(0, blocks=(0,)), entry(1, had=(2, 3), note="")], {"worker1": 7}, [2, 3]),  # it is back, with others
        ([entry(0, "draining", blocks=(0,)), entry(1, "gone", had=(2, 3))], {}, []),  # who leaves takes nothing
        ([entry(0, "offline", had=(0,)), entry(1, "offline", had=(2, 3))], {}, []),  # a swarm that was closed
    ],
)
def test_which_blocks_are_loaded_though_nobody_asks(entries, living, expected):
    assert orphans(entries, living) == expected


def held(swarm):
    return sorted(number for blocks in swarm.blocks.values() for number in blocks)


def loaded(swarm):
    """What is in the servers' memory."""
    return {worker: each.blocks for worker, each in swarm.info().items()}


def kill(swarm, three, *numbers):
    for number in numbers:
        os.kill(three.workers[number].pid, signal.SIGKILL)
    wait_until(lambda: [swarm.states[f"worker{number}"] for number in numbers], equals=["gone"] * len(numbers))


def takes(swarm):
    return [line for line in swarm.log if " takes " in line]


def test_the_next_token_does_not_pay_for_a_death(three):
    swarm = serve(MODEL, workers=[0, 1, 2])
    kill(swarm, three, 1)
    wait_until(lambda: takes(swarm))  # there is neither a session nor a call
    assert held(swarm) == ALL
    assert loaded(swarm) == swarm.blocks
    assert swarm.states == {"worker0": "online", "worker1": "gone", "worker2": "online"}
    told = len(swarm.log)
    assert torch.equal(swarm_models.generate(swarm.causal_lm(), "greedy"), swarm_models.generate(MODEL, "greedy"))
    assert swarm.log[told:] == []
    swarm.close()


def test_two_that_die_at_once_make_no_storm(three):
    swarm = serve(MODEL, workers=[0, 1, 2])
    kill(swarm, three, 0, 2)
    wait_until(lambda: held(swarm), equals=ALL)
    assert swarm.blocks == loaded(swarm) == {"worker1": ALL}
    assert len(takes(swarm)) <= 2  # each block was loaded once
    swarm.close()


def test_a_worker_that_is_restarted_gets_its_own_blocks_again(three):
    swarm = serve(MODEL, workers=[0, 1, 2])
    three.restart("1")
    swarm.crew.placing.repair()
    assert held(swarm) == [0, 1, 4, 5]
    swarm.join(1)
    assert held(swarm) == ALL
    kill(swarm, three, 0, 1, 2)
    wait_until(lambda: all(worker.lost for worker in three.workers))
    three.restart()
    for worker, blocks in ((1, [2, 3]), (0, [0, 1, 2, 3]), (2, ALL)):
        swarm.join(worker)
        swarm.crew.placing.repair()
        assert held(swarm) == blocks
    swarm.close()


def test_whoever_needs_the_blocks_of_a_worker_that_was_restarted_does_not_wait_for_it(three):
    swarm = serve(MODEL, workers=[0, 1])
    three.restart("1")
    assert torch.equal(swarm_models.generate(swarm.causal_lm(), "greedy"), swarm_models.generate(MODEL, "greedy"))
    assert swarm.blocks == {"worker0": ALL}
    swarm.close()


# -- in one process -------------------------------------------------------------------------------


@pytest.fixture
def world():
    with World(4) as world, world[0].activate():
        yield world


def say_gone(swarm, worker):
    swarm.crew.lose(swarm.crew.member(worker).incarnation, "it is said to be gone")


def test_what_nobody_has_room_for_stays_free_until_somebody_has(world):
    size = sum(tensor.nbytes for tensor in MODEL.model.layers[0].state_dict().values())
    swarm = serve(MODEL, workers=[1, 2], room=4 * size)
    say_gone(swarm, "worker2")
    text = "no server takes blocks 3-5: no server that is left has room for the weights of block 4"
    wait_until(lambda: text in "\n".join(swarm.log))
    assert swarm.blocks == loaded(swarm) == {"worker1": [0, 1, 2]}
    snapshot = swarm_map.snapshot_of(swarm)
    assert [(each.begin, each.end) for each in swarm_map.missing(snapshot)] == [(3, 6)]
    assert text in swarm_map.as_html(snapshot)
    swarm.join(3, 0, 1)
    wait_until(lambda: swarm.blocks, equals={"worker1": [0, 1, 2], "worker3": [0, 3, 4, 5]})
    swarm.close()


def test_a_server_that_cannot_load_them_is_not_the_last_to_be_asked(world, monkeypatch):
    swarm = serve(MODEL, workers=[1, 2, 3])
    load = type(world[1].named.find(swarm.crew.member("worker1").address.name)).load

    def small(server, begin, end):
        if server._agent.me.name == "worker1":
            raise MemoryError("no memory is left")
        return load(server, begin, end)

    monkeypatch.setattr("nbdist.swarm.server.server.Server.load", small)
    say_gone(swarm, "worker2")
    wait_until(lambda: swarm.blocks, equals={"worker1": [0, 1], "worker3": [2, 3, 4, 5]})
    assert "worker1 could not take blocks 2-3: MemoryError: no memory is left" in "\n".join(swarm.log)
    swarm.close()


@pytest.mark.parametrize("joined", [False, True])
def test_a_server_whose_caches_are_full_takes_nothing(world, joined):
    per_token = 2 * 2 * 8 * 4 * 3
    swarm = serve(MODEL, workers=[1, 2], cache_bytes=30 * per_token)
    remote, cache = swarm.causal_lm(), model_cache.new_cache(MODEL.config)
    remote.generate(**swarm_models.one(), past_key_values=cache, max_new_tokens=12, pad_token_id=0, eos_token_id=None)

    def write():
        with world[0].activate():
            swarm_models.generate(swarm.causal_lm(), "one")

    waiting = threading.Thread(target=write)
    waiting.start()
    wait_until(lambda: swarm.info()["worker1"].wanting, equals=1)
    if joined:
        swarm.join("worker3", 0, 3)
    world.kill(2)
    if joined:
        wait_until(lambda: swarm.blocks, equals={"worker1": [0, 1, 2], "worker3": ALL})
    else:
        wait_until(lambda: "sessions wait for cache memory on worker1" in "\n".join(swarm.log))
        assert swarm.blocks == {"worker1": [0, 1, 2]}
    del cache
    waiting.join(60)
    assert not waiting.is_alive()
    swarm.close()
