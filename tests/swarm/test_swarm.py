"""A model in parts on several workers: it is the model, however it is used."""

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch
from helpers.models import swarm_models
from helpers.waiting import wait_until

from nbdist import trace
from nbdist.amounts import size
from nbdist.errors import UsageError
from nbdist.swarm import adapter, model_cache, serve
from nbdist.swarm.server.server import Options, Server
from nbdist.testing import World


@pytest.fixture(scope="module")
def world():
    with World(4) as world, world[0].activate():
        yield world


@pytest.fixture(scope="module", params=list(swarm_models.CONFIGS))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def both(world, family):
    model = swarm_models.make(family)
    swarm = serve(model, workers=[1, 2, 3])
    yield model, swarm.causal_lm(), swarm
    swarm.close()


@torch.no_grad()
def test_logits_are_the_same_to_the_last_bit(both):
    model, remote, _ = both
    for inputs in (swarm_models.batch(), swarm_models.one()):
        assert torch.equal(model(**inputs).logits, remote(**inputs).logits)
        assert torch.equal(model(**inputs, use_cache=False).logits, remote(**inputs, use_cache=False).logits)


@pytest.mark.parametrize("mode", list(swarm_models.MODES))
def test_it_writes_what_the_model_writes(both, mode):
    model, remote, _ = both
    assert torch.equal(swarm_models.generate(model, mode), swarm_models.generate(remote, mode))


def test_with_an_assistant(both):
    model, remote, _ = both
    assistant = swarm_models.make("llama")
    found = [swarm_models.generate(each, "one", assistant_model=assistant) for each in (model, remote)]
    assert torch.equal(*found)


@torch.no_grad()
def test_several_calls_in_one_cache(both):
    model, remote, _ = both
    texts = []
    for each in (model, remote):
        cache = model_cache.DynamicCache(config=each.config)
        ids = swarm_models.one()["input_ids"]
        for _ in range(3):
            ids = each.generate(ids, past_key_values=cache, max_new_tokens=4, pad_token_id=0, eos_token_id=None)
            ids = torch.cat([ids, ids[:, :2]], 1)
        texts.append(ids)
    assert torch.equal(*texts)


@pytest.mark.parametrize("use_cache", [True, False])
def test_gradients_come_back(both, use_cache):
    model, remote, _ = both
    assert torch.equal(*swarm_models.gradients((model, remote), use_cache))


def test_the_client_has_embeddings_and_head_only(both):
    model, remote, _ = both
    own = sum(parameter.numel() for parameter in remote.parameters())
    blocks = sum(parameter.numel() for parameter in model.get_submodule(adapter.find_layers(model)).parameters())
    assert own == sum(parameter.numel() for parameter in model.parameters()) - blocks


def test_what_a_session_had_goes_with_its_cache(both):
    _, remote, swarm = both
    swarm_models.generate(remote, "greedy")
    gc.collect()
    swarm_models.generate(remote, "one")
    gc.collect()
    wait_until(lambda: not any(info.sessions for info in swarm.info().values()))


def test_gradients_do_not_come_through_a_cache_that_has_something(world):
    swarm = serve(swarm_models.make("llama"), workers=[1])
    remote = swarm.causal_lm()
    ids = swarm_models.one()["input_ids"]
    with torch.no_grad():
        cache = remote(ids).past_key_values
    given = remote.get_input_embeddings()(ids[:, :1]).requires_grad_()
    with pytest.raises(UsageError, match="use_cache=False"):
        remote(inputs_embeds=given, past_key_values=cache)
    cache = remote(inputs_embeds=given).past_key_values
    with pytest.raises(UsageError, match="has nothing in it"), torch.no_grad():
        remote(ids[:, :1], past_key_values=cache)
    with pytest.raises(UsageError, match="StaticCache"):
        remote.generate(ids, cache_implementation="static", max_new_tokens=2, pad_token_id=0)
    swarm.close()


def test_a_swarm_says_who_has_what(world):
    shown = []
    trace.show_steps(lambda: shown.append)
    swarm = serve(swarm_models.make("llama"), workers=["worker1", 2], spans=[(0, 4), (4, 6)])
    assert shown == [
        "serve: the model's weights are read ...",
        "serve: 0 of 2 workers have loaded their blocks; worker1 loads ...",
        "serve: 1 of 2 workers have loaded their blocks; worker2 loads ...",
        f"serve: 6 blocks on 2 workers, {size(sum(swarm.sizes))}.",
    ]
    assert swarm.blocks == {"worker1": [0, 1, 2, 3], "worker2": [4, 5]}
    assert "worker1: blocks 0-3" in repr(swarm)
    assert swarm.route(0, 6)[1].server == "worker2"
    swarm.join("worker3", 2, 6)
    assert shown[4].startswith("join: worker3 loads blocks 2 to 5, ")
    assert shown[5:] == ["join: worker3 serves blocks 2-5."]
    trace.show_steps(None)
    assert swarm.blocks["worker3"] == [2, 3, 4, 5]
    with pytest.raises(UsageError, match="a transformers model, a folder with one, or a name, not a dict"):
        serve({}, workers=[1])
    with pytest.raises(UsageError, match="3 spans"):
        serve(swarm_models.make("llama"), workers=[1], spans=[(0, 1), (1, 2), (2, 6)])
    swarm.close()
    assert swarm.blocks == {}


def test_a_folder_that_others_have_written(world, tmp_path):
    model = swarm_models.make("mixtral")
    model.save_pretrained(tmp_path)  # in its own way, with a name for each expert
    swarm = serve(tmp_path, workers=[1, 2])
    remote = swarm.causal_lm()
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(swarm_models.generate(again, "greedy"), swarm_models.generate(remote, "greedy"))
    swarm.close()


@torch.no_grad()
def test_a_session_writes_also_between_two_steps(world, monkeypatch):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2, 3])
    remote = swarm.causal_lm()
    assert swarm.snapshot()["session"] is None
    cache = model_cache.DynamicCache(config=remote.config)
    remote(**swarm_models.one(), past_key_values=cache)
    assert swarm.snapshot()["session"]["state"] == "writing"
    monkeypatch.setattr("nbdist.swarm.client.journal._IDLE_SECONDS", 0.0)
    assert swarm.snapshot()["session"]["state"] == "idle"
    swarm.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_blocks_compute_in_a_type_of_their_own(world, dtype):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2], dtype=dtype)
    remote = swarm.causal_lm()
    with torch.no_grad():
        for inputs in (swarm_models.batch(), swarm_models.one()):
            for use_cache in (True, False):
                found = remote(**inputs, use_cache=use_cache).logits
                expected = model(**inputs, use_cache=use_cache).logits
                assert found.dtype == torch.float32
                error = (found - expected).abs().max() / expected.abs().max()
                assert (1e-5 if dtype is torch.bfloat16 else 0) < error < (0.05 if dtype is torch.bfloat16 else 1e-5)
    assert swarm_models.generate(remote, "one").shape == swarm_models.generate(model, "one").shape
    inputs = model.get_input_embeddings()(swarm_models.batch()["input_ids"]).detach().requires_grad_()
    remote(inputs_embeds=inputs, use_cache=False).logits.square().mean().backward()
    assert inputs.grad.dtype == torch.float32
    assert inputs.grad.abs().sum() > 0
    swarm.close()


def test_a_type_that_is_none(world):
    for dtype in (torch.int8, "bfloat16"):
        with pytest.raises(UsageError, match=r"dtype is a type of floating-point numbers"):
            serve(swarm_models.make("llama"), workers=[1], dtype=dtype)


def test_bfloat16_is_not_emulated(world, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    source = SimpleNamespace(open=lambda: None)

    def make(dtype, device):
        return Server(source, Options(dtype=dtype, device=device))

    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, s=supported: s)
        if supported:
            assert make(torch.bfloat16, "cuda:0").info().blocks == []
        else:
            with pytest.raises(UsageError, match="Tesla T4 would only emulate bfloat16"):
                make(torch.bfloat16, "cuda:0")
    assert make(torch.bfloat16, "cpu").info().blocks == []
    assert make(torch.float16, "cuda:0").info().blocks == []
