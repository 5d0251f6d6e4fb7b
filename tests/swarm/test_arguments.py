"""What a user may do wrong with a swarm, or with what is made from it: each error says what, and what to do."""

import copy
import io
import pickle

import pytest
import torch
import transformers
from helpers.models import swarm_models

from nbdist import rpc
from nbdist.errors import EncodeError, UsageError
from nbdist.nn import Pipeline
from nbdist.swarm import serve
from nbdist.testing import World


@pytest.fixture(scope="module")
def world():
    with World(4) as world, world[0].activate():
        yield world


@pytest.fixture
def swarm(world):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2], spans=[(0, 4), (4, 6)])
    yield swarm
    swarm.close()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"replicas": 1.5},
            TypeError,
            r"serve\(\) has no argument 'replicas'; as options it takes cache_bytes, largest,",
        ),
        ({"workers": 2}, UsageError, r"workers is a list of names or ids, such as \[0, 1\], not 2"),
        ({"workers": "worker1"}, UsageError, r"such as \[0, 1\], not 'worker1'"),
        ({"chunk": 0}, UsageError, "chunk must be a whole number of at least 1, or None, not 0"),
        ({"micro_batch": 1.5}, UsageError, "micro_batch must be a whole number of at least 1, or None, not 1.5"),
        ({"largest": "many"}, UsageError, "largest must be a whole number of at least 1, or None, not 'many'"),
        ({"room": "much"}, UsageError, "room must be a number of at least 0, or None, not 'much'"),
        ({"cache_bytes": -1}, UsageError, "cache_bytes must be a number of at least 0, or None, not -1"),
        ({"spend": 3}, UsageError, "spend must be a function, not 3"),
        ({"prioritize": None}, UsageError, "prioritize must be a function, not None"),
        ({"workers": ["worker1", 1]}, UsageError, "each worker serves one span, .*: worker1, worker1"),
        ({"spans": [(0, 1.5)]}, UsageError, "there are no blocks from 0 to 1.5"),
    ],
)
def test_arguments_of_serve(world, options, error, text):
    with pytest.raises(error, match=text):
        serve(swarm_models.make("llama"), **{"workers": [1, 2], **options})


@pytest.mark.parametrize(
    "what", [lambda swarm: swarm, lambda swarm: swarm.causal_lm(), lambda swarm: swarm.sequential()[1:3]]
)
def test_a_swarm_stays_where_it_is(swarm, what):
    value, told = what(swarm), "a swarm and its models stay in their process: they cannot be sent"
    with pytest.raises(EncodeError, match=told):
        rpc.rpc_sync("worker1", str, args=(value,))
    for keep in (lambda: torch.save(value, io.BytesIO()), lambda: pickle.dumps(value), lambda: copy.deepcopy(value)):
        with pytest.raises(EncodeError, match=told):
            keep()


def test_a_pipeline_stays_where_it_is(world):
    pipe = Pipeline([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], ["worker1", "worker2"])
    told = "a pipeline stays in the process that made it: it cannot be sent, copied or saved. Save its state"
    with pytest.raises(EncodeError, match=told):
        rpc.rpc_sync("worker1", str, args=(pipe,))
    with pytest.raises(EncodeError, match=told):
        torch.save(pipe, io.BytesIO())
    file = io.BytesIO()
    torch.save(pipe.state_dict(), file)  # as the error says
    file.seek(0)
    pipe.load_state_dict(torch.load(file))


def test_a_session_and_a_classifier_check_their_arguments(swarm):
    for begin, end in ((3, 1), (0, 7), (-1, None)):
        with pytest.raises(UsageError, match=f"there are no blocks from {begin} to"):
            swarm.session(transformers.DynamicCache(), begin, end)
    with pytest.raises(UsageError, match="num_labels must be a whole number of at least 1, or None, not 0"):
        swarm.sequence_classifier(0)


def test_a_move_with_the_worker_in_front_blames_the_blocks(swarm):
    with pytest.raises(
        UsageError, match=r"no blocks from 1 to 0: .* `move` takes the blocks first, and then the worker"
    ):
        swarm.move(1, 0, 15)
    with pytest.raises(UsageError, match=r"no blocks from worker1 to 0: .* and then the worker"):
        swarm.move("worker1", 0, 1)
    with pytest.raises(UsageError, match="15 serves no blocks"):
        swarm.move(0, 1, 15)


def test_a_worker_that_joins_again_serves_what_it_served(swarm):
    swarm.move(1, 2, "worker2")
    assert swarm.blocks == {"worker1": [0, 2, 3], "worker2": [1, 4, 5]}
    swarm.leave("worker2")
    swarm.join("worker2")
    assert swarm.blocks == {"worker1": [0, 1, 2, 3, 4, 5], "worker2": [1, 4, 5]}
    swarm.crew.lose(swarm.crew.member("worker2").incarnation, "it is said to be gone")
    swarm.join("worker2", 0, 1)  # what is said counts
    assert swarm.blocks["worker2"] == [0]
    swarm.leave(2)
    swarm.join(2)
    assert swarm.blocks["worker2"] == [0]
    swarm.join("worker3")  # all, as it is new
    assert swarm.blocks["worker3"] == [0, 1, 2, 3, 4, 5]


def test_rpc_is_available():
    assert rpc.is_available() is True
