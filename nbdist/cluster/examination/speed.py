"""Measures how fast messages go from this process to another one, in a bounded time.

::

    small messages, there and back          the median is the latency, the fastest one tells the other clock
    128 KiB, 1 MiB, 8 MiB, 8 MiB, one way   the last one that was sent tells the rate; each is sent only if the rate
                                            so far says that it arrives within the time that is left
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nbdist.errors import NbdistError
from nbdist.rpc.api import current_agent
from nbdist.rpc.asking import ask_each

ANSWERS_WITHIN = 3.0  # seconds for the answer to a small message
LARGEST = 1 << 23  # bytes of the largest message
# The bytes of the messages that measure a rate. The largest is sent twice: its first memory is new, and slower.
_SIZES = (1 << 17, 1 << 20, LARGEST, LARGEST)
_ROUND_TRIPS = 20
_ROUND_TRIPS_SECONDS = 0.2  # seconds after which no more round trip begins
_MOVING_SECONDS = 0.5  # seconds for all messages that measure a rate, if the first one is fast enough to tell
_MOVES_WITHIN = 5.0  # seconds for one of these messages to arrive
_LEAST_PART_MOVING = 0.1  # the least part of a message's time that counts for its bytes: the rest may be latency


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of messages from one member to another. A number is None if it was not measured."""

    sender: str
    receiver: str
    latency: float | None = None
    """Seconds of a small call, there and back: the median."""
    rate: float | None = None
    """Bytes a second of a large tensor."""
    ahead: float | None = None
    """Seconds by which the receiver's clock is ahead of the sender's."""
    error: str = ""
    """The error that ended the measurement; empty without one."""


@dataclass(frozen=True)
class RoundTrips:
    """The results of some round trips."""

    latency: float
    """The median of their seconds."""
    fastest: float
    """The seconds of the fastest one."""
    ahead: float
    """Seconds by which the other clock is ahead of this one, by the middle of the fastest round trip."""


def round_trips(ask: Callable[[], float], seconds: float = _ROUND_TRIPS_SECONDS) -> RoundTrips:
    """Call ``ask()`` up to 20 times within ``seconds``, at least once; return what the round trips tell.

    ``ask`` sends a small message, waits for the answer, and returns the time of the other clock, in seconds since 1970.
    Raises its errors.
    """
    found: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while not found or (len(found) < _ROUND_TRIPS and time.perf_counter() < end):
        before, began = time.time(), time.perf_counter()
        there = ask()
        took = time.perf_counter() - began
        found.append((took, there - before - took / 2))  # the other clock was read in the middle
    return RoundTrips(statistics.median(took for took, _ in found), *min(found))


def rate_of(
    move: Callable[[int], object],
    fastest: float,
    seconds: float = _MOVING_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Send messages of growing sizes with ``move(nbytes)``; return bytes a second, by the largest that was sent.

    Args:
        move: Sends a message of ``nbytes`` bytes, and returns once the other side has it.
        fastest: Seconds of the fastest small message, there and back, to be subtracted from each message's time.
        seconds: The time for all messages; the first is sent anyway.
        clock: Returns the time in seconds.
    """
    end = clock() + seconds
    rates: dict[int, float] = {}
    rate = 0.0
    for size in _SIZES:
        if rates and clock() + fastest + size / rate > end:
            break
        began = clock()
        move(size)
        took = max(clock() - began, 1e-9)
        rate = size / max(took - fastest, took * _LEAST_PART_MOVING)
        rates[size] = max(rate, rates.get(size, 0.0))
    return rates[max(rates)]


def measure_from_here(to: str, part: float = 1.0) -> LinkSpeed:
    """Measure how fast messages go from this process's agent to the member ``to``. Never raises an error of nbdist.

    The notebook calls this on the sender, in a thread of its agent. ``part``, at most 1, shortens the measurement to
    that part of its usual 0.7 s.
    """
    agent = current_agent()
    latency = ahead = None
    try:
        # First once without counting: ZeroMQ may have to connect.
        ask_each(agent, time.time, {to: ()}, timeout=ANSWERS_WITHIN).or_raise()
        trips = round_trips(lambda: agent.ask(to, time.time, timeout=ANSWERS_WITHIN), _ROUND_TRIPS_SECONDS * part)
        latency, ahead = trips.latency, trips.ahead
        sent = {size: torch.ones(size, dtype=torch.uint8) for size in _SIZES}

        def move(nbytes: int) -> None:
            agent.ask(to, len, sent[nbytes], timeout=_MOVES_WITHIN)

        rate = rate_of(move, trips.fastest, _MOVING_SECONDS * part)
    except (NbdistError, RuntimeError) as error:
        return LinkSpeed(agent.me.name, to, latency, None, ahead, error_in_words(error))
    return LinkSpeed(agent.me.name, to, latency, rate, ahead)


def error_in_words(error: BaseException) -> str:
    """Return the class of an error and the first line of its text."""
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
