"""`TokenTexts`: the text of tokens that come one by one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BEFORE, _MOST = 5, 20  # tokens before a new one with which it is decoded: at least, at most
_SIZES = range(_BEFORE, _BEFORE + 4)  # a character has 4 tokens at most, so one of these begins between two characters
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Decodes tokens. The text of a token that ends within a character comes with the token that completes it.

    ``prompt`` has the tokens before the text: decoded alone, the first token might lose the space at its begin.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        begins = [list(prompt[-size:]) for size in _SIZES]
        self._tokens = next((each for each in begins if not self._is_cut(decode(each))), begins[0])
        self._done = decode(self._tokens)  # the text of these tokens that was returned
        self._new = 0  # tokens whose text was not returned

    def add(self, token: int) -> str:
        """Return the text that the next token completes; "" if a character is still incomplete."""
        self._tokens.append(token)
        self._new += 1
        whole = self._decode(self._tokens)
        return "" if whole.endswith(_INCOMPLETE) else self._rest(whole)

    def end(self) -> str:
        """Return the text of the tokens left, with a replacement character for each incomplete one."""
        return self._rest(self._decode(self._tokens))

    def _rest(self, whole: str) -> str:
        found = whole[len(self._done) :]
        if not whole.startswith(self._done.rstrip(_INCOMPLETE)):
            # A decoder of byte tokens gives up all characters of a run if one of them is incomplete.
            found = self._decode(self._tokens[-self._new :])
        self._done, self._new = whole, 0
        if len(self._tokens) > _MOST:
            for size in _SIZES:
                text = self._decode(self._tokens[-size:])
                if whole.endswith(text) and not self._is_cut(text):
                    del self._tokens[:-size]
                    self._done = text
                    break
        return found

    @staticmethod
    def _is_cut(text: str) -> bool:
        """Return whether tokens with this text begin within a character."""
        return text.startswith(_INCOMPLETE)
