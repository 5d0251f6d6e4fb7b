"""Chooses routes through the servers, and servers for blocks that no server has. Pure functions.

======== ==============================================================================================
function use
======== ==============================================================================================
`cut`    divides the blocks among the workers when a swarm begins
`route`  the fastest route, for a session: each of its steps waits for the previous one
`spread` a random route, for requests without a cache: they run side by side and should use all servers
`assign` chooses servers to load the blocks that no server has any more
======== ==============================================================================================
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nbdist.amounts import plural
from nbdist.errors import NbdistError


class NoRoute(NbdistError):
    """No server has some block, and none can load it; or too many servers failed one after the other.

    `Swarm.join` gives the swarm another worker. `Swarm.log` and `Swarm.states` show what happened to the servers.
    ``docs/errors.md`` has examples.
    """


class Span(NamedTuple):
    """The consecutive blocks from ``begin`` to before ``end`` on one server, which is named by its worker."""

    server: str
    begin: int
    end: int


def cut(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Divide blocks of these sizes into parts so that the largest part is as small as possible; return (begin, end)s.

    There are at most as many parts as blocks. Finds the size of the largest part by bisection.
    """
    parts = min(parts, len(sizes))
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_fill_from_left(sizes, middle, parts)) <= parts:
            high = middle
        else:
            low = middle + 1
    return _fill_from_left(sizes, low, parts)


def _fill_from_left(sizes: Sequence[int], most: int, parts: int) -> list[tuple[int, int]]:
    """Fill parts up to the size ``most`` from the left, leaving at least one block for each further part.

    Returns the range of blocks (begin, end) of each part. A part with one block may be larger. If ``most`` is too
    small, there are more than ``parts`` parts.
    """
    found: list[tuple[int, int]] = []
    begin, size = 0, 0
    for number, each in enumerate(sizes):
        needed = parts - len(found) - 1  # blocks for the parts after this one
        if number > begin and (size + each > most or len(sizes) - number <= needed):
            found.append((begin, number))
            begin, size = number, 0
        size += each
    return [*found, (begin, len(sizes))]


class Offer(NamedTuple):
    """A server's blocks and speed."""

    blocks: Sequence[int]
    hop: float = 1e-3
    """Seconds that a call to the server takes besides the computation."""
    pace: float = 1e-3
    """Seconds of computation for one token in one block."""
    load: int = 0
    """The number of calls to the server whose answers the client is waiting for."""


def route(offers: Mapping[str, Offer], begin: int, end: int) -> list[Span]:
    """Return the route through these blocks that takes the least time; of equally fast routes, one with long spans.

    The time of a route is the server's `hop` for each of its spans, plus `pace` times (1 + `load`) for each block. This
    is dynamic programming from the last block to the first. Raises `NoRoute`, which names the first missing block.
    """
    held = {server: set(offer.blocks) for server, offer in offers.items()}
    # By block and by the server that takes it: the time from there to the end, and the server of the next block.
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
            raise NoRoute(f"no server has block {_first_missing(held, begin, end)}")
        rest[block] = found
    return _spans(rest, offers, held, begin, end)


def _first_missing(held: Mapping[str, set[int]], begin: int, end: int) -> int:
    """Return the first block of the range that no server has. Call it only if a block is missing."""
    known = set[int]().union(*held.values())
    return next(block for block in range(begin, end) if block not in known)


def _spans(
    rest: Mapping[int, Mapping[str, tuple[float, str]]],
    offers: Mapping[str, Offer],
    held: Mapping[str, set[int]],
    begin: int,
    end: int,
) -> list[Span]:
    """Follow the table ``rest`` of `route` from the best server of the first block; return the spans.

    ``rest`` has, for each block and each server that may take it, the time from there to the end and the server of the
    next block. If several servers are equally fast for the first block, the server with the longest row of blocks is
    taken. ``held`` has the blocks of each server.
    """
    if begin == end:
        return []
    costs = {name: cost + offers[name].hop for name, (cost, _) in rest[begin].items()}
    least = min(costs.values())
    name = max(
        (name for name in costs if costs[name] <= least * (1 + 1e-9)),
        key=lambda name: _first_outside(held[name], begin, end),
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
    """Return a random route through these blocks, for one of many requests.

    At each point the next server is drawn with a weight: its speed divided by its load. It takes as many blocks as it
    can. Raises `NoRoute` if no server has a block.
    """
    held = {server: set(offer.blocks) for server, offer in offers.items()}
    found: list[Span] = []
    at = begin
    while at < end:
        able = [name for name in offers if at in held[name]]
        if not able:
            raise NoRoute(f"no server has block {at}")
        weights = [1.0 / (offers[name].pace * (1 + offers[name].load)) for name in able]
        (name,) = choose.choices(able, weights)
        to = _first_outside(held[name], at, end)
        found.append(Span(name, at, to))
        at = to
    return found


def _first_outside(numbers: set[int], begin: int, end: int) -> int:
    """Return the first number from ``begin`` on that is not in the set, or ``end`` if all numbers before it are in."""
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
    """Choose servers for the blocks in a range that no server has; return a span for each server that must load some.

    Each row of missing blocks goes to one server: of those with room for the whole row, the one with the least bytes of
    blocks. If no server has so much room, several servers share the row. ``blocks`` has the blocks of each server,
    ``sizes`` the bytes of each block (1 by default), ``room`` the bytes of blocks that a server may have in all; None
    or no entry means no limit. Raises `NoRoute` if no server has room.
    """
    known = {number for numbers in blocks.values() for number in numbers}
    missing = [number for number in range(begin, end) if number not in known]
    if not missing:
        return []
    if not blocks:
        raise NoRoute(f"no server is left to take block {missing[0]}: let another worker join")
    size = sizes if sizes is not None else [1] * end
    has = {server: sum(size[number] for number in numbers) for server, numbers in blocks.items()}
    found: list[Span] = []
    for run in runs_of(missing):
        found += _place(run, size, has, room or {})
    return found


def runs_of(numbers: Sequence[int]) -> list[list[int]]:
    """Group ascending numbers into runs of consecutive numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def named(numbers: Sequence[int]) -> str:
    """Return block numbers in words, such as "blocks 0-3, 7" or "nothing"."""
    rows = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs_of(numbers)]
    return f"{plural(len(numbers), 'block')} {', '.join(rows)}" if rows else "nothing"


def _place(run: list[int], size: Sequence[int], has: dict[str, int], room: Mapping[str, int | None]) -> list[Span]:
    """Place a run of blocks on one server if it fits, else in parts as large as possible; return the new spans.

    ``size`` has the bytes of every block. ``has`` has the bytes of blocks on each server, which this function updates.
    ``room`` has the bytes that a server may have in all, None for no limit. If several servers can take equally many
    blocks of the run, the one with the least bytes takes them. Raises `NoRoute` if no server has room for the first
    block that is left.
    """
    found: list[Span] = []
    while run:
        free = {
            name: room[name] - has[name] if room.get(name) is not None else None  # type: ignore[operator]
            for name in has
        }
        fits = {name: _blocks_that_fit(run, size, left) for name, left in free.items()}
        most = max(fits.values())
        if not most:
            raise NoRoute(
                f"no server that is left has room for the weights of block {run[0]}: let another worker join, or call "
                "serve with more room"
            )
        name = min((name for name in fits if fits[name] == most), key=lambda name: has[name])
        taken, run = run[:most], run[most:]
        has[name] += sum(size[number] for number in taken)
        found.append(Span(name, taken[0], taken[-1] + 1))
    return found


def _blocks_that_fit(run: Sequence[int], size: Sequence[int], left: int | None) -> int:
    """Return how many blocks from the beginning of a run fit into ``left`` bytes; None means no limit.

    The blocks are consecutive, so the first one that does not fit ends the count.
    """
    count = 0
    for number in run:
        if left is not None:
            left -= size[number]
            if left < 0:
                break
        count += 1
    return count
