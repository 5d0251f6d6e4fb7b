"""Keeps everything that a worker has printed in files of the run directory: the newest 200 MB for each worker.

::

    worker1.printed-7     worker1.printed-8     ...     worker1.printed-16
    the oldest, which     20 MB each                    the newest, to which is appended
    is deleted next

    record:  number of the cell (4 bytes), stream (1), length (4), text in UTF-8

The kernel thread writes, and gives open files to readers. A reader can still read a file that is deleted meanwhile.
"""

from __future__ import annotations

import contextlib
import struct
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from nbdist.channel.resources import explain
from nbdist.cluster.output.terminal import as_seen

_FILES_KEPT = 10  # the most files that are kept for one worker
_FILE_BYTES = 20_000_000  # the size at which the next file is begun
_PIECE = 1 << 18  # the most characters in one record

_HEAD = struct.Struct("<IBI")
_STREAMS = ("stdout", "stderr")


class Printed(NamedTuple):
    """The lines that a worker has printed, in all cells or in one."""

    worker: str
    files: list[BinaryIO]
    """The open files, oldest first. They close when the reader drops them."""
    cell: int | None
    """The number of the cell; None for all cells."""
    dropped: int
    """The number of lines that are no longer kept; the oldest go first."""
    broken: str
    """The reason for which the log could not be written any more; "" if there was none."""

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield each line that is kept, as a terminal shows it, and the number of its cell; unfinished ones last."""
        begun: dict[tuple[int, int], str] = {}
        for file in self.files:
            file.seek(0)
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                cell, stream, length = _HEAD.unpack(head)
                if self.cell not in (None, cell):
                    file.seek(length, 1)
                    continue
                text = begun.pop((cell, stream), "") + file.read(length).decode(errors="replace")
                *whole, rest = text.split("\n")
                for line in whole:
                    yield cell, as_seen(line)
                if rest:
                    begun[cell, stream] = rest
        for (cell, _), rest in begun.items():
            yield cell, as_seen(rest)


class PrintLog:
    """The print log of one worker, through all its restarts. For the kernel thread only."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._stem = folder / f"{worker}.printed"
        self._worker = worker
        self._file: BinaryIO | None = None
        self._size = 0  # of the newest file, in bytes
        self._made = 0  # the number of files made so far
        self._lines: deque[Counter[int]] = deque()  # of each cell, for each file that is kept
        self._dropped: Counter[int] = Counter()  # the number of deleted lines of each cell
        self._broken = ""

    def write(self, cell: int, stream: str, text: str) -> None:
        """Append text that a cell has printed. If writing fails, nothing is written from then on: `Printed.broken`."""
        if self._broken:
            return
        try:
            for at in range(0, len(text), _PIECE):
                self._append(cell, stream, text[at : at + _PIECE])
        except (OSError, ValueError) as error:
            self._broken = explain(error)
            self.close()

    def _append(self, cell: int, stream: str, text: str) -> None:
        data = text.encode(errors="backslashreplace")
        if self._file is None or self._size + _HEAD.size + len(data) > _FILE_BYTES:
            self._next_file()
        assert self._file is not None
        self._file.write(_HEAD.pack(cell, stream == "stderr", len(data)) + data)
        self._size += _HEAD.size + len(data)
        self._lines[-1][cell] += text.count("\n")

    def _next_file(self) -> None:
        if self._file is not None:
            self._file.close()
        if len(self._lines) == _FILES_KEPT:
            self._path(self._made - _FILES_KEPT).unlink(missing_ok=True)
            self._dropped += self._lines.popleft()
        self._file = self._path(self._made).open("xb")
        self._made += 1
        self._size = 0
        self._lines.append(Counter())

    def _path(self, number: int) -> Path:
        return self._stem.with_name(f"{self._stem.name}-{number}")

    def read(self, cell: int | None = None) -> Printed:
        """Return the worker's lines in one cell, or in all cells, as open files. OSError if one cannot be opened."""
        try:
            if self._file is not None and not self._file.closed:
                self._file.flush()
        except OSError as error:
            self._broken = explain(error)
        first = self._made - len(self._lines)
        numbers = [first + at for at, lines in enumerate(self._lines) if cell is None or cell in lines]
        dropped = self._dropped.total() if cell is None else self._dropped[cell]
        with contextlib.ExitStack() as opened:
            files: list[BinaryIO] = [opened.enter_context(self._path(number).open("rb")) for number in numbers]
            opened.pop_all()
        return Printed(self._worker, files, cell, dropped, self._broken)

    def close(self) -> None:
        """Close the newest file. The files stay until the cluster's folder is removed."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the disk is full, and buffered text is lost
                self._file.close()
