"""Workers killed with SIGKILL while a text is written that has state of its own: the text is that of one process.

The state is in the client's process, in transformers' code: beams, random numbers, a processor of logits that counts,
an assistant's drafts. This code must get the logits of each step once, and the same ones.
"""

import random
import threading

import pytest
import torch
import transformers
from helpers.models import swarm_models
from helpers.waiting import wait_until

from nbdist.swarm import serve

_TOKENS = 16


class Tally(transformers.LogitsProcessor):
    """Counts the tokens that were written, of all sequences, and makes them rarer: an extra call changes the text."""

    def __init__(self):
        self.counts = torch.zeros(97)
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        self.counts += torch.bincount(ids[:, -1], minlength=97)
        return scores - self.counts * (0.1 + 0.01 * self.calls)


class Acts(transformers.StoppingCriteria):
    """Acts behind certain tokens, or rounds of drafts, and counts them."""

    def __init__(self, acts):
        self.acts = acts
        self.count = 0

    def __call__(self, ids, scores, **_):
        self.count += 1
        self.acts.get(self.count, lambda: None)()
        return torch.zeros(ids.shape[0], dtype=torch.bool)


def make():
    """A model without gradients, as the swarm has it: torch rounds some products in another way with them."""
    return swarm_models.make("llama").requires_grad_(False)


def assistant():
    """A model that is often right: the same one with a little noise."""
    found, noise = make(), torch.Generator().manual_seed(3)
    for weight in found.parameters():
        weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=noise)
    return found


def assisted(**more):
    # transformers 5.0 needs a token that ends a text here; this one is never written.
    return {"assistant_model": assistant(), "eos_token_id": 1, "suppress_tokens": [1], **more}


# By name: the inputs, and a function that makes the arguments of ``generate()``, whose state must be new each time.
MODES = {
    "beams": (swarm_models.batch, lambda: {"num_beams": 3, "num_return_sequences": 2}),
    "beams that sample": (
        swarm_models.batch,
        lambda: {"num_beams": 3, "num_return_sequences": 2, "do_sample": True, "logits_processor": [Tally()]},
    ),
    "sampling": (swarm_models.batch, lambda: {"do_sample": True, "top_k": 20, "temperature": 1.3}),
    "several": (swarm_models.one, lambda: {"do_sample": True, "num_return_sequences": 3, "top_p": 0.9}),
    "a processor that counts": (swarm_models.batch, lambda: {"logits_processor": [Tally()]}),
    "an assistant": (swarm_models.one, assisted),
    "an assistant, sampling": (swarm_models.one, lambda: assisted(do_sample=True, logits_processor=[Tally()])),
    "prompt lookup": (
        swarm_models.one,
        lambda: {"prompt_lookup_num_tokens": 3, "eos_token_id": 1, "suppress_tokens": [1], "do_sample": True},
    ),
    "a prompt in parts": (swarm_models.batch, lambda: {"prefill_chunk_size": 4, "num_beams": 2}),
    "no cache": (swarm_models.batch, lambda: {"use_cache": False, "do_sample": True}),
}


def write(model, mode, acts=()):
    """Return what a model writes, the state of torch's random numbers behind it, and the number of acts."""
    inputs, options = MODES[mode]
    torch.manual_seed(2)
    criterion = Acts(dict(acts))
    found = model.generate(
        **inputs(),
        **{"max_new_tokens": _TOKENS, "pad_token_id": 0, "eos_token_id": None, **options()},
        stopping_criteria=[criterion],
        return_dict_in_generate=True,
        output_scores=True,
    )
    return found, torch.get_rng_state(), criterion.count


def check(three, mode, recover, seed):
    """Kill two workers in steps that are drawn, the second at any moment of its step, and compare with one process."""
    model, draw = make(), random.Random(f"{mode} {seed}")
    expected, random_state, count = write(model, mode)
    swarm = serve(model, workers=[0, 1, 2], recover=recover)
    remote = swarm.causal_lm()
    victims, tokens = draw.sample(range(3), 2), draw.sample(range(count), 2)
    late = threading.Timer(draw.uniform(0.0, 0.005), lambda: swarm.kill(victims[1]))
    acts = {tokens[0]: lambda: swarm.kill(victims[0]), tokens[1]: late.start}
    acts.pop(0, lambda: None)()  # in the first step
    found, *after = write(remote, mode, acts)
    late.join()
    wait_until(lambda: all(three.workers[victim].lost for victim in victims))
    told = f"{mode}: workers {victims} behind {tokens} of {count}"
    assert torch.equal(found.sequences, expected.sequences), told
    assert torch.equal(after[0], random_state), told
    assert after[1] == count, told
    if recover == "exact":
        for mine, theirs in zip(found.scores, expected.scores, strict=True):
            assert torch.equal(mine, theirs), told
    assert set(swarm.blocks) <= {f"worker{each}" for each in range(3) if each not in victims}
    swarm.close()


@pytest.mark.parametrize("recover", ["exact", "fast"])
@pytest.mark.parametrize("mode", list(MODES))
def test_the_text_is_that_of_one_process(three, mode, recover):
    check(three, mode, recover, 0)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recover", ["exact", "fast"])
@pytest.mark.parametrize("mode", list(MODES))
def test_the_texts_of_many_kills(three, mode, recover):
    for seed in range(1, 25):
        check(three, mode, recover, seed)
        three.restart()
