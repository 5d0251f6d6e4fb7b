"""Workers killed with SIGKILL in the middle of what they are asked: the text goes on as if nothing had been."""

import pytest
import swarm_models
import torch
import transformers

import nbdist
from nbdist.errors import UsageError
from nbdist.swarm import serve
from nbdist.swarm.routing import NoRoute


@pytest.fixture(scope="module")
def cluster():
    with nbdist.Cluster(3, backend="none") as cluster:
        yield cluster


@pytest.fixture
def three(cluster):
    """All workers, whatever the test before has done to them."""
    if any(worker.lost for worker in cluster.workers):
        cluster.restart()
    return cluster


class At(transformers.StoppingCriteria):
    """Does something behind a certain token."""

    def __init__(self, token, act):
        self.left = token
        self.act = act

    def __call__(self, ids, scores, **_):
        self.left -= 1
        if not self.left:
            self.act()
        return torch.zeros(ids.shape[0], dtype=torch.bool)


def at(token, act):
    return transformers.StoppingCriteriaList([At(token, act)])


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
@pytest.mark.parametrize(("mode", "token", "victim"), [("greedy", 1, 0), ("beams", 5, 1), ("prompt lookup", 2, 2)])
def test_the_text_is_the_same(three, family, mode, token, victim):
    model = swarm_models.make(family)
    swarm = serve(model, workers=[0, 1, 2])
    remote = swarm.causal_lm()
    expected = swarm_models.generate(model, mode)
    found = swarm_models.generate(remote, mode, stopping_criteria=at(token, lambda: swarm.kill(victim)))
    assert torch.equal(found, expected)
    assert set(swarm.blocks) == {"worker0", "worker1", "worker2"} - {f"worker{victim}"}  # and nobody else is given up
    assert sorted({block for blocks in swarm.blocks.values() for block in blocks}) == list(range(6))
    swarm.close()


def test_two_after_each_other_and_one_that_comes_back(three):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[0, 1, 2])
    remote = swarm.causal_lm()
    expected = swarm_models.generate(model, "beams", tokens=20)
    steps = {
        3: lambda: swarm.kill(0),
        6: lambda: swarm.kill(1),
        9: lambda: back(three, swarm),
        12: lambda: swarm.kill(2),
    }
    count = iter(range(1, 100))
    criteria = transformers.StoppingCriteriaList([Each(lambda: steps.get(next(count), lambda: None)())])
    found = swarm_models.generate(remote, "beams", tokens=20, stopping_criteria=criteria)
    assert torch.equal(found, expected)
    assert set(swarm.blocks) == {"worker0"}
    assert "worker2, which had" in "\n".join(swarm.log)
    swarm.kill(0)
    with pytest.raises(NoRoute, match="nobody is left"):
        swarm_models.generate(remote, "one")
    swarm.close()


def back(cluster, swarm):
    cluster.restart("0")
    swarm.join(0)


class Each(transformers.StoppingCriteria):
    """Does something behind each token."""

    def __init__(self, act):
        self.act = act

    def __call__(self, ids, scores, **_):
        self.act()
        return torch.zeros(ids.shape[0], dtype=torch.bool)


def test_a_replica_takes_over(three):
    model = swarm_models.make("qwen3")
    swarm = serve(model, workers=[0, 1], spans=[(0, 3), (3, 6)])
    swarm.join(2, 2, 6)
    remote = swarm.causal_lm()
    expected = swarm_models.generate(model, "greedy")
    found = swarm_models.generate(remote, "greedy", stopping_criteria=at(4, lambda: swarm.kill(1)))
    assert torch.equal(found, expected)
    assert swarm.blocks == {"worker0": [0, 1, 2], "worker2": [2, 3, 4, 5]}  # which had to load nothing
    swarm.close()


def test_killed_between_forward_and_backward(three):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[0, 1, 2])
    remote = swarm.causal_lm()
    inputs = model.get_input_embeddings()(swarm_models.batch()["input_ids"]).detach()
    found = []
    for each in (model, remote):
        given = inputs.clone().requires_grad_()
        loss = each(inputs_embeds=given, use_cache=False).logits.square().mean()
        if each is remote:
            swarm.kill(1)
        loss.backward()
        found.append(given.grad)
    assert torch.equal(*found)
    assert set(swarm.blocks) == {"worker0", "worker2"}
    swarm.close()


def test_a_bad_request_is_an_error_and_nobody_is_given_up(three):
    swarm = serve(swarm_models.make("llama"), workers=[0, 1])
    remote = swarm.causal_lm()
    with pytest.raises(RuntimeError):
        remote(inputs_embeds=torch.zeros(1, 3, 31))
    assert set(swarm.blocks) == {"worker0", "worker1"}
    cache = remote(**swarm_models.one()).past_key_values
    with pytest.raises(RuntimeError):
        remote(inputs_embeds=torch.zeros(1, 3, 31), past_key_values=cache)
    with pytest.raises(UsageError, match="of a call that failed"):
        remote(**swarm_models.one(), past_key_values=cache)
    assert swarm_models.generate(remote, "one").shape == (1, 21)
    swarm.close()


def test_a_worker_that_is_back_before_anybody_has_noticed(three):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[0, 1, 2])
    remote = swarm.causal_lm()

    def die_and_return():
        swarm.kill(1)
        three.workers[1].ended.wait(10)
        three.restart("1")
        swarm.join(1, 2, 4)

    expected = swarm_models.generate(model, "greedy")
    assert torch.equal(swarm_models.generate(remote, "greedy", stopping_criteria=at(4, die_and_return)), expected)
    assert swarm.blocks["worker1"] == [2, 3]
    swarm.close()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["greedy", "beams", "prompt lookup"])
def test_every_position_and_every_span(three, mode):
    model = swarm_models.make("llama")
    expected = swarm_models.generate(model, mode, tokens=32)
    for token in range(1, 28):
        for victim in range(3):
            three.restart() if any(worker.lost for worker in three.workers) else None
            swarm = serve(model, workers=[0, 1, 2])
            remote = swarm.causal_lm()
            criteria = at(token, lambda swarm=swarm, victim=victim: swarm.kill(victim))
            found = swarm_models.generate(remote, mode, tokens=32, stopping_criteria=criteria)
            assert torch.equal(found, expected), (token, victim)
            swarm.close()
