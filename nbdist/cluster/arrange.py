"""Arranges the output of several workers in one place: pure, messages in, messages out.

From one worker, output goes on as it came. From several, every line says whose it is; what many workers say alike is
said once; and a progress bar has a line of its own for each worker. Where nobody watches, output is held back
until all have ended, and comes grouped by worker, in their order: the same from one run to the next.

Here is what whoever shows output needs to know of it, and what all ways of arranging share; `live` and `grouped` are
the ways for several workers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = [
    "FOLD_AFTER",
    "LEFT_OUT",
    "OUTPUT",
    "Arranger",
    "Published",
    "Straight",
    "label_of",
    "say_left_out",
    "say_names",
]

FOLD_AFTER = 0.1
"""Seconds for which a line waits for others to say the same. Always read as ``arrange.FOLD_AFTER``: it may be set."""

LEFT_OUT = "nbdist_left_out"
"""The kind of a message that stands for lines that are left out; no front end sees it."""

OUTPUT = ("stream", "display_data", "execute_result", "error", LEFT_OUT)
"""What takes a place below the cell; other messages concern what is there, or a widget."""

_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]*)")


class Published(NamedTuple):
    """A message to be shown."""

    kind: str
    content: Mapping[str, Any]
    metadata: Mapping[str, Any] = {}
    buffers: Sequence[Any] = ()


class Arranger:
    """What takes messages of workers and gives messages to be shown."""

    labels = True
    """Whether a line says whose it is."""

    def feed(self, worker: str, message: Published, now: float) -> list[Published]:
        """A message of a worker has come."""
        raise NotImplementedError

    def flush(self, now: float) -> list[Published]:
        """It is later now."""
        return []

    def next_flush(self) -> float | None:
        """When `flush` has something to do."""
        return None

    def ended(self, worker: str, now: float) -> list[Published]:
        """A worker will say no more, or nothing that others should wait for."""
        return []

    def finish(self, now: float) -> list[Published]:
        """All have ended. What comes all the same, from threads that run on, is shown too."""
        return []


class Straight(Arranger):
    """One worker's output as it comes, as if the cell had run here."""

    labels = False

    def feed(self, worker: str, message: Published, now: float) -> list[Published]:
        """Show it."""
        return [say_left_out(message, [worker]) if message.kind == LEFT_OUT else message]


def say_left_out(message: Published, workers: Sequence[str], label: str = "") -> Published:
    """Return the line that says how many lines of these workers are left out, and how to see them."""
    lines, cell = message.content["lines"], message.content["cell"]
    text = f"{lines:,} lines left out: `%dist_log {say_names(workers)} --cell {cell}`"
    return Published("stream", {"name": "stdout", "text": f"{label}{text}\n"})


def say_names(names: Sequence[str]) -> str:
    """``worker0``, ``worker0,2``, ``worker0-3``: several names in few letters."""
    if len(names) == 1:
        return names[0]
    parts = [_NUMBERED.fullmatch(name) for name in names]
    prefixes = {part[1] for part in parts if part}
    if not all(parts) or len(prefixes) != 1:
        return ",".join(names)
    numbers = sorted({int(part[2]) for part in parts if part})
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    said = [f"{span[0]}-{span[-1]}" if len(span) > 2 else ",".join(map(str, span)) for span in spans]
    return prefixes.pop() + ",".join(said)


@functools.lru_cache(maxsize=256)
def label_of(names: tuple[str, ...]) -> str:
    """``[worker0-3]``: what stands before a line that they said."""
    return f"[{say_names(names)}]"
