"""What is too large for one message: in pieces, whichever way it goes, and the same to the last bit."""

import gc
import weakref

import pytest
import swarm_models
import torch
import workers

from nbdist import rpc
from nbdist.errors import RpcTimeout, WorkerLost
from nbdist.rpc import api
from nbdist.swarm import in_pieces, serve
from nbdist.swarm.client.routing import NoRoute
from nbdist.swarm.in_pieces import Left, fetch, leave, pieces
from nbdist.testing import World


@pytest.fixture
def world():
    with World(4) as world, world[0].activate():
        yield world


@pytest.fixture
def small(monkeypatch):
    """Pieces of 600 bytes, which are less than five tokens of the tiny models; the sizes of those that are fetched."""
    monkeypatch.setattr(in_pieces, "_PIECE_BYTES", 600)
    enter, fetched = in_pieces._put_in_place, []

    def noted(place, piece):
        fetched.append(place.nbytes)
        enter(place, piece)

    monkeypatch.setattr(in_pieces, "_put_in_place", noted)
    return fetched


def left(count, dtype=torch.float32):
    """What another worker has left."""
    return leave(torch.arange(count, dtype=dtype).reshape(2, -1))


def test_what_is_pushed_goes_in_pieces_of_some_tokens():
    hidden = torch.zeros(2, 3000, 1024)
    found = pieces(hidden)
    assert len(found) > 1
    assert max(piece.nbytes for _, piece in found) <= 4 << 20
    assert [at for at, _ in found] == [sum(p.shape[1] for _, p in found[:n]) for n in range(len(found))]
    assert torch.equal(torch.cat([piece for _, piece in found], 1), hidden)
    assert pieces(hidden[:, :3])[0][0] == 0


def test_what_is_small_is_sent_as_it_is(world):
    value = torch.ones(3)
    assert leave(value) is value
    assert leave("word") == "word"
    assert fetch((value, None), 5.0) == (value, None)


def test_what_is_expanded_is_as_small_as_what_it_was(world):
    value = torch.ones(1).expand(4000, 4000)  # the gradient of a sum
    assert leave(value) is value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [150, 302, 1000])
def test_what_is_left_is_fetched_in_pieces(world, small, dtype, count):
    found = rpc.rpc_sync("worker1", left, args=(count, dtype))
    size = count * dtype.itemsize
    assert isinstance(found, Left) == (size > 600)
    assert torch.equal(fetch(found, 5.0), torch.arange(count, dtype=dtype).reshape(2, -1))
    assert sum(small) == (size if size > 600 else 0)
    assert all(piece == 600 for piece in small[:-1])


def test_what_is_not_changed_nor_contiguous_is_the_same(world):
    value = torch.randn(2000, 1500).T
    assert torch.equal(fetch(leave(value), 5.0), value)
    given = leave((value.requires_grad_(), None))
    assert not fetch(given, 5.0)[0].requires_grad


def test_what_is_left_by_one_who_dies_is_lost(world):
    found = rpc.rpc_sync("worker1", left, args=(6_000_000,))
    world.kill(1)
    gc.collect()
    gc.disable()
    try:
        there = weakref.ref(found.flat)
        with pytest.raises(WorkerLost):
            fetch(found, 5.0)
        del found
        assert there() is None  # its error does not keep it
    finally:
        gc.enable()


def test_what_a_client_cannot_bring_is_not_the_servers_fault(world, small, monkeypatch):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2])
    remote = swarm.causal_lm()
    enter = in_pieces._put_in_place

    def late(place, piece):
        if api.current_agent() is not world[0]:
            raise RpcTimeout("worker0 did not answer")
        enter(place, piece)

    monkeypatch.setattr(in_pieces, "_put_in_place", late)
    with pytest.raises(NoRoute, match="the input has not arrived from the client"):
        remote(**swarm_models.batch(), use_cache=False)
    assert set(swarm.states.values()) == {"online"}
    swarm.close()


def test_what_was_fetched_is_let_go_of(world):
    found = rpc.rpc_sync("worker1", left, args=(6_000_000,))
    assert world[1].references.owned()
    fetch(found, 5.0)
    del found
    workers.eventually(lambda: not world[1].references.owned())


@pytest.mark.parametrize("recover", ["exact", "fast"])
@pytest.mark.parametrize("mode", ["greedy", "beams", "prompt lookup"])
def test_texts(world, small, mode, recover):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2])
    remote = swarm.causal_lm(recover=recover)

    def lose(ids, scores, **_):
        if ids.shape[1] == 13:
            world.kill(2)  # whose history, of more than one piece, is taken again
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    found = swarm_models.generate(remote, mode, stopping_criteria=[lose])
    assert torch.equal(found, swarm_models.generate(model, mode))
    assert swarm.states["worker2"] == "gone"
    assert swarm.states["worker1"] == "online"
    assert max(small) == 600
    swarm.close()


def test_gradients(world, small):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2])
    hidden = model.get_input_embeddings()(swarm_models.batch()["input_ids"]).detach()
    found = []
    for each in (model, swarm.causal_lm()):
        given = hidden.clone().requires_grad_()
        loss = each(inputs_embeds=given, use_cache=False).logits.square().mean()
        loss.backward()
        found.append((loss.detach(), given.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert len(small) == 2 * 2 * 4 + 3 * 2 * 4  # there and back, and back again with the gradients of what comes out
    swarm.close()
