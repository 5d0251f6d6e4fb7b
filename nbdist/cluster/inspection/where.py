"""Finds out where a worker's main thread is, even while the worker holds the GIL and so cannot answer an RPC.

A signal makes the worker write its frames to a file in the run directory; the handler needs no GIL. `Question` sends
the signal and reads the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import NamedTuple

from nbdist.cluster.worker.kernel import WHERE_SIGNAL, where_file
from nbdist.code_places import is_of_cell

__all__ = ["ANSWER_WITHIN", "POLL", "Frame", "Question"]

ANSWER_WITHIN = 0.3
"""Seconds to wait for the frames."""
POLL = 0.005
"""Seconds between two looks at the file."""
_LARGE = 1 << 18
"""Bytes of the file above which it is emptied first: each question appends to it."""
_ENDS = ("in <module>\n", "  ...\n")
"""The last line of an answer: the outermost frame, or faulthandler's mark that there are more frames."""
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


class Question:
    """A question to one worker, which the constructor sends. All methods raise OSError if the file cannot be read.

    ``folder`` is the run directory, and ``send(worker, number)`` sends a signal to a worker's process: `Cluster.folder`
    and `Cluster.signal`. Does not wait. Look at `answered` every `POLL` seconds, for `ANSWER_WITHIN` seconds at most: a
    worker that is stopped, or has died, never answers.
    """

    def __init__(self, folder: str, worker: str, send: Callable[[str, int], None]) -> None:
        self._path = where_file(folder, worker)
        if os.path.getsize(self._path) > _LARGE:
            os.truncate(self._path, 0)
        self._before = os.path.getsize(self._path)
        send(worker, WHERE_SIGNAL)

    @property
    def answered(self) -> bool:
        """Return whether the worker has written all its frames; faulthandler writes 100 of them at most."""
        return self._read_answer().endswith(_ENDS)

    def frames(self) -> list[Frame]:
        """Return the frames that the worker has written so far, innermost first."""
        return [Frame(name, int(line), function) for name, line, function in _FRAME.findall(self._read_answer())]

    def _read_answer(self) -> str:
        """Return the text that the worker has written to its file (`where_file`) since the question: its frames.

        Empty before it writes anything, and without the last lines while it still writes: see `answered`.
        """
        with open(self._path, errors="replace") as file:
            file.seek(self._before)
            return file.read()
