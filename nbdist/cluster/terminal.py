"""How a line looks on a terminal, after its carriage returns and in its colours.

A line of a worker is shown among those of others, under a name, and later than it was written: so it must not move the
cursor, and must not leave a colour behind.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping

__all__ = ["as_seen", "close_colours", "overlaid"]

# What a terminal does with a carriage return: it writes over what is there, letter by letter.
_PIECE = re.compile(r"\x1b\[([0-9;?]*)([@-~])|.", re.DOTALL)


def overlaid(line: str) -> str:
    """A line as it looks after its carriage returns."""
    if "\r" not in line:
        return line
    if "\x1b" in line:
        return _overlaid_in_colour(line)
    shown = ""
    for part in line.split("\r"):
        shown = part + shown[len(part) :]
    return shown


def _overlaid_in_colour(line: str) -> str:
    shown: list[str] = []  # each letter, with the escape sequences before it, which take no place
    for part in line.split("\r"):
        at, pending = 0, ""
        for piece in _PIECE.finditer(part):
            if piece[2] == "K":
                del shown[0 if piece[1] == "2" else at :]
                shown += [" "] * (at - len(shown))
            elif piece[2] is not None:
                pending += piece[0]
            else:
                shown[at : at + 1] = [pending + piece[0]]
                at, pending = at + 1, ""
        if at < len(shown):
            shown[at] = pending + shown[at]
        elif shown:
            shown[-1] += pending
    return "".join(shown)


def as_seen(line: str) -> str:
    """It without the blanks with which it was written over."""
    return overlaid(line).rstrip() if "\r" in line else line


_COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
_ENDED_BY = {1: 22, 2: 22, 3: 23, 4: 24, 5: 25, 6: 25, 7: 27, 8: 28, 9: 29}


def close_colours(line: str, open: dict[int, str]) -> str:
    """A line in the colours that are ``open``, which it changes, and closed, lest others' lines be coloured by it."""
    if not open and "\x1b" not in line:
        return line
    begin = _set_colours(open)
    for match in _COLOUR.finditer(line):
        codes = deque(match[1].split(";"))
        while codes:
            text = codes.popleft()
            code = int(text or 0)
            if code in (38, 48) and codes:  # with an argument of 1 number, or of 3
                length = 2 if codes[0] == "5" else 4
                text = ";".join([text, *(codes.popleft() for _ in range(min(length, len(codes))))])
            if code == 0:
                open.clear()
            elif 22 <= code <= 29 or code in (39, 49):
                open.pop(code, None)
            elif 30 <= code <= 38 or 90 <= code <= 97:
                open[39] = text
            elif 40 <= code <= 48 or 100 <= code <= 107:
                open[49] = text
            elif code in _ENDED_BY:
                open[_ENDED_BY[code]] = text
    return f"{begin}{line}\x1b[0m" if open and line else f"{begin}{line}" if line else line


def _set_colours(open: Mapping[int, str]) -> str:
    return f"\x1b[{';'.join(open.values())}m" if open else ""
