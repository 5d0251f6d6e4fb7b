"""Finds the code for workers in a cell's text, for completion (Tab) and inspection (Shift-Tab). Runs nothing."""

from __future__ import annotations

import re
from typing import NamedTuple

from nbdist.cluster.cluster import Cluster
from nbdist.cluster.kernels.workers import Worker
from nbdist.errors import NbdistError
from nbdist.magics.lines import read

_FIRST_LINE = re.compile(r"\s*%%(?:remote|distributed|rank)\b([^\n]*)")
_VALUE = re.compile(r"\s*%remote\s+(?:(?:-t|--timeout)[ =]\s*\S+\s+)?(\[[^\]]*\]|[^\s\[]+)\s+")


class RemoteCode(NamedTuple):
    """The part of a cell that runs on workers, and the cursor in it."""

    line: str
    """The text after the magic's name: the target and options."""
    code: str
    """The code for workers."""
    cursor: int
    """The place of the cursor in the code, in characters."""

    def first_target(self) -> Worker | None:
        """Return the first worker on which the code would run; None if no cluster runs or the target is wrong."""
        if (cluster := Cluster.current) is None or not cluster.running:
            return None
        try:
            return cluster.select(read("%%remote", self.line).targets)[0]
        except NbdistError:
            return None


def find_remote_code(text: str, cursor: int) -> RemoteCode | None:
    """Return the code for workers around the cursor; None if the code at the cursor runs in the notebook."""
    if (first := _FIRST_LINE.match(text)) is not None:
        begin = first.end() + 1
        return RemoteCode(first[1], text[begin:], cursor - begin) if cursor >= begin else None
    begin = text.rfind("\n", 0, cursor) + 1
    line = text[begin:].partition("\n")[0]
    value = _VALUE.match(line)
    if value is None or cursor - begin < value.end():
        return None
    return RemoteCode(value[1], line[value.end() :], cursor - begin - value.end())
