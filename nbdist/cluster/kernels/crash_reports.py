"""Reads what a process wrote to standard error before it died, and returns the lines that say why. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbdist.code_places import is_of_cell, is_users

_LINES = 5
_GLOO_CONNECTS = "[Gloo] Rank "  # torch 2.10 writes such a line when a process group forms
_PYTHON = re.compile(r"Fatal Python error[^\n]*")
_CPLUSPLUS = re.compile(r"terminate called (?:(?!Fatal Python)[^\n])*")
_WHAT = re.compile(r"^ *what\(\):[^\n]*", re.MULTILINE)  # the text of an error of C++
_THREAD = re.compile(r"\(most recent call first\):\n(?:(?!\n\n).)*", re.DOTALL)
_FRAME = re.compile(r'^ +File "([^"]+)", line \d+ in .*$', re.MULTILINE)
# The words with which gloo ends the process that receives more bytes than it expects.
_SAID = re.compile(r"this one expected (\d+) bytes and was sent (\d+)")
_TOO_LONG = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")


def lines_that_say_why(text: str, other: Sequence[str]) -> list[str]:
    """Return the lines of a process's standard error that say why it died."""
    # Of a crash report of Python or C++, its reasons and the lines of the user's code; otherwise the last lines.
    # Two writers share the file, so that the text of one may stand in a line of the other.
    matches = [pattern.search(text) for pattern in (_PYTHON, _CPLUSPLUS, _WHAT)]
    reasons = [match[0] for match in matches if match]
    if not reasons:
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith(_GLOO_CONNECTS)]
        return (lines or list(other))[-_LINES:]
    if found := _TOO_LONG.search(text):
        received, expected = found.groups()
        said = "gloo: the workers gave tensors of different sizes to a collective"
        reasons.insert(0, f"{said}: this one expected {expected} bytes and was sent {received}")
    # The stack of the thread with code of a cell, if there is one; else the first.
    threads = [[each for each in _FRAME.finditer(thread[0]) if is_users(each[1])] for thread in _THREAD.finditer(text)]
    shown = max(threads, key=lambda frames: any(is_of_cell(each[1]) for each in frames), default=[])
    return reasons + [each[0] for each in shown[:_LINES]]


def share_expected(why: str) -> float | None:
    """Return the share that a worker expected of the bytes that gloo sent to it; None if it did not die of them."""
    found = _SAID.search(why)
    return int(found[1]) / int(found[2]) if found else None
