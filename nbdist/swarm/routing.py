"""Which servers a session goes through, and who takes a span that nobody has any more. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nbdist.errors import NbdistError

__all__ = ["NoRoute", "Span", "assign", "cut", "route"]


class NoRoute(NbdistError):
    """Some blocks are with nobody."""


class Span(NamedTuple):
    """Blocks that follow each other, and who has them."""

    server: str
    begin: int
    end: int


def cut(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Where to cut a row of blocks, so that the largest part is as small as can be."""
    parts = min(parts, len(sizes))
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_packed(sizes, middle, parts)) <= parts:
            high = middle
        else:
            low = middle + 1
    return _packed(sizes, low, parts)


def _packed(sizes: Sequence[int], most: int, parts: int) -> list[tuple[int, int]]:
    """Parts of at most this size, from the left; as many blocks stay as there are parts to come."""
    found: list[tuple[int, int]] = []
    begin, size = 0, 0
    for number, each in enumerate(sizes):
        needed = parts - len(found) - 1  # behind this part
        if number > begin and (size + each > most or len(sizes) - number <= needed):
            found.append((begin, number))
            begin, size = number, 0
        size += each
    return [*found, (begin, len(sizes))]


def route(blocks: Mapping[str, Sequence[int]], begin: int, end: int) -> list[Span]:
    """A way through these blocks that changes the server as seldom as can be; NoRoute names what nobody has."""
    held = {server: set(numbers) for server, numbers in blocks.items()}
    found: list[Span] = []
    at = begin
    while at < end:
        reach = {server: _reach(numbers, at, end) for server, numbers in held.items()}
        best = max(reach, key=lambda server: reach[server], default=None)
        if best is None or reach[best] == at:
            raise NoRoute(f"nobody has block {at}")
        found.append(Span(best, at, reach[best]))
        at = reach[best]
    return found


def _reach(numbers: set[int], begin: int, end: int) -> int:
    at = begin
    while at < end and at in numbers:
        at += 1
    return at


def assign(blocks: Mapping[str, Sequence[int]], begin: int, end: int) -> list[Span]:
    """Who is to take which of these blocks that nobody has: always whoever has the fewest."""
    known = {number for numbers in blocks.values() for number in numbers}
    missing = [number for number in range(begin, end) if number not in known]
    if not missing:
        return []
    if not blocks:
        raise NoRoute(f"nobody is left to take block {missing[0]}")
    count = {server: len(numbers) for server, numbers in blocks.items()}
    runs: list[list[int]] = []
    for number in missing:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    found = []
    for run in runs:
        server = min(count, key=lambda name: count[name])
        count[server] += len(run)
        found.append(Span(server, run[0], run[-1] + 1))
    return found
