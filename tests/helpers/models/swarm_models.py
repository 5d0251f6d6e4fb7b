"""Tiny random models of several families, and what a process alone makes of them."""

import gc

import pytest
import torch
import transformers

from nbdist.rpc import api
from nbdist.swarm import model_cache
from nbdist.swarm.server.server import Server

_COMMON = {"vocab_size": 97}
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **_COMMON,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_LLAMA),
    "bloom": lambda: transformers.BloomConfig(hidden_size=32, n_layer=6, n_head=4, **_COMMON),
    "falcon": lambda: transformers.FalconConfig(hidden_size=32, num_hidden_layers=6, num_attention_heads=4, **_COMMON),
    "mixtral": lambda: transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **_LLAMA),
    "qwen3": lambda: transformers.Qwen3Config(head_dim=8, **_LLAMA),
    "gemma2": lambda: transformers.Gemma2Config(head_dim=8, sliding_window=8, **_LLAMA),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=6, n_head=4, n_positions=64, **_COMMON),
}
BLOCKS = 6


def make(family):
    """A model with random weights, the same each time."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()


def batch():
    """Two texts, one of them padded at its left."""
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))  # threads share the default one
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def one():
    """One text."""
    return {key: value[1:] for key, value in batch().items()}


MODES = {
    "greedy": (batch, {}),
    "one": (one, {}),
    "sampling": (batch, {"do_sample": True, "top_k": 20}),
    "beams": (batch, {"num_beams": 3}),
    "beams that sample": (batch, {"num_beams": 2, "do_sample": True}),
    "several": (one, {"num_return_sequences": 3, "do_sample": True}),
    # transformers 5.0 needs a token that ends a text here; this one is not among the first that the models write.
    "prompt lookup": (one, {"prompt_lookup_num_tokens": 3, "eos_token_id": 1}),
}


def generate(model, mode, tokens=12, **more):
    """What a model writes, in one of the ways in which models do."""
    inputs, options = MODES[mode]
    torch.manual_seed(2)
    given = {"max_new_tokens": tokens, "pad_token_id": 0, "eos_token_id": None, **options, **more}
    try:
        return model.generate(**inputs(), **given)
    except ValueError as error:
        if "Cannot `crop` a `DynamicSlidingWindowLayer`" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} takes no token back from a window that is full")


def gradients(models, use_cache=False, between=lambda each: None):
    """The gradient of a loss with regard to the embedded batch, of each model; ``between`` runs before its backward."""
    inputs, found = models[0].get_input_embeddings()(batch()["input_ids"]).detach(), []
    for each in models:
        given = inputs.clone().requires_grad_()
        loss = each(inputs_embeds=given, use_cache=use_cache).logits.square().mean()
        between(each)
        loss.backward()
        found.append(given.grad)
    return found


def begin_a_text(server):
    """On a worker: as its own client, a session on somebody else's server."""
    cache = model_cache.new_cache(make("llama").config)
    server.rpc_sync().open("a text", 0, cache, api.current_agent().me.incarnation)


_of_others = set()  # the names of servers that an error of an earlier file's tests keeps


def forget_servers():
    """Leave the servers that are here now out of `servers_here`."""
    gc.collect()
    _of_others.update(servers_here())


def servers_here():
    """The servers of this process, in which all workers of a `World` are, by their names."""
    return {each.name: each for each in gc.get_objects() if type(each) is Server and each.name not in _of_others}
