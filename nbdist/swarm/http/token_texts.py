"""`TokenTexts`: the text of tokens that come one by one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BEFORE = 5  # tokens before a new one with which it is decoded: a space at its begin may depend on them
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Decodes tokens. The text of a token that ends within a character comes with the token that completes it.

    ``prompt`` has the tokens before the text: decoded alone, the first token might lose the space at its begin.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(prompt[-_BEFORE:])
        self._done = len(self._tokens)  # tokens whose text was returned

    def add(self, token: int) -> str:
        """Return the text that the next token completes; "" if a character is still incomplete."""
        self._tokens.append(token)
        text = self._rest()
        if text.endswith(_INCOMPLETE):
            return ""
        if text:
            # A token without text stays: the space of the next one may depend on it.
            del self._tokens[: max(0, self._done - _BEFORE)]
            self._done = len(self._tokens)
        return text

    def end(self) -> str:
        """Return the text of the tokens left, with a replacement character for each incomplete one."""
        text = self._rest()
        self._done = len(self._tokens)
        return text

    def _rest(self) -> str:
        return self._decode(self._tokens)[len(self._decode(self._tokens[: self._done])) :]
