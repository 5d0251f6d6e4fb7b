"""`CodeLine`: a line of code at which a thread stands, as users read it, from whatever source it is known.

============================  ================================================
known from                    made by
============================  ================================================
frames of this process        `nbdist.thread_frames.lines_of`
frames that faulthandler has  `nbdist.cluster.jupyter.labels.read_frames`
written in a worker
torch's flight recorder       `nbdist.cluster.worker.flight_recorder`
============================  ================================================
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nbdist.code_places import is_of_cell, is_users, shown_name

LINE_SHOWN = 60
"""The most characters of a line of code that are shown."""


class CodeLine(NamedTuple):
    """A line of code. As text, ``In[3]:2 in train: loss.backward()``, without what is not known of it."""

    file: str
    number: int
    function: str

    @property
    def place(self) -> str:
        """The file by the name that readers know, and the number: ``In[3]:2``."""
        return f"{shown_name(self.file)}:{self.number}"

    @property
    def text(self) -> str:
        """The code of the line, cut after `LINE_SHOWN` characters; empty if this process cannot read it."""
        return linecache.getline(self.file, self.number).strip()[:LINE_SHOWN]

    @property
    def function_and_line(self) -> str:
        """The place in words, with the whole name of a file: ``train, line 2 of In[3]``."""
        file = shown_name(self.file) if is_of_cell(self.file) else self.file
        return f"{self.function}, line {self.number} of {file}"

    def __str__(self) -> str:
        inside = f" in {self.function}" if self.function != "<module>" else ""
        return f"{self.place}{inside}" + (f": {text}" if (text := self.text) else "")


def users_lines(lines: Iterable[CodeLine]) -> Iterator[CodeLine]:
    """Yield the lines of the user's code among these, in the same order."""
    return (each for each in lines if is_users(each.file))
