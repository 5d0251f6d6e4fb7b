"""Keeps the last lines of a text that arrives in pieces, as a terminal would show them, with their times. Pure."""

from __future__ import annotations

from collections import deque


class Tail:
    """The last ``lines`` lines that are not blank, each cut to its last ``longest`` characters.

    Of a line that is overwritten, such as a progress bar, only the newest state is kept.
    """

    def __init__(self, lines: int, longest: int) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=lines)
        self._longest = longest
        self._open = ""
        """The line that has not ended."""
        self._open_at = 0.0

    def feed(self, text: str, now: float = 0.0) -> None:
        """Take a piece of text that was written at the time ``now``; an unfinished line counts as a line."""
        *ended, rest = (self._open + text).split("\n")
        shown = (self._after_returns(line) for line in ended[-(self._lines.maxlen or 1) :])
        self._lines.extend((now, line) for line in shown if line.strip())
        self._open, self._open_at = rest[-2 * self._longest :], now

    def clear(self) -> None:
        """Drop all lines."""
        self._lines.clear()
        self._open = ""

    def timed_lines(self) -> list[tuple[float, str]]:
        """Return the lines with the times at which they were written, the unfinished line last."""
        last = self._after_returns(self._open)
        found = [*self._lines, (self._open_at, last)] if last.strip() else list(self._lines)
        return found[-(self._lines.maxlen or 1) :]

    def lines(self) -> list[str]:
        """Return the lines, the unfinished line last."""
        return [line for _, line in self.timed_lines()]

    def _after_returns(self, line: str) -> str:
        return line.rstrip("\r").rpartition("\r")[2][-self._longest :]
