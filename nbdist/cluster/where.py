"""Where the main thread of a worker is that holds the GIL, and so can answer nothing: a signal has it written down.

The handler needs no GIL; it writes the frames into a file in the run directory, which are read here.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from nbdist.cluster.worker import WHERE_SIGNAL, where_file

if TYPE_CHECKING:
    from nbdist.cluster.cluster import Cluster

__all__ = ["PATIENCE", "POLL", "Frame", "Question"]

PATIENCE = 0.3
"""Seconds in which a worker has written where it is."""
POLL = 0.005
_LARGE = 1 << 18
_ENDS = ("in <module>\n", "  ...\n")
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class Frame(NamedTuple):
    """A line of code, the function that it is in, and the file."""

    file: str
    line: int
    function: str

    @property
    def in_cell(self) -> bool:
        """Whether the code is a cell's."""
        return "ipykernel_" in self.file


class Question:
    """One worker has been asked where it is; OSError where that cannot be done."""

    def __init__(self, cluster: Cluster, worker: str) -> None:
        self._path = where_file(cluster.folder, worker)
        if os.path.getsize(self._path) > _LARGE:
            os.truncate(self._path, 0)
        self._before = os.path.getsize(self._path)
        cluster.signal(worker, WHERE_SIGNAL)

    @property
    def answered(self) -> bool:
        """Whether it has written all its frames: the outermost, or the mark that there are more than are written."""
        return self._written().endswith(_ENDS)

    def frames(self) -> list[Frame]:
        """Return the frames that it has written, innermost first."""
        return [Frame(name, int(line), function) for name, line, function in _FRAME.findall(self._written())]

    def _written(self) -> str:
        with open(self._path, errors="replace") as file:
            file.seek(self._before)
            return file.read()
