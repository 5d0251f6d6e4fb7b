"""Reads the frames of a worker's main thread, which the worker's launcher has asked for (`Launcher.probe`)."""

from __future__ import annotations

import re
from typing import NamedTuple

from nbdist.code_places import NBDIST, is_of_cell

_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class Frame(NamedTuple):
    """One frame: its file, the line number, and the name of the function."""

    file: str
    line: int
    function: str

    @property
    def in_cell(self) -> bool:
        """Return whether the code of this frame is a cell's."""
        return is_of_cell(self.file)


def read_frames(text: str) -> list[Frame]:
    """Return the frames but nbdist's, innermost first, in a text of Python's faulthandler; [] for an empty text."""
    found = _FRAME.findall(text)
    return [Frame(name, int(line), function) for name, line, function in found if not name.startswith(NBDIST)]
