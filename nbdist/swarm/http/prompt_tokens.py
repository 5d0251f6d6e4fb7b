"""The tokens of a prompt, or of a chat by the tokenizer's chat template."""

from __future__ import annotations

from typing import Any

from nbdist.swarm.http.api_error import ApiError
from nbdist.swarm.http.request import TextRequest

_MOST_WITHOUT_CONTEXT = 1024  # new tokens of a chat, if the model's texts may have any length


def prompt_tokens(request: TextRequest, tokenizer: Any, config: Any) -> list[tuple[list[int], int]]:
    """Return the tokens of each prompt, and how many tokens may follow. ``config`` is that of a model for texts.

    Raises `ApiError` (400) if there is no chat template, a token is unknown, or a text would be too long.
    """
    return [_check(request, _tokens(request, prompt, tokenizer), config) for prompt in request.prompts]


def _tokens(request: TextRequest, prompt: Any, tokenizer: Any) -> list[int]:
    if not request.chat:
        return list(tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)
    if not tokenizer.chat_template:
        why = "this model's tokenizer has no chat template: use /v1/completions"
        raise ApiError(400, why, "messages", "no_chat_template")
    try:
        return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])
    except Exception as error:  # a template raises errors of its own, such as for two messages of one role
        raise ApiError(400, f"the model's chat template refuses these messages: {error}", "messages") from None


def _check(request: TextRequest, tokens: list[int], config: Any) -> tuple[list[int], int]:
    param = "messages" if request.chat else "prompt"
    if not tokens or not 0 <= min(tokens) <= max(tokens) < config.vocab_size:
        raise ApiError(400, f"a prompt has one or more tokens, from 0 to {config.vocab_size - 1}", param)
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        return tokens, request.max_tokens or _MOST_WITHOUT_CONTEXT
    if len(tokens) + (request.max_tokens or 1) > context:
        why = f"a text of this model has up to {context} tokens: {len(tokens)} of the prompt, and max_tokens"
        raise ApiError(400, f"{why}={request.max_tokens}, are more", param, "context_length_exceeded")
    return tokens, request.max_tokens or context - len(tokens)
