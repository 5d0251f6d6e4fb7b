"""`StopTexts`: cuts a text that comes in pieces before the first stop text. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Passes a text on, except for an end that may be the begin of a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._kept = ""
        self.found = False

    def add(self, text: str) -> str:
        """Return what may be passed on, now that ``text`` has come. `found` is True from the first stop text on."""
        text = self._kept + text
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found, self._kept = True, ""
            return text[: min(ends)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._kept = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """Return what was kept: the text is over, and no stop text has come."""
        text, self._kept = self._kept, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` with which ``stop`` begins."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
