"""Reads the frames of a worker's main thread, which the worker's launcher has asked for (`Launcher.probe`)."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Frame", "read_frames"]

_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class Frame(NamedTuple):
    """One frame: its file, the line number, and the name of the function."""

    file: str
    line: int
    function: str


def read_frames(text: str) -> list[Frame]:
    """Return the frames, innermost first, in a text that Python's faulthandler has written; [] for an empty text."""
    return [Frame(name, int(line), function) for name, line, function in _FRAME.findall(text)]
