"""`TextAnswer`: the JSON of an answer, whole and in chunks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbdist.swarm.http.request import TextRequest
from nbdist.swarm.http.writing import Piece, TokenScore

_IMPOSSIBLE = -9999.0  # in place of the log of 0, which JSON cannot have


class TextAnswer:
    """Makes the JSON of one request's answer. ``identity`` is its id without prefix, ``created`` a Unix time."""

    def __init__(self, request: TextRequest, identity: str, created: int, prompt_tokens: int) -> None:
        self._request = request
        self._began: set[int] = set()
        prefix, kind = ("chatcmpl", "chat.completion") if request.chat else ("cmpl", "text_completion")
        kind += ".chunk" if request.chat and request.stream else ""
        self._head = {"id": f"{prefix}-{identity}", "object": kind, "created": created, "model": request.model}
        self.usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 0, "total_tokens": prompt_tokens}
        """The tokens of the prompts, and those of all pieces that were added."""

    def whole(self, pieces: Sequence[tuple[int, Piece]]) -> dict[str, Any]:
        """Return the answer with all pieces of all texts, each with the number of its text."""
        choices = []
        for number in sorted({number for number, _ in pieces}):
            own = [piece for each, piece in pieces if each == number]
            text = "".join(piece.text for piece in own)
            message = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append(self._choice(number, message if self._request.chat else {"text": text}, own))
        return {**self._head, "choices": choices, "usage": self.usage}

    def chunk(self, number: int, piece: Piece) -> dict[str, Any]:
        """Return the next chunk of a stream, with a piece of a text."""
        delta = {"content": piece.text} if number in self._began else {"role": "assistant", "content": piece.text}
        self._began.add(number)
        choice = self._choice(number, {"delta": delta} if self._request.chat else {"text": piece.text}, [piece])
        return {**self._head, "choices": [choice], **({"usage": None} if self._request.include_usage else {})}

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return the chunk that ends a stream whose client wants to know the tokens."""
        return [{**self._head, "choices": [], "usage": self.usage}] if self._request.include_usage else []

    def _choice(self, number: int, text: dict[str, Any], pieces: Sequence[Piece]) -> dict[str, Any]:
        self.usage["completion_tokens"] += len(pieces)
        self.usage["total_tokens"] += len(pieces)
        show = _chat_logprobs if self._request.chat else _text_logprobs
        scores = [piece.score for piece in pieces if piece.score is not None]
        logprobs = None if self._request.logprobs is None else show(scores)
        return {"index": number, **text, "logprobs": logprobs, "finish_reason": pieces[-1].finish}


def _chat_logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    def entry(text: str, logprob: float) -> dict[str, Any]:
        whole = "\N{REPLACEMENT CHARACTER}" not in text  # else the token ends within a character
        return {"token": text, "logprob": max(logprob, _IMPOSSIBLE), "bytes": list(text.encode()) if whole else None}

    content = [{**entry(each.text, each.logprob), "top_logprobs": [entry(*top) for top in each.top]} for each in scores]
    return {"content": content, "refusal": None}


def _text_logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    return {
        "tokens": [score.text for score in scores],
        "token_logprobs": [max(score.logprob, _IMPOSSIBLE) for score in scores],
        "top_logprobs": [_by_text(score.top) for score in scores],
        "text_offset": [score.begin for score in scores],
    }


def _by_text(top: Sequence[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text, logprob in top:  # of tokens with one text, such as parts of characters, the most probable comes first
        found.setdefault(text, max(logprob, _IMPOSSIBLE))
    return found
