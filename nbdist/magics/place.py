"""Finds the code for workers in a cell's text, and asks a worker about it, for Tab and Shift-Tab. Runs nothing."""

from __future__ import annotations

import asyncio
import re
from typing import Any, NamedTuple

from nbdist.cluster.cluster import Cluster
from nbdist.cluster.jupyter.kernel_connection import Message
from nbdist.cluster.kernels.workers import Worker
from nbdist.errors import NbdistError
from nbdist.magics.lines import read

ANSWER_TIMEOUT = 0.2
"""Seconds for which completion and inspection wait for a worker's kernel: the notebook's answers nothing meanwhile."""

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

    def ask(self, worker: Worker, kind: str, **more: Any) -> dict[str, Any] | None:
        """Return the content of a worker's reply about the cursor: ``kind`` is the request, ``more`` its other fields.

        None if the worker is dead or busy, or does not answer in time.
        """
        if Cluster.current is None or not worker.alive or worker.cells:  # its kernel would answer only after its cells
            return None

        async def ask() -> Message:
            assert worker.kernel is not None
            asked = worker.kernel.ask(kind, {"code": self.code, "cursor_pos": self.cursor, **more})
            return await asyncio.wait_for(asked, ANSWER_TIMEOUT)

        try:
            content: dict[str, Any] = Cluster.current.kernel_thread.run(ask()).result()["content"]
        except (TimeoutError, NbdistError):
            return None
        return content


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
