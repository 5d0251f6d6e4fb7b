"""Chooses routes through the servers, and servers for blocks that no server has. Pure functions.

======== ==============================================================================================
function use
======== ==============================================================================================
`cut`    divides the blocks among the workers when a swarm begins
`route`  the fastest route, for a session: each of its steps waits for the previous one
`spread` a random route, for requests without a cache: they run side by side and should use all servers
`assign` chooses servers to load the blocks that no server has any more
`needed` chooses blocks for a new server
======== ==============================================================================================
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nbdist.amounts import plural
from nbdist.errors import NbdistError


class NoRoute(NbdistError):
    """No server has some block, and none can load it; or too many servers failed one after the other.

    Calls of models, steps of sessions and `Swarm.route` raise it once ``route_timeout`` of `nbdist.swarm.serve` is over
    and no worker is joining; `Swarm.leave` raises it at once. `Swarm.join` gives the swarm another worker. `Swarm.log`
    and `Swarm.states` show what happened to the servers.
    ``docs/errors.md`` has examples.
    """


class Span(NamedTuple):
    """The consecutive blocks from ``begin`` to before ``end`` on one server, which is named by its worker."""

    server: str
    begin: int
    end: int

    def part_of(self, item: Any, first: int, hidden: Any) -> Any:
        """Return the part of an item for these blocks; the item, a `Step` or `StackInput`, begins with block ``first``.

        ``hidden``, the input of these blocks, takes the place of the item's hidden states.
        """
        own = slice(self.begin - first, self.end - first)
        prompts = item.prompts[own] if item.prompts is not None else None
        return item._replace(hidden=hidden, calls=item.calls[own], prompts=prompts)


def cut(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Divide blocks of these sizes into parts, the largest of which is as small as possible; return (begin, end)s."""
    parts = min(parts, len(sizes))
    # By bisection on the size of the largest part: too small a size gives more parts.
    candidates = range(max(sizes), sum(sizes) + 1)
    least = bisect.bisect_left(candidates, True, key=lambda most: len(_fill_from_left(sizes, most, parts)) <= parts)
    return _fill_from_left(sizes, candidates[least], parts)


def _fill_from_left(sizes: Sequence[int], most: int, parts: int) -> list[tuple[int, int]]:
    """Fill parts up to the size ``most`` from the left; return the (begin, end) of each part."""
    found: list[tuple[int, int]] = []
    begin, size = 0, 0
    for number, each in enumerate(sizes):
        needed = parts - len(found) - 1  # blocks for the parts after this one
        # A part has one block at least, even a larger one, and leaves one for each part after it.
        if number > begin and (size + each > most or len(sizes) - number <= needed):
            found.append((begin, number))
            begin, size = number, 0
        size += each
    return [*found, (begin, len(sizes))]


class Offer(NamedTuple):
    """A server's blocks and speed."""

    blocks: Sequence[int]
    hop: float = 1e-3  # seconds that a call to the server takes besides the computation
    pace: float = 1e-3  # seconds of computation for one token in one block
    load: int = 0  # calls to the server whose answers the client is waiting for


def route(offers: Mapping[str, Offer], begin: int, end: int) -> list[Span]:
    """Return the route through these blocks that takes the least time; of equally fast routes, one with long spans.

    The time of a route is the server's `hop` for each of its spans, plus `pace` times (1 + `load`) for each block.
    Raises `NoRoute`, which names the first missing block.
    """
    held = {server: set(offer.blocks) for server, offer in offers.items()}
    # By block and by the server that takes it: the time from there to the end, and the server of the next block.
    rest: dict[int, dict[str, tuple[float, str]]] = {}
    # Dynamic programming: each block needs the times from the next block on.
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
                stays = name in behind and behind[name][0] <= over  # also if equally fast: a longer span
                then = name if stays else nearest
                cost += behind[name][0] if stays else over
            found[name] = (cost, then)
        if not found:
            raise NoRoute(f"no server has block {_first_outside(set().union(*held.values()), begin, end)}")
        rest[block] = found
    if begin == end:
        return []
    # Follow the table from the best server of the first block.
    costs = {name: cost + offers[name].hop for name, (cost, _) in rest[begin].items()}
    least = min(costs.values())
    # Times that should be equal differ by rounding. Of equally fast servers, the one with the longest row of blocks.
    name = max(
        (name for name in costs if costs[name] <= least * (1 + 1e-9)),
        key=lambda name: _first_outside(held[name], begin, end),
    )
    spans = [Span(name, begin, begin + 1)]
    for block in range(begin + 1, end):
        name = rest[block - 1][name][1]
        last = spans[-1]
        if last.server == name:
            spans[-1] = last._replace(end=block + 1)
        else:
            spans.append(Span(name, block, block + 1))
    return spans


def spread(offers: Mapping[str, Offer], begin: int, end: int, choose: random.Random) -> list[Span]:
    """Return a random route through these blocks, for one of many requests. Raises `NoRoute` if no server has a block.

    The next server is drawn with a weight, its speed divided by its load. It takes as many blocks as it can.
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
    return next((number for number in range(begin, end) if number not in numbers), end)


def assign(
    blocks: Mapping[str, Sequence[int]],
    begin: int,
    end: int,
    sizes: Sequence[int] | None = None,
    room: Mapping[str, int | None] | None = None,
) -> list[Span]:
    """Choose servers for the blocks in a range that no server has; return a span for each server that must load some.

    ``blocks`` has the blocks of each server, ``sizes`` the bytes of each block (1 by default), ``room`` the bytes of
    blocks that a server may have in all; None or no entry means no limit. Raises `NoRoute` if no server has room.
    """
    known = {number for numbers in blocks.values() for number in numbers}
    missing = [number for number in range(begin, end) if number not in known]
    if not missing:
        return []
    if not blocks:
        raise NoRoute(f"no server is left to take block {missing[0]}: let another worker join")
    size = sizes if sizes is not None else [1] * end
    has = {server: sum(size[number] for number in numbers) for server, numbers in blocks.items()}
    return [span for run in runs_of(missing) for span in _place(run, size, has, room or {})]


def needed(offers: Mapping[str, Offer], sizes: Sequence[int], room: int | None = None) -> tuple[int, int]:
    """Return the (begin, end) of the blocks that a new server should load: an equal share of all, in ``room`` bytes.

    These are the blocks that no server has, else those through which the servers can take the fewest tokens a second:
    few servers have them, or slow ones, or servers with many other blocks.
    """
    rates = [
        sum(1 / (offer.pace * len(offer.blocks)) for offer in offers.values() if number in offer.blocks)
        for number in range(len(sizes))
    ]
    count = math.ceil(len(sizes) / (len(offers) + 1))
    begin = min(range(len(sizes) - count + 1), key=lambda at: sorted(rates[at : at + count]))
    fits = math.inf if room is None else room
    sums = list(itertools.accumulate(sizes[begin : begin + count]))
    return begin, begin + max(1, bisect.bisect_right(sums, fits))


def runs_of(numbers: Sequence[int]) -> list[range]:
    """Group ascending numbers into runs of consecutive numbers."""
    known = set(numbers)
    starts = [number for number in numbers if number - 1 not in known]
    stops = [number + 1 for number in numbers if number + 1 not in known]
    return list(map(range, starts, stops))


def named(numbers: Sequence[int]) -> str:
    """Return block numbers in words, such as "blocks 0-3, 7" or "nothing"."""
    rows = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs_of(numbers)]
    return f"{plural(len(numbers), 'block')} {', '.join(rows)}" if rows else "nothing"


def _place(run: range, size: Sequence[int], has: dict[str, int], room: Mapping[str, int | None]) -> list[Span]:
    """Place a run of blocks on one server if it fits, else in parts as large as possible; return the new spans."""
    found: list[Span] = []
    while run:
        free = {name: math.inf if (most := room.get(name)) is None else most - has[name] for name in has}
        sums = list(itertools.accumulate(size[number] for number in run))
        # The first blocks of the run: a smaller block after one that does not fit would not be consecutive.
        fits = {name: bisect.bisect_right(sums, left) for name, left in free.items()}
        if not (most := max(fits.values())):
            raise NoRoute(
                f"no server that is left has room for the weights of block {run[0]}: let another worker join, or call "
                "serve with more room"
            )
        # Of those that can take equally many blocks, the one with the least bytes.
        name = min((name for name in fits if fits[name] == most), key=lambda name: has[name])
        taken, run = run[:most], run[most:]
        has[name] += sum(size[number] for number in taken)  # the caller's table: further runs count these blocks
        found.append(Span(name, taken.start, taken.stop))
    return found
