"""A language model whose blocks are on workers with a GPU; the client is a notebook on the CPU."""

import pytest
import torch
from helpers.models import swarm_models

import nbdist
from nbdist.swarm import serve


@pytest.fixture(scope="module")
def cluster():
    with nbdist.Cluster(3, gpu_ids=(0,)) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2"])
def both(cluster, request):
    model = swarm_models.make(request.param)
    swarm = serve(model, workers=["worker0", "worker1"])
    yield model, swarm.causal_lm(), swarm
    swarm.close()


def test_blocks_and_caches_are_on_the_gpu(cluster, both):
    _, remote, _ = both
    before = cluster.evaluate("torch.cuda.memory_allocated()", [0, 1])
    assert all(number > 0 for number in before)
    with torch.no_grad():
        found = remote(**swarm_models.batch())
    assert found.logits.device.type == "cpu"
    assert min(cluster.evaluate("torch.cuda.memory_allocated()", [0, 1])) > 0


@torch.no_grad()
def test_logits_are_those_of_one_process(both):
    model, remote, _ = both
    for inputs in (swarm_models.batch(), swarm_models.one()):
        for options in ({}, {"use_cache": False}):
            torch.testing.assert_close(
                remote(**inputs, **options).logits, model(**inputs, **options).logits, rtol=1e-3, atol=1e-4
            )


@pytest.mark.parametrize("mode", ["greedy", "one", "beams"])
def test_it_writes_what_the_model_writes(both, mode):
    model, remote, _ = both
    assert torch.equal(swarm_models.generate(model, mode), swarm_models.generate(remote, mode))


@pytest.mark.parametrize("use_cache", [True, False])
def test_gradients_come_back(both, use_cache):
    model, remote, _ = both
    torch.testing.assert_close(*swarm_models.gradients((model, remote), use_cache), rtol=1e-3, atol=1e-6)


def test_a_server_is_killed_while_it_writes(cluster):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=["worker0", "worker1", "worker2"], recover="exact")
    remote = swarm.causal_lm()
    whole = swarm_models.generate(remote, "one", tokens=24)
    asked = []

    def kill(*_):
        asked.append(1)
        if len(asked) == 12:
            cluster.signal("worker1", 9)

    handle = remote.get_input_embeddings().register_forward_hook(kill)
    assert torch.equal(swarm_models.generate(remote, "one", tokens=24), whole)
    handle.remove()
    assert len(asked) >= 12
    swarm.close()
    cluster.restart(1, process_group=True)


def test_a_large_input(cluster):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=["worker0", "worker1"])
    ids = torch.randint(3, 97, (80, 900), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = swarm.causal_lm()(ids, use_cache=False).logits
        torch.testing.assert_close(found, model(ids, use_cache=False).logits, rtol=1e-3, atol=1e-4)
    swarm.close()


@torch.no_grad()
def test_a_client_on_the_gpu(cluster):
    """The client's embedding and head are on the GPU, as in one process."""
    model = swarm_models.make("llama")
    swarm = serve(model, workers=["worker0", "worker1"])
    remote = swarm.causal_lm().to("cuda:0")
    inputs = {name: value.to("cuda:0") for name, value in swarm_models.batch().items()}
    found = remote(**inputs).logits
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), model(**swarm_models.batch()).logits, rtol=1e-3, atol=1e-4)
    given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(remote.generate(**inputs, **given).cpu(), model.generate(**swarm_models.batch(), **given))
    swarm.close()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_in_a_shorter_type(cluster, dtype):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=["worker0", "worker1"], dtype=dtype)
    found, expected = (each(**swarm_models.one()).logits for each in (swarm.causal_lm(), model))
    assert found.dtype == torch.float32
    assert 1e-6 < (found - expected).abs().max() / expected.abs().max() < 0.05
    swarm.close()
