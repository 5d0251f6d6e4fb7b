"""`TokenTexts`: the text of tokens that come one by one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BEFORE, _MOST = 5, 20  # tokens before a new one with which it is decoded: at least, at most
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Decodes tokens. The text of a token that ends within a character comes with the token that completes it.

    ``prompt`` has the tokens before the text: decoded alone, the first token might lose the space at its begin.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(prompt[-_BEFORE:])
        self._done = decode(self._tokens)  # the text of these tokens that was returned

    def add(self, token: int) -> str:
        """Return the text that the next token completes; "" if a character is still incomplete."""
        self._tokens.append(token)
        whole = self._decode(self._tokens)
        return "" if whole.endswith(_INCOMPLETE) else self._rest(whole)

    def end(self) -> str:
        """Return the text of the tokens left, with a replacement character for each incomplete one."""
        return self._rest(self._decode(self._tokens))

    def _rest(self, whole: str) -> str:
        found = whole[len(self._done) :]
        self._done = whole
        if len(self._tokens) > _MOST:
            del self._tokens[:-_BEFORE]
            self._done = self._decode(self._tokens)
        return found
