r"""Turns a worker's line into the line that a terminal would show: carriage returns applied, colours closed. Pure.

::

    written                  shown
    "10%\r50%\r100%"         "100%"                 `overlaid`: later text covers earlier text
    "done   \r     "         ""                     `as_seen`: without the blanks that wiped the text
    "\x1b[31mred"            "\x1b[31mred\x1b[0m"    `close_colours`: the next line begins with \x1b[31m

A worker's line is shown between the lines of other workers, and later than it was written. So it must not move the
cursor, and must not colour the lines after it.
"""

from __future__ import annotations

import re
from collections import deque

# After a carriage return, a terminal overwrites the line's characters. A piece is a character or an escape sequence.
_PIECE = re.compile(r"\x1b\[([0-9;?]*)([@-~])|.", re.DOTALL)


def overlaid(line: str) -> str:
    """Return a line as it looks after its carriage returns; colours stay with their letters."""
    if "\r" not in line:
        return line
    if "\x1b" in line:
        return _overlaid_in_colour(line)
    shown = ""
    for part in line.split("\r"):
        shown = part + shown[len(part) :]
    return shown


def _overlaid_in_colour(line: str) -> str:
    """Return a line with colours as it looks after its carriage returns."""
    shown: list[str] = []  # each letter with the escape sequences before it, which have no width
    for part in line.split("\r"):
        at, pending = 0, ""
        for piece in _PIECE.finditer(part):
            # "ESC [ K" wipes the rest of the line, "ESC [ 2 K" all of it; other sequences stay before the next letter.
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
    """Return a line as `overlaid` does, without the trailing blanks by which programs wipe a longer text."""
    return overlaid(line).rstrip() if "\r" in line else line


_COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
_ENDED_BY = {1: 22, 2: 22, 3: 23, 4: 24, 5: 25, 6: 25, 7: 27, 8: 28, 9: 29}
"""The codes of text attributes, such as bold (1), with the code that ends each. Colours end by 39 and 49."""


def close_colours(line: str, open: dict[int, str]) -> str:
    """Return a line that begins in the colours that are ``open`` and closes its colours at its end."""
    # ``open`` maps the code that ends a colour or attribute (39 for the text colour) to the code that set it (31 for
    # red). It is changed to the state after this line, for the next line of the same stream.
    if not open and "\x1b" not in line:
        return line
    begin = f"\x1b[{';'.join(open.values())}m" if open else ""
    for match in _COLOUR.finditer(line):
        codes = deque(match[1].split(";"))
        while codes:
            text = codes.popleft()
            code = int(text or 0)
            if code in (38, 48) and codes:  # the colour follows, as one number or as three
                length = 2 if codes[0] == "5" else 4
                text = ";".join([text, *(codes.popleft() for _ in range(min(length, len(codes))))])
            # 0 ends everything; 22 to 29, 39 and 49 end one thing; the other codes begin something.
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
