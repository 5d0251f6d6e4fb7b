"""Calls that a swarm refuses: they raise at once, and leave caches as they were."""

import inspect
import threading

import pytest
import torch
from helpers.models import swarm_models

from nbdist.errors import UsageError
from nbdist.swarm import NoRoute, model_cache, serve
from nbdist.swarm.client.crew import Crew, Gone
from nbdist.testing import World


@pytest.fixture(scope="module")
def world():
    with World(3) as world, world[0].activate():
        yield world


@pytest.fixture(scope="module", params=["llama", "gemma2"])  # gemma2 has sliding windows
def both(world, request):
    model = swarm_models.make(request.param)
    swarm = serve(model, workers=[1, 2])
    yield model, swarm, swarm.causal_lm()
    swarm.close()


@pytest.fixture(scope="module")
def llama(world):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2])
    yield swarm
    swarm.close()


def embedded(model, ids):
    """The embeddings of tokens, with gradients."""
    return model.get_input_embeddings()(ids).detach().requires_grad_()


# -- caches --------------------------------------------------------------------------------------------


WRONG_STEPS = {
    "gradients": lambda: torch.zeros(1, 2, 32, requires_grad=True),
    "wrong width": lambda: torch.zeros(1, 2, 31),
    "other number of sequences": lambda: torch.zeros(2, 2, 32),
}


@pytest.mark.parametrize("wrong", list(WRONG_STEPS))
def test_a_refused_step_of_blocks_changes_nothing(both, wrong):
    _, swarm, _ = both
    blocks = swarm.sequential()
    hidden = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(3))
    found = []
    for refused in (False, True):
        with blocks.session() as session:
            session.step(hidden[:, :10])
            if refused:
                with pytest.raises((UsageError, RuntimeError)):
                    session.step(WRONG_STEPS[wrong]())
                assert session.tokens == 10
            found.append(session.step(hidden[:, 10:]))
    assert torch.equal(*found)


def test_a_refused_first_step_of_blocks_changes_nothing(both):
    _, swarm, _ = both
    blocks = swarm.sequential()
    hidden = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(3))
    found = []
    for refused in (False, True):
        with blocks.session() as session:
            if refused:
                with pytest.raises(UsageError, match="no gradient"):
                    session.step(hidden.clone().requires_grad_())
                assert session.tokens == 0
            found.append(session.step(hidden))
    assert torch.equal(*found)


@pytest.mark.parametrize("wrong", ["gradients", "other number of sequences"])
def test_a_refused_call_of_a_model_changes_nothing(both, wrong):
    model, _, remote = both
    ids = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(1))
    cache, own = (model_cache.new_cache(each.config) for each in (remote, model))
    with torch.no_grad():
        remote(ids[:, :10], past_key_values=cache)
        model(ids[:, :10], past_key_values=own)
    if wrong == "gradients":
        with pytest.raises(UsageError, match="use_cache=False"):
            remote(inputs_embeds=embedded(remote, ids[:, :1]), past_key_values=cache)
    else:
        with pytest.raises(RuntimeError), torch.no_grad():
            remote(ids[:, :2].expand(2, -1), past_key_values=cache)
    assert cache.get_seq_length() == 10
    with torch.no_grad():
        found, expected = remote(ids[:, 10:], past_key_values=cache), model(ids[:, 10:], past_key_values=own)
    assert torch.equal(found.logits, expected.logits)


def test_a_step_that_is_interrupted_before_it_is_sent_changes_nothing(both, monkeypatch):
    model, _, remote = both
    ids = swarm_models.one()["input_ids"]
    cache = model_cache.new_cache(remote.config)
    with torch.no_grad():
        remote(ids[:, :6], past_key_values=cache)
        with monkeypatch.context() as patch:
            # as Ctrl-C does while the session moves to another server, and a step waits for that
            patch.setattr("nbdist.swarm.client.session.Session.step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                remote(ids[:, 6:], past_key_values=cache)
        assert cache.get_seq_length() == 6
        found = remote(ids[:, 6:], past_key_values=cache).logits
        own = model_cache.new_cache(model.config)
        model(ids[:, :6], past_key_values=own)
        assert torch.equal(found, model(ids[:, 6:], past_key_values=own).logits)


def test_a_step_that_is_interrupted_after_it_was_taken_ends_its_session(both):
    _, swarm, remote = both
    ids = swarm_models.one()["input_ids"]
    cache = model_cache.new_cache(remote.config)
    forget = swarm.listen(interrupted)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        remote(ids, past_key_values=cache)
    forget()
    with torch.no_grad(), pytest.raises(UsageError, match="a call that failed: KeyboardInterrupt"):
        remote(ids, past_key_values=cache)


def interrupted(*args, **kwargs):
    if threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def test_a_call_with_gradients_that_fails_leaves_its_empty_cache(both, monkeypatch):
    model, _, remote = both
    ids = swarm_models.one()["input_ids"]
    cache = model_cache.new_cache(remote.config)
    with monkeypatch.context() as patch:
        patch.setattr(Crew, "compute", lost)
        with pytest.raises(NoRoute):
            remote(inputs_embeds=embedded(remote, ids), past_key_values=cache)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        assert torch.equal(remote(ids, past_key_values=cache).logits, model(ids).logits)


def test_a_second_call_with_gradients_and_the_same_cache_is_refused(both):
    _, _, remote = both
    given = embedded(remote, swarm_models.one()["input_ids"])
    cache = remote(inputs_embeds=given).past_key_values
    with pytest.raises(UsageError, match="has nothing in it"):
        remote(inputs_embeds=given, past_key_values=cache)


# -- arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recover", ["fats", "", ["exact"]])
def test_an_unknown_way_to_recover(llama, recover):
    match = r'recover must be "exact" or "fast", not '
    with pytest.raises(UsageError, match=match):
        serve(swarm_models.make("llama"), workers=[1], recover=recover)
    for make in (llama.causal_lm, llama.model, llama.sequence_classifier):
        with pytest.raises(UsageError, match=match):
            make(recover=recover)
    cache = model_cache.DynamicCache()
    with pytest.raises(UsageError, match=match):
        llama.session(cache, recover=recover)
    assert not hasattr(cache, "nbdist")


CLOSED = {
    "route": lambda swarm: swarm.route(),
    "join": lambda swarm: swarm.join(1),
    "leave": lambda swarm: swarm.leave(1),
    "move": lambda swarm: swarm.move(0, 2, 1),
    "kill": lambda swarm: swarm.kill(1),
    "session": lambda swarm: swarm.session(model_cache.DynamicCache()),
    "causal_lm": lambda swarm: swarm.causal_lm(),
    "model": lambda swarm: swarm.model(),
    "sequence_classifier": lambda swarm: swarm.sequence_classifier(),
    "sequential": lambda swarm: swarm.sequential(),
}


@pytest.fixture(scope="module")
def closed(world, tmp_path_factory):
    """A closed swarm whose folder of weights is still there."""
    folder = tmp_path_factory.mktemp("model")
    swarm_models.make("llama").save_pretrained(folder)
    swarm = serve(folder, workers=[1])
    swarm.close()
    return swarm


@pytest.fixture(scope="module")
def removed(world):
    """A closed swarm whose folder of weights is gone."""
    swarm = serve(swarm_models.make("llama"), workers=[1])
    swarm.close()
    return swarm


@pytest.mark.parametrize("method", list(CLOSED))
@pytest.mark.parametrize("which", ["closed", "removed"])
def test_a_closed_swarm_says_that_it_is_closed(request, method, which):
    swarm = request.getfixturevalue(which)
    with pytest.raises(UsageError, match="this swarm is closed"):
        CLOSED[method](swarm)
    assert swarm.blocks == {}
    assert swarm.info() == {}


def test_a_tokenizer_of_a_closed_swarm(removed):
    with pytest.raises(UsageError, match="this swarm is closed"):
        removed.tokenizer()


def test_a_swarm_that_is_closed_while_a_worker_joins(world, monkeypatch):
    swarm = serve(swarm_models.make("llama"), workers=[1])
    own = Crew.outwait

    def outwait(*args, **kwargs):
        found = own(*args, **kwargs)
        swarm.close()
        return found

    monkeypatch.setattr(Crew, "outwait", outwait)
    with pytest.raises(UsageError, match="this swarm is closed"):
        swarm.join(2)
    assert swarm.blocks == {}


# -- what is inside of the blocks ----------------------------------------------------------------------


@pytest.mark.parametrize("family", list(swarm_models.CONFIGS))
def test_what_is_inside_of_the_blocks_is_not_returned(world, family):
    model = swarm_models.make(family)
    swarm = serve(model, workers=[1, 2])
    remote = swarm.causal_lm()
    inputs = swarm_models.one()
    for name in ("output_hidden_states", "output_attentions"):
        for each in (remote, remote.base_model, swarm.sequence_classifier(num_labels=3)):
            each.config.pad_token_id = 0
            with pytest.raises(UsageError, match=rf"{name}=True.*Leave it out"), torch.no_grad():
                each(**inputs, **{name: True})
        names = list(inspect.signature(remote.base_model.forward).parameters)
        if name in names:  # so it may be given by its position, too
            args = [inputs["input_ids"], *[None] * (names.index(name) - 1), True]
            with pytest.raises(UsageError, match=f"{name}=True"), torch.no_grad():
                remote.base_model(*args)
    with pytest.raises(UsageError, match=r"sequential\(\)"):
        swarm_models.generate(remote, "one", output_hidden_states=True, return_dict_in_generate=True)
    # all else works
    with torch.no_grad():
        found = remote(**inputs, output_hidden_states=False, output_attentions=False)
        assert torch.equal(found.logits, model(**inputs).logits)
    assert torch.equal(swarm_models.generate(remote, "one"), swarm_models.generate(model, "one"))
    assert swarm.sequential()(torch.zeros(1, 2, 32)).shape == (1, 2, 32)
    swarm.close()


def test_the_routers_of_experts_are_inside_of_the_blocks(world):
    swarm = serve(swarm_models.make("mixtral"), workers=[1])
    with pytest.raises(UsageError, match="output_router_logits=True"), torch.no_grad():
        swarm.model()(**swarm_models.one(), output_router_logits=True)
    swarm.close()


def test_blocks_of_a_model_that_returns_hidden_states_by_default(world):
    model = swarm_models.make("llama")
    model.config.output_hidden_states = True
    swarm = serve(model, workers=[1])
    remote = swarm.causal_lm()
    with pytest.raises(UsageError, match="output_hidden_states=True"):
        swarm_models.generate(remote, "one")
    remote.config.output_hidden_states = False
    assert torch.equal(swarm_models.generate(remote, "one"), swarm_models.generate(model, "one"))
    with swarm.sequential().session() as session:
        assert session.step(torch.zeros(1, 2, 32)).shape == (1, 2, 32)
    swarm.close()


# -- failures ------------------------------------------------------------------------------------------


def lost(*args, **kwargs):
    raise Gone("worker1")


def test_the_message_counts_all_servers_that_failed(llama, monkeypatch):
    blocks, failures = llama.sequential(), []

    def compute(*args, **kwargs):
        failures.append(1)
        lost()

    monkeypatch.setattr(Crew, "compute", compute)
    with pytest.raises(NoRoute) as raised, torch.no_grad():
        blocks(torch.zeros(1, 2, 32))
    assert str(raised.value).startswith(f"{len(failures)} servers failed one after the other")
