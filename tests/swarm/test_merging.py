"""Many steps as one, and one as several: of all families, the shapes tell how."""

import pytest
import torch
from helpers.models import swarm_models

from nbdist.swarm import adapter, model_cache
from nbdist.swarm.client.merging import Unmergeable, is_near, merge, split
from nbdist.swarm.history import History, Operation, Step


class Noting(torch.nn.Module):
    """A layer that notes how it is called."""

    def __init__(self, layer, notes):
        super().__init__()
        vars(self).update(adapter.plain_attributes(layer))
        self.layer = layer
        self.notes = notes

    def forward(self, hidden, *args, **kwargs):
        cache = model_cache.find_cache([*args, *kwargs.values()])
        result = self.layer(hidden, *args, **kwargs)
        found = result[0] if isinstance(result, tuple) else result
        self.notes.append((hidden, adapter.strip(args, kwargs, cache), found))
        return result


@pytest.fixture(params=list(swarm_models.CONFIGS))
def noted(request):
    """A model, its layers, and what each step through them was."""
    model = swarm_models.make(request.param)
    path = adapter.find_layers(model)
    layers = list(model.get_submodule(path))
    notes = []
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, torch.nn.ModuleList(Noting(layer, notes) for layer in layers))
    return model, layers, notes


@torch.no_grad()
def through(layers, hidden, calls, cache):
    for layer, told in zip(layers, calls, strict=True):
        hidden = adapter.call(layer, hidden, adapter.LayerCall(*told), cache)
    return hidden


def history_of(notes, count, operations):
    history = History()
    for at in range(0, len(notes), count):
        row = notes[at : at + count]
        step = Step(tuple(operations.get(at // count, ())), row[0][0], tuple(told for _, told, _ in row))
        history.add(step, row[-1][2])
    return history


@pytest.mark.parametrize("texts", ["one", "batch"])
@torch.no_grad()
def test_all_at_once_comes_to_the_same(noted, texts):
    model, layers, notes = noted
    inputs = getattr(swarm_models, texts)()
    model.generate(**inputs, max_new_tokens=14, do_sample=False, pad_token_id=0, eos_token_id=None)
    history = history_of(notes, len(layers), {})
    assert len(history.steps) == 14
    merged = merge(history)
    cache = model_cache.new_cache(model.config)
    assert is_near(through(layers, merged.hidden, merged.calls, cache), merged.result, merged.calls)
    assert merged.hidden.shape[1] == history.tokens == cache.get_seq_length()


@torch.no_grad()
def test_beams_and_crops_are_followed(noted):
    model, layers, notes = noted
    cache = model_cache.new_cache(model.config)
    ids = swarm_models.batch()["input_ids"].repeat(2, 1)[:, :4]  # shorter than the window
    operations = {1: [Operation("reorder_cache", (torch.tensor([1, 0, 0, 3]),))], 3: [Operation("crop", (-2,))]}
    operations[4] = [Operation("crop", (-1,)), Operation("batch_select_indices", (torch.tensor([2, 0]),))]
    mask = torch.ones(4, 4, dtype=torch.long)
    model(ids, attention_mask=mask, past_key_values=cache)
    for number, (rows, size) in enumerate([(4, 1), (4, 2), (4, 1), (2, 2)], 1):
        for operation in operations.get(number, ()):
            getattr(cache, operation.name)(*operation.args)
        have = cache.get_seq_length()
        model(ids[:rows, :size], attention_mask=torch.ones(rows, have + size, dtype=torch.long), past_key_values=cache)
    history = history_of(notes, len(layers), operations)
    merged = merge(history)
    fresh = model_cache.new_cache(model.config)
    assert is_near(through(layers, merged.hidden, merged.calls, fresh), merged.result)
    assert fresh.get_seq_length() == cache.get_seq_length()
    for own, other in zip(fresh.layers, cache.layers, strict=True):
        assert torch.allclose(own.keys, other.keys, atol=1e-5)
        assert torch.allclose(own.values, other.values, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 5])
@torch.no_grad()
def test_a_step_in_parts_comes_to_the_same(noted, size):
    model, layers, notes = noted
    cache = model_cache.new_cache(model.config)
    inputs = swarm_models.batch()
    model(**inputs, past_key_values=cache)
    hidden = [note[0] for note in notes[:: len(layers)]]
    expected = [note[2] for note in notes[len(layers) - 1 :: len(layers)]]
    own, begin = model_cache.new_cache(model.config), 0
    for number, (given, result) in enumerate(zip(hidden, expected, strict=True)):
        calls = [told for _, told, _ in notes[number * len(layers) :][: len(layers)]]
        parts = split(given, calls, begin, size, model_cache.windows(own))
        assert [part.shape[1] for part, _ in parts] == [min(size, 9 - at) for at in range(0, 9, size)]
        found = [through(layers, part, called, own) for part, called in parts]
        assert is_near(torch.cat(found, 1), result, calls)
        begin += given.shape[1]


def step(hidden, *calls, before=()):
    return Step(tuple(before), hidden, calls)


def test_what_cannot_be_read_is_not_merged():
    hidden = torch.zeros(1, 2, 4)
    for first, second in [
        ({"x": torch.zeros(3, 3)}, {"x": torch.zeros(3, 3)}),
        ({"x": torch.zeros(1, 2)}, {"x": None}),
        ({"x": 1}, {"x": 2}),
        ({"x": 1}, {"y": 1}),
        ({"x": (1, 2)}, {"x": (1,)}),
    ]:
        history = History()
        history.add(step(hidden, ((), first)), hidden)
        history.add(step(hidden, ((), second)), hidden)
        with pytest.raises(Unmergeable):
            merge(history)
    unknown = History()
    unknown.add(step(hidden, ((), {}), before=[Operation("turn_around", ())]), hidden)
    with pytest.raises(Unmergeable, match="turn_around"):
        merge(unknown)
    with pytest.raises(Unmergeable):
        merge(History())


def test_what_comes_out_otherwise_is_not_near():
    one = torch.ones(2, 3)
    assert is_near(one, one + 1e-5)
    assert not is_near(one, one + 0.1)
    assert not is_near(one, torch.ones(3, 3))
    assert not is_near(one, one * torch.nan)


def test_a_history_forgets_what_was_cropped_whole():
    def add(history, tokens, *operations):
        history.add(step(torch.zeros(1, tokens, 4), ((), {}), before=operations), torch.zeros(1, tokens, 4))

    crop = lambda count: Operation("crop", (-count,))  # noqa: E731
    reorder = Operation("reorder_cache", (torch.tensor([0]),))
    history = History()
    add(history, 5)
    for _ in range(100):  # tries one end after the other
        add(history, 2, crop(0) if len(history.steps) == 1 else crop(2))
    assert len(history.steps) == 2
    assert history.tokens == 7
    add(history, 1, crop(3), reorder)
    assert [each.hidden.shape[1] for each in history.steps] == [5, 1]
    assert [each.name for each in history.steps[-1].before] == ["crop", "crop", "reorder_cache"]
    assert history.steps[-1].before[1].args == (-1,)
    assert history.tokens == 5
    with_windows = History(forgets=False)
    add(with_windows, 5)
    add(with_windows, 2)
    add(with_windows, 1, crop(2))
    assert len(with_windows.steps) == 3


def test_prompts_are_those_of_the_first_tokens():
    prompts = torch.arange(6.0).reshape(1, 1, 6, 1)
    history = History()
    for at, size in ((0, 4), (4, 3)):
        own = prompts[:, :, at : at + size]
        history.add(Step((), torch.zeros(2, size, 1), (((), {}),), own), torch.zeros(2, size, 1))
    merged = merge(history)
    assert torch.equal(merged.prompts, prompts)
    assert merged.hidden.shape == (2, 7, 1)
