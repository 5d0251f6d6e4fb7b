"""Tensors that arrive begin at multiples of 64 bytes, as torch's own do: vectorised arithmetic depends on it."""

import contextlib

import pytest
import torch
from helpers.processes import workers
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist import rpc
from nbdist.testing import World

WAYS = {
    "frames": ("local", {"arena_bytes": 0}),
    "zeromq": ("zeromq", {"arena_bytes": 0}),
    "arena": ("local", {"arena_threshold": 1}),
    "arena for large ones": ("zeromq", {}),
}
# Elements: some share a frame, some have a frame of their own (from 256 KiB on), some are large for the arena.
SIZES = st.sampled_from([0, 1, 3, 16, 17, 1000, 16_385, 70_000, 300_001])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
TENSORS = st.tuples(SIZES, DTYPES, st.integers(0, 65), st.sampled_from(["alone", "with all before it", "turned"]))


@pytest.fixture(scope="module")
def worlds():
    """The world of each way, made when it is first asked for."""
    with contextlib.ExitStack() as ends:
        made = {}

        def world(way):
            if way not in made:
                channel, options = WAYS[way]
                made[way] = ends.enter_context(World(2, channel=channel, options=rpc.RpcBackendOptions(**options)))
            return made[way]

        yield world


def sent(described):
    """Tensors, and where they must begin: at 0, unless they share a storage, in which they keep their places."""
    tensors, places, base = [], [], torch.randint(0, 2, (2_500_000,), dtype=torch.uint8)
    users = sum(how == "with all before it" for *_, how in described)
    for size, dtype, start, how in described:
        if how == "with all before it":
            tensor = base.view(dtype)[start : start + size]
            places.append(tensor.data_ptr() % 64 if users > 1 and size else 0)
        else:
            tensor = torch.randint(0, 2, (size + start,)).to(dtype)[start:]
            tensor = torch.stack([tensor, tensor]).t() if how == "turned" else tensor
            places.append(0)
        tensors.append(tensor)
    return tensors, places


@pytest.mark.parametrize("way", list(WAYS))
@given(st.lists(TENSORS, min_size=1, max_size=6))
@settings(max_examples=60)
def test_all_tensors_arrive_aligned_there_and_back(worlds, way, described):
    world = worlds(way)
    tensors, places = sent(described)
    with world[0].activate():
        there, back = rpc.rpc_sync("worker1", workers.begins, args=(tensors,))
    assert there == places
    assert workers.begins(back)[0] == places
    assert all(torch.equal(one, other) for one, other in zip(tensors, back, strict=True))


@pytest.mark.parametrize("way", list(WAYS))
def test_they_take_the_way_that_is_tested(worlds, way):
    world = worlds(way)
    with world[0].activate():
        _, back = rpc.rpc_sync("worker1", workers.begins, args=([torch.zeros(1_000_000)],))
    assert bool(world[1].statistics().get("arena_blocks_out")) == way.startswith("arena"), back
