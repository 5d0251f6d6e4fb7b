"""A tokenizer whose tokens are bytes, and some longer ones, with a chat template."""

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# Like SmolLM2's: the answer ends with <|im_end|>.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END, BEGIN = "<|im_end|>", "<|im_start|>"
SIZE = 300
"""The vocabulary of a model for it; the last tokens have no text."""


def make(template=TEMPLATE):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ġ", "the"), ("i", "n"), ("o", "u")]
    vocabulary = {each: number for number, each in enumerate([END, BEGIN, *letters, *map("".join, merges)])}
    own = Tokenizer(models.BPE(vocabulary, merges))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, eos_token=END, additional_special_tokens=[BEGIN], clean_up_tokenization_spaces=False
    )
    found.chat_template = template
    return found


def model(tokens=400, **options):
    """A model with random weights for this tokenizer; its texts have up to so many tokens."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        vocab_size=SIZE,
        max_position_embeddings=tokens,
        eos_token_id=0,
        bos_token_id=None,
        initializer_range=0.5,  # scores that differ enough for texts that do
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()
