"""Arranges the output of several workers in one place. Pure: messages go in, messages to show come out.

Three arrangers do this; `nbdist.cluster.output.outlet.make_arranger` picks one::

    Straight   one worker            messages pass as they come
    Live       several, watched      every line gets its worker's name; identical lines are shown once; each worker
                                     has a line of its own for its progress bar
    LogOrder   several, not watched  all output is held back to the end and shown by worker, in the workers' order, so
                                     that it is the same from one run to the next

This module holds the interface of the arrangers, `Straight`, and the helpers that all share.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from nbdist.amounts import counted

_Thing = TypeVar("_Thing")
_Key = TypeVar("_Key", bound=Hashable)

FOLD_AFTER = 0.1
"""Seconds that a line waits for other workers to print the same. Read it as ``arranger.FOLD_AFTER``: tests set it."""

LEFT_OUT = "nbdist_left_out"
"""The kind of an internal message that stands for lines left out; front ends get `say_left_out` in its place."""

OUTPUT = ("stream", "display_data", "execute_result", "error", LEFT_OUT)
"""The message kinds that take a place below the cell. Other messages change existing output, or concern a widget."""

_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]*)")  # a name that ends in a number without leading zeros


class Published(NamedTuple):
    """A Jupyter message to show: its type, content, metadata and buffers."""

    kind: str
    content: Mapping[str, Any]
    metadata: Mapping[str, Any] = {}
    buffers: Sequence[Any] = ()


def stream_text(stream: str, text: str) -> Published:
    """Return the message that shows a text as printed to ``stream``: "stdout" or "stderr"."""
    return Published("stream", {"name": stream, "text": text})


class Arranger:
    """Takes messages of workers, and returns the messages to show. ``now`` is in seconds, of any one clock.

    The caller asks for `next_flush` after each call of another method, and calls `flush` at that time. Threads that the
    cell has left running may print after `ended` and `finish`, so `feed` may be called afterwards, too.
    """

    labels = True  # False if the output is shown without the workers' names

    def feed(self, worker: str, message: Published, now: float) -> list[Published]:
        """Take a message of a worker; return what to show now: perhaps without this message, and with earlier ones."""
        raise NotImplementedError

    def flush(self, now: float) -> list[Published]:
        """Return the messages that are due at the time ``now``; harmless before `next_flush`."""
        return []

    def next_flush(self) -> float | None:
        """Return when `flush` is due next; None if nothing waits."""
        return None

    def ended(self, worker: str, now: float) -> list[Published]:
        """Note that a worker has ended the cell, so that no line waits for it; return what to show now."""
        return []

    def finish(self, now: float) -> list[Published]:
        """Return everything that was held back: all workers have ended."""
        return []


class Straight(Arranger):
    """Shows one worker's output as it comes, without its name, as if the cell had run in the notebook's kernel."""

    labels = False

    def feed(self, worker: str, message: Published, now: float) -> list[Published]:
        """Return the message as it is; a message that stands for lines left out becomes a line that says so."""
        return [say_left_out(message, [worker]) if message.kind == LEFT_OUT else message]


def say_left_out(message: Published, workers: Sequence[str], label: str = "") -> Published:
    """Return the line that says how many lines of these workers are left out, and which magic shows them."""
    lines, cell = message.content["lines"], message.content["cell"]
    text = f"{counted(lines, 'line')} left out: `%dist_log {say_names(workers)} --cell {cell}`"
    return stream_text("stdout", f"{label}{text}\n")


def say_names(names: Sequence[str]) -> str:
    """Return several workers' names as a short text, with ranges of their numbers.

    Names with different prefixes, or without a number, are listed in full.

    Example:
        >>> say_names(["worker0", "worker1", "worker2", "worker5"])
        'worker0-2,5'
    """
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


def say_members(names: Sequence[str]) -> str:
    """Return the names of members as a short text: others than workers in full, then workers as `say_names` does.

    Example:
        >>> say_members(["notebook", "worker0", "worker1", "worker2"])
        'notebook, worker0-2'
    """
    numbered = [name for name in names if name[-1:].isdigit()]
    others = [name for name in names if not name[-1:].isdigit()]
    return ", ".join([*others, *([say_names(numbered)] if numbered else [])])


def grouped(things: Iterable[_Thing], key: Callable[[_Thing], _Key]) -> dict[_Key, list[_Thing]]:
    """Return things in groups with equal keys, by the key, in the order of each group's first.

    Example:
        >>> said = {"worker0": "x", "worker1": "y", "worker2": "x"}
        >>> [f"{say_names(names)}: {text}" for text, names in grouped(said, said.get).items()]
        ['worker0,2: x', 'worker1: y']
    """
    groups: dict[_Key, list[_Thing]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


@functools.lru_cache(maxsize=256)
def label_of(names: tuple[str, ...]) -> str:
    """Return the label before a line that these workers printed, such as ``[worker0-3]``."""
    return f"[{say_names(names)}]"
