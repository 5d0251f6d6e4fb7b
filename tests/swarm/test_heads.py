"""What else a swarm is but a model that writes: blocks alone, other heads, prompts for each block."""

import copy

import pytest
import torch
import transformers
from helpers.models import swarm_models

from nbdist.errors import UsageError
from nbdist.swarm import adapter, model_cache, serve
from nbdist.swarm.weight_file import WeightFile
from nbdist.testing import World


@pytest.fixture(scope="module")
def world():
    with World(4) as world, world[0].activate():
        yield world


@pytest.fixture(scope="module", params=list(swarm_models.CONFIGS))
def both(world, request):
    model = swarm_models.make(request.param)
    swarm = serve(model, workers=[1, 2, 3])
    yield model, swarm
    swarm.close()


@torch.no_grad()
def test_without_a_head(both):
    model, swarm = both
    inputs = swarm_models.batch()
    headless = swarm.model()
    expected = model.base_model(**inputs).last_hidden_state
    assert torch.equal(headless(**inputs).last_hidden_state, expected)


def share_a_part_of_two_blocks(model):
    model.model.layers[1].mlp = model.model.layers[0].mlp


def share_head_and_embeddings(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def share_one_memory(model):
    """Two weights of the same place and shape, one of which is the other transposed."""
    attention = model.model.layers[2].self_attn
    attention.o_proj.weight = torch.nn.Parameter(attention.q_proj.weight.detach().t())


def share_nothing_although_the_configuration_says_so(model):
    model.config.tie_word_embeddings = True


SHARES = [
    share_a_part_of_two_blocks,
    share_head_and_embeddings,
    share_one_memory,
    share_nothing_although_the_configuration_says_so,
]


@pytest.mark.parametrize("share", SHARES)
@torch.no_grad()
def test_weights_that_parts_of_a_model_share(world, share):
    model = swarm_models.make("llama")
    assert not model.config.tie_word_embeddings
    share(model)
    swarm = serve(model, workers=[1, 2, 3])
    ids = swarm_models.one()["input_ids"]
    assert torch.equal(swarm.causal_lm()(ids).logits, model(ids).logits)
    assert torch.equal(swarm.model()(ids).last_hidden_state, model.model(ids).last_hidden_state)
    assert len(set(swarm.sizes)) == 1
    swarm.close()


@torch.no_grad()
def test_a_head_that_the_configuration_ties_is_written_once_and_shared(world, tmp_path):
    model = swarm_models.make("gpt2")
    adapter.write_checkpoint(model, tmp_path)
    names = set(WeightFile(tmp_path).sizes)
    assert set(model.state_dict()) - names == {"lm_head.weight"}
    swarm = serve(model, workers=[1])
    remote = swarm.causal_lm()
    assert remote.lm_head.weight is remote.transformer.wte.weight
    swarm.close()


def test_classes_of_texts(both):
    model, swarm = both
    remote = swarm.sequence_classifier(num_labels=3)
    config = copy.deepcopy(model.config)
    config.num_labels = 3
    own = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    own.base_model.load_state_dict(model.base_model.state_dict())
    own.score.load_state_dict(remote.score.state_dict())
    inputs = swarm_models.batch()
    for each in (own, remote):
        each.config.pad_token_id = 0
    with torch.no_grad():
        assert torch.equal(own(**inputs).logits, remote(**inputs).logits)
    # the head is trained here
    labels = torch.tensor([0, 2])
    optimizer = torch.optim.SGD([each for each in remote.parameters() if each.requires_grad], 0.5)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = remote(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def through_layers(model, hidden, begin, end, prompts=None, **more):
    """What some of a model's own layers make of hidden states."""
    layers = model.get_submodule(adapter.find_layers(model))
    handles = []

    def pre(number):
        def hook(_, args, kwargs):
            if number < begin or number >= end:
                return None
            given = hidden if number == begin else args[0]
            if prompts is not None:
                prompt = prompts[number - begin]
                given = torch.cat([given[:, : prompt.shape[1]] + prompt, given[:, prompt.shape[1] :]], 1)
            return (given, *args[1:]), kwargs

        return hook

    found = {}
    for number, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(pre(number), with_kwargs=True))
        handles.append(
            layer.register_forward_hook(
                lambda _, args, out, number=number: found.update({number: out[0] if isinstance(out, tuple) else out})
            )
        )
    try:
        model(inputs_embeds=torch.zeros_like(hidden), use_cache=False, **more)
    finally:
        for handle in handles:
            handle.remove()
    return found[end - 1]


@pytest.mark.parametrize(("begin", "end"), [(0, 6), (1, 4), (3, 4)])
def test_some_blocks(both, begin, end):
    model, swarm = both
    blocks = swarm.sequential()
    part = blocks[begin:end] if end - begin > 1 else blocks[begin]
    assert (len(blocks), len(part), len(list(part))) == (6, end - begin, end - begin)
    torch.manual_seed(3)
    hidden = torch.randn(2, 7, 32)
    found = []
    prompts = torch.randn(end - begin, 2, 3, 32)
    for prompt in (None, prompts, prompts[:, :1]):
        for function in (part, lambda given, prompts: through_layers(model, given, begin, end, prompts)):
            given = hidden.clone().requires_grad_()
            own = prompt.clone().requires_grad_() if prompt is not None else None
            result = function(given, prompts=own)
            result.square().sum().backward()
            found.append((result.detach(), given.grad, own.grad if own is not None else torch.zeros(1)))
        for one, other in zip(*found[-2:], strict=True):
            assert torch.equal(one, other) if prompt is None or prompt.shape[1] > 1 else torch.allclose(one, other)


def test_a_session_of_some_blocks(both):
    model, swarm = both
    part = swarm.sequential()[1:5]
    torch.manual_seed(3)
    hidden, prompts = torch.randn(2, 7, 32), torch.randn(4, 1, 3, 32)
    with torch.no_grad():
        expected = through_layers(model, hidden, 1, 5, prompts)
    with part.session(max_tokens=8) as session:
        found = [session.step(hidden[:, :2], prompts), session.step(hidden[:, 2:6], prompts)]
        assert session.tokens == 6
        session.step(hidden[:, :1])
        session.cache.crop(-1)
        found.append(session.step(hidden[:, 6:], prompts))
    assert torch.allclose(torch.cat(found, 1), expected, atol=1e-4)
    with pytest.raises(UsageError, match="has ended"):
        session.step(hidden)


def test_what_is_no_row_of_blocks(world):
    swarm = serve(swarm_models.make("llama"), workers=[1])
    blocks = swarm.sequential()
    for which in (slice(None, None, 2), slice(3, 3)):
        with pytest.raises(UsageError, match="is not a row of blocks"):
            blocks[which]
    with pytest.raises(IndexError):
        blocks[6]
    with pytest.raises(UsageError, match="prompts for 2 blocks do not fit 6"):
        blocks(torch.zeros(1, 2, 32), prompts=torch.zeros(2, 1, 1, 32))
    assert "blocks 2 to 3 of 6" in repr(blocks[2:4])
    swarm.close()


def deep(model, prompts):
    """A model of one process with prompts at the first tokens of each text."""

    def pre(number):
        def hook(_, args, kwargs):
            cache = model_cache.find_cache([*args, *kwargs.values()])
            begin = cache.layers[number].get_seq_length() if cache is not None and number < len(cache.layers) else 0
            prompt = prompts[number][:, begin : begin + args[0].shape[1]]
            given = torch.cat([args[0][:, : prompt.shape[1]] + prompt, args[0][:, prompt.shape[1] :]], 1)
            return (given, *args[1:]), kwargs

        return hook

    layers = model.get_submodule(adapter.find_layers(model))
    return [layer.register_forward_pre_hook(pre(n), with_kwargs=True) for n, layer in enumerate(layers)]


@pytest.mark.parametrize("mode", ["greedy", "beams", "prompt lookup"])
@pytest.mark.parametrize("recover", ["exact", "fast"])
def test_deep_prompts_in_what_is_written(world, mode, recover):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2, 3], recover=recover)
    remote = swarm.causal_lm()
    torch.manual_seed(5)
    prompts = torch.randn(6, 1, 4, 32)
    plain = swarm_models.generate(model, mode)
    handles = deep(model, prompts)
    expected = swarm_models.generate(model, mode)
    assert not torch.equal(plain, expected)
    remote.deep_prompts = torch.nn.Parameter(prompts.clone())
    criteria = transformers.StoppingCriteriaList([Lose(swarm, 4, "worker2")])
    assert torch.equal(swarm_models.generate(remote, mode, stopping_criteria=criteria), expected)
    inputs = swarm_models.batch()
    own = prompts.clone().requires_grad_()
    for handle in handles:
        handle.remove()
    handles = deep(model, own)
    for each in (model, remote):
        each(**inputs, use_cache=False).logits.square().mean().backward()
    assert torch.allclose(remote.deep_prompts.grad, own.grad, atol=1e-6)
    swarm.close()


class Lose(transformers.StoppingCriteria):
    def __init__(self, swarm, token, name):
        self.swarm, self.left, self.name = swarm, token, name

    def __call__(self, ids, scores, **_):
        self.left -= 1
        if not self.left:
            crew = self.swarm.crew
            for session in self.swarm.sessions.open():
                crew.ask(crew.member(self.name), "close", session.id)
        return torch.zeros(ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("family", list(swarm_models.CONFIGS))
def test_texts_in_parts_that_are_under_way_together(world, family):
    model = swarm_models.make(family)
    swarm = serve(model, workers=[1, 2, 3], micro_batch=2)
    swarm.join(1, 2, 6)
    remote = swarm.causal_lm()
    torch.manual_seed(1)
    ids = torch.randint(3, 97, (5, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    found = []
    for each in (model, remote):
        given = model.get_input_embeddings()(ids).detach().requires_grad_()
        result = each(inputs_embeds=given, attention_mask=mask, use_cache=False).logits
        result.square().mean().backward()
        found.append((result.detach(), given.grad))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    swarm.close()


def test_a_model_that_came_without_a_head(world, tmp_path):
    model = swarm_models.make("llama").model
    swarm = serve(model, workers=[1, 2])
    inputs = swarm_models.batch()
    with torch.no_grad():
        assert torch.equal(swarm.model()(**inputs).last_hidden_state, model(**inputs).last_hidden_state)
    with pytest.raises(UsageError, match="came without lm_head"):
        swarm.causal_lm()
    swarm.close()
    model.save_pretrained(tmp_path)
    swarm = serve(tmp_path, workers=[1, 2])
    with torch.no_grad():
        assert torch.equal(swarm.model()(**inputs).last_hidden_state, model(**inputs).last_hidden_state)
    swarm.close()
