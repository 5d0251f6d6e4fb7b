"""Which servers a session goes through, and who takes a span that nobody has any more. Pure.

A session waits for each of its steps: so it goes where it is there soonest (`route`). Of requests that do not wait for
each other each goes another way (`spread`), so that all servers have something to do.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nbdist.errors import NbdistError

__all__ = ["NoRoute", "Offer", "Span", "assign", "cut", "named", "route", "runs_of", "spread"]


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


class Offer(NamedTuple):
    """What a server has, and how fast it is."""

    blocks: Sequence[int]
    hop: float = 1e-3
    """Seconds that it takes to come to it;"""
    pace: float = 1e-3
    """and that it takes for a token in a block."""
    load: int = 0
    """Requests that it has now."""


def route(offers: Mapping[str, Offer], begin: int, end: int) -> list[Span]:
    """The way through these blocks that takes the least time; of several, one that stays as long as it can.

    NoRoute names what nobody has.
    """
    held = {server: set(offer.blocks) for server, offer in offers.items()}
    # From the end: how long it takes from each block on, if it is taken by whom, and who comes then.
    rest: dict[int, dict[str, tuple[float, str]]] = {}
    for block in range(end - 1, begin - 1, -1):
        behind = rest.get(block + 1, {})
        nearest = min(behind, key=lambda name: behind[name][0] + offers[name].hop, default="")
        found: dict[str, tuple[float, str]] = {}
        for name, offer in offers.items():
            if block not in held[name]:
                continue
            cost, then = offer.pace * (1 + offer.load), ""
            if block + 1 < end:
                over = behind[nearest][0] + offers[nearest].hop
                stays = name in behind and behind[name][0] <= over
                then = name if stays else nearest
                cost += behind[name][0] if stays else over
            found[name] = (cost, then)
        if not found:
            raise NoRoute(f"nobody has block {_first_missing(held, begin, end)}")
        rest[block] = found
    return _spans(rest, offers, held, begin, end)


def _first_missing(held: Mapping[str, set[int]], begin: int, end: int) -> int:
    known = set[int]().union(*held.values())
    return next(block for block in range(begin, end) if block not in known)


def _spans(
    rest: Mapping[int, Mapping[str, tuple[float, str]]],
    offers: Mapping[str, Offer],
    held: Mapping[str, set[int]],
    begin: int,
    end: int,
) -> list[Span]:
    if begin == end:
        return []
    costs = {name: cost + offers[name].hop for name, (cost, _) in rest[begin].items()}
    least = min(costs.values())
    name = max(
        (name for name in costs if costs[name] <= least * (1 + 1e-9)), key=lambda name: _reach(held[name], begin, end)
    )
    found = [Span(name, begin, begin + 1)]
    for block in range(begin + 1, end):
        name = rest[block - 1][name][1]
        last = found[-1]
        if last.server == name:
            found[-1] = last._replace(end=block + 1)
        else:
            found.append(Span(name, block, block + 1))
    return found


def spread(offers: Mapping[str, Offer], begin: int, end: int, choose: random.Random) -> list[Span]:
    """A way through these blocks for one of many requests: at random, so that each server has what it can bear."""
    held = {server: set(offer.blocks) for server, offer in offers.items()}
    found: list[Span] = []
    at = begin
    while at < end:
        able = [name for name in offers if at in held[name]]
        if not able:
            raise NoRoute(f"nobody has block {at}")
        weights = [1.0 / (offers[name].pace * (1 + offers[name].load)) for name in able]
        (name,) = choose.choices(able, weights)
        to = _reach(held[name], at, end)
        found.append(Span(name, at, to))
        at = to
    return found


def _reach(numbers: set[int], begin: int, end: int) -> int:
    at = begin
    while at < end and at in numbers:
        at += 1
    return at


def assign(
    blocks: Mapping[str, Sequence[int]],
    begin: int,
    end: int,
    sizes: Sequence[int] | None = None,
    room: Mapping[str, int | None] | None = None,
) -> list[Span]:
    """Who is to take which of these blocks that nobody has: always whoever has the least, and has room for it.

    ``sizes`` are those of all blocks; ``room`` is how much of them each server may have, None for any.
    """
    known = {number for numbers in blocks.values() for number in numbers}
    missing = [number for number in range(begin, end) if number not in known]
    if not missing:
        return []
    if not blocks:
        raise NoRoute(f"nobody is left to take block {missing[0]}")
    size = sizes if sizes is not None else [1] * end
    has = {server: sum(size[number] for number in numbers) for server, numbers in blocks.items()}
    found: list[Span] = []
    for run in runs_of(missing):
        found += _place(run, size, has, room or {})
    return found


def runs_of(numbers: Sequence[int]) -> list[list[int]]:
    """Numbers in rows of such as follow each other."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def named(numbers: Sequence[int]) -> str:
    """Blocks in words, shortly."""
    rows = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs_of(numbers)]
    return f"block{'' if len(numbers) == 1 else 's'} {', '.join(rows)}" if rows else "nothing"


def _place(run: list[int], size: Sequence[int], has: dict[str, int], room: Mapping[str, int | None]) -> list[Span]:
    """Whole, if that fits anywhere; else in parts, each as large as can be."""
    found: list[Span] = []
    while run:
        free = {name: room[name] - has[name] if room.get(name) is not None else None for name in has}  # type: ignore[operator]
        fits = {name: _fitting(run, size, left) for name, left in free.items()}
        most = max(fits.values())
        if not most:
            raise NoRoute(f"nobody who is left has room for block {run[0]}")
        name = min((name for name in fits if fits[name] == most), key=lambda name: has[name])
        taken, run = run[:most], run[most:]
        has[name] += sum(size[number] for number in taken)
        found.append(Span(name, taken[0], taken[-1] + 1))
    return found


def _fitting(run: Sequence[int], size: Sequence[int], left: int | None) -> int:
    count = 0
    for number in run:
        if left is not None:
            left -= size[number]
            if left < 0:
                break
        count += 1
    return count
