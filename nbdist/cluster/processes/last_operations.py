"""Keeps the last operations of a worker's process groups in memory that survives the worker, and says them.

The memory is an anonymous file. The worker writes it, and has given it to the zygote (`nbdist.cluster.processes.
last_words`), which appends the text in it to the worker's log when the worker is dead. A file of the run directory
would do, too, but on a full disk a write to mapped memory may end the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re

from nbdist.amounts import size
from nbdist.channel.after_fork import call_forked
from nbdist.cluster.processes.process_memory import resident

_KEPT = 8
_LETTERS = 256  # bytes for each of them
_MEASURE_EVERY = 0.1  # seconds between two looks at the memory, each of which takes 20 µs
CALLED_LAST = "it called last: "
"""Begins the line that `split_off` returns."""
_LINE = re.compile(r"^@nbdist-operation (\d+) (\d+) (.*?) *$\n?", re.MULTILINE)


class LastOperations:
    """The last operations of this process."""

    def __init__(self) -> None:
        # If the system, or this build of Python, has no such file, the memory is this process's alone.
        self.file, self._memory = -1, mmap.mmap(-1, _KEPT * _LETTERS)
        with contextlib.suppress(AttributeError, OSError):
            file = os.memfd_create("nbdist-operations", os.MFD_CLOEXEC)
            os.ftruncate(file, _KEPT * _LETTERS)
            self._memory, self.file = mmap.mmap(file, _KEPT * _LETTERS), file
        self._memory[:] = b" " * _KEPT * _LETTERS
        self._next, self._resident, self._measured = 0, 0, 0.0
        call_forked(self)

    def forked(self) -> None:
        """Leave the memory to the parent: a forked process notes its operations in memory of its own."""
        self._memory = mmap.mmap(-1, _KEPT * _LETTERS)

    def note(self, now: float, text: bytes) -> None:
        """Note an operation at the time ``now``, by `time.time`. Takes about a microsecond."""
        if now - self._measured > _MEASURE_EVERY:
            self._measured, self._resident = now, resident()
        line = b"\n@nbdist-operation %d %d %s" % (now * 1000, self._resident, text)
        at = self._next * _LETTERS
        self._memory[at : at + _LETTERS] = line[:_LETTERS].ljust(_LETTERS)
        self._next = (self._next + 1) % _KEPT


def split_off(log: str, now: float | None) -> tuple[str, str]:
    """Return a dead worker's log without its last operations, and a line about these; ``now`` is by its clock."""
    found = sorted((int(at) / 1000, int(memory), text) for at, memory, text in _LINE.findall(log))
    if not found:
        return log.strip(), ""
    at, memory, last = found[-1]
    when = f", {max(0.0, now - at):.0f} s before" if now is not None else ""
    earlier = list(dict.fromkeys(text for *_, text in reversed(found) if text != last))[:2]
    more = (f", with {size(memory)}" if memory else "") + (f"; before that {', '.join(earlier)}" if earlier else "")
    return _LINE.sub("", log).strip(), f"{CALLED_LAST}{last}{when}{more}"
