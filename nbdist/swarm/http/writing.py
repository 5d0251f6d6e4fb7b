"""`Writing`: writes one text by the model's ``generate()``, and picks its tokens.

``generate`` runs as it does without HTTP, so a text with temperature 0 is that of ``generate(do_sample=False)``. Tokens
are picked here, in a logits processor, because ``generate`` samples with torch's global random numbers: two texts at
once would take each other's::

    model ─► scores ─► pick: temperature, top_p, the text's own generator ─► the token alone has a score ─► generate
                         │ its text and probability
                         ▼
                       tell(Piece)                  is_done: end of text, stop text, number of tokens, or hung up
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.swarm import adapter
from nbdist.swarm.http.request import TextRequest
from nbdist.swarm.http.stop_texts import StopTexts
from nbdist.swarm.http.token_texts import TokenTexts


@dataclass(frozen=True)
class TokenScore:
    """A token that was picked, and the most probable tokens in its place: texts with the log of their probability."""

    text: str
    logprob: float
    top: list[tuple[str, float]]
    begin: int  # characters of the text before it


@dataclass(frozen=True)
class Piece:
    """The next token of a text, and what it adds to the text: nothing while a stop text may have begun."""

    text: str
    score: TokenScore | None  # if the client wants it
    finish: str | None = None  # "stop" or "length" for the last token


class Writing:
    """Text ``number`` of a request for a prompt, with up to ``most`` tokens. A thread of its own calls `run`."""

    def __init__(self, request: TextRequest, tokenizer: Any, prompt: Sequence[int], most: int, number: int) -> None:
        self._request, self._tokenizer, self._prompt = request, tokenizer, prompt
        self._texts = TokenTexts(self._decode, prompt)
        self._stops = StopTexts(request.stop)
        self._generator = torch.Generator()
        if request.seed is None:
            self._generator.seed()
        else:  # each of n texts has a seed of its own
            self._generator.manual_seed((request.seed + number) % 2**63)
        self._left = most  # tokens
        self._length = 0  # characters of the text
        self._finish: str | None = None

    def run(self, model: Any, tell: Callable[[Piece], None], halted: Callable[[], bool]) -> None:
        """Write the text; return when its last piece was told, or soon after ``halted`` is true. Raises its errors."""
        config = copy.deepcopy(model.generation_config)
        if config.eos_token_id is None:
            config.eos_token_id = self._tokenizer.eos_token_id
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        config.pad_token_id = 0  # no text is padded
        config.max_new_tokens, config.max_length = self._left, None
        config.do_sample, config.num_beams, config.num_return_sequences = False, 1, 1
        config.temperature = config.top_p = config.top_k = config.stop_strings = None
        warp = adapter.sampling_warper(self._request.temperature, self._request.top_p)

        def pick(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            token = int(scores.argmax())
            if warp is not None:
                token = int(torch.multinomial(warp(ids, scores)[0].softmax(-1), 1, generator=self._generator))
            tell(self._add(token, scores[0], token in ends))
            if warp is not None:
                scores = scores.fill_(-torch.inf)
                scores[0, token] = 0.0
            return scores

        def is_done(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((1,), self._finish is not None or halted())

        ids = torch.tensor([self._prompt])
        options = {"logits_processor": [pick], "stopping_criteria": [is_done], "generation_config": config}
        if (passage := getattr(model, "nbdist", None)) is not None:  # a swarm's; the notes are this thread's
            passage.notes.halted = halted
        if not halted():
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        if self._finish is None:  # halted, or ended by the model's configuration, such as its `max_time`
            tell(Piece(self._texts.end() + self._stops.end(), None, "stop"))

    def _add(self, token: int, scores: torch.Tensor, is_end: bool) -> Piece:
        self._left -= 1
        self._finish = "stop" if is_end else "length" if not self._left else None
        score = None
        if self._request.logprobs is not None and not is_end:
            score = self._score(token, scores.float().log_softmax(-1), self._request.logprobs)
        text = ("" if is_end else self._texts.add(token)) + (self._texts.end() if self._finish else "")
        self._length += len(text)
        text = self._stops.add(text)
        if self._stops.found:
            self._finish = "stop"
        elif self._finish:
            text += self._stops.end()
        return Piece(text, score, self._finish)

    def _score(self, token: int, logprobs: torch.Tensor, top: int) -> TokenScore:
        values, tokens = logprobs.topk(min(top, len(logprobs)))
        others = [(self._decode([each]), value) for each, value in zip(tokens.tolist(), values.tolist(), strict=True)]
        return TokenScore(self._decode([token]), float(logprobs[token]), others, self._length)

    def _decode(self, tokens: Sequence[int]) -> str:
        found = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(found)
