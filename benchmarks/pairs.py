"""Compares two sides that are measured in pairs. Pure: no process, no clock.

::

    round 1    case A: ours, theirs    case B: theirs, ours    case C: ours, theirs   ...
    round 2    case A: theirs, ours    case B: theirs, ours    case C: theirs, ours   ...
    ...        the order within each pair is drawn before the first round, and so is the number of rounds

    ratio of a round  = median of our calls in it / median of their calls in it
    ratio of a case   = median of the ratios of its rounds
    faster in         = number of rounds whose ratio is below 1

A machine that is slow for a minute is slow for both sides of a pair, so it hardly moves a ratio. The microseconds of
each side are over the calls of all rounds: two of these medians divided need not give the paired ratio.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

FEWEST = 11
"""Rounds below which a table says that nothing should be decided by it."""

Side = Literal["ours", "theirs"]
SIDES: tuple[Side, Side] = ("ours", "theirs")


@dataclass(frozen=True)
class Turn:
    """What one side does in a round: a contestant runs a case ``count`` times."""

    contestant: str
    case: str
    count: int


@dataclass(frozen=True)
class Bound:
    """What a value should be: within the limit, better within the aim."""

    limit: float | None = None
    aim: float | None = None
    at_least: bool = False
    """Whether higher is better."""

    def verdict(self, value: float | None) -> str:
        """Return "missed", "held" or "aim held"; empty where there is no value or no limit."""
        if value is None or self.limit is None:
            return ""
        if not self._holds(value, self.limit):
            return "missed"
        return "aim held" if self.aim is not None and self._holds(value, self.aim) else "held"

    def _holds(self, value: float, bound: float) -> bool:
        return value >= bound if self.at_least else value <= bound


@dataclass(frozen=True)
class Pair:
    """One case on two sides."""

    name: str
    ours: Turn
    theirs: Turn
    bound: Bound = Bound()
    cpu: tuple[str, Bound] | None = None
    """The name and the bound of a further line, which compares the CPU time of the two sides."""
    share: float = 0.0
    """If not zero, the value is ``share * theirs / ours``, a share of a speed, instead of ``ours / theirs``."""
    busy: bool = False
    """Whether the callee computes something else meanwhile, so that its CPU time says nothing."""

    def turn(self, side: Side) -> Turn:
        """Return what a side does."""
        return self.ours if side == "ours" else self.theirs


@dataclass(frozen=True)
class Sample:
    """What one side measured in one round."""

    times: Sequence[float]
    """Seconds of each operation; a single one, the mean, where operations run at once."""
    count: int
    caller: float | None = None
    """CPU seconds of the process that calls, over all operations; None where they cannot be read."""
    others: float | None = None
    """CPU seconds of all other processes of the contestant."""

    def cpu(self) -> float | None:
        """Return the CPU seconds of all processes for one operation."""
        if self.caller is None or self.others is None:
            return None
        return (self.caller + self.others) / self.count


Round = Mapping[Side, Sample]


def same_cases(
    counts: Mapping[str, int],
    ours: str,
    theirs: str,
    bounds: Mapping[str, Bound],
    cpu: Mapping[str, tuple[str, Bound]] | None = None,
    *,
    busy: bool = False,
) -> list[Pair]:
    """Return a pair for each case, which both contestants know by the same name and run equally often."""
    return [
        Pair(
            case,
            Turn(ours, case, count),
            Turn(theirs, case, count),
            bounds.get(case, Bound()),
            (cpu or {}).get(case),
            busy=busy,
        )
        for case, count in counts.items()
    ]


@dataclass(frozen=True)
class Spread:
    """How long the operations of one side took, over all rounds; how much CPU time each took, at the median."""

    median: float
    tenth: float | None
    """A tenth of the operations was faster; None where the operations were not timed one by one."""
    ninety_ninth: float | None
    caller: float | None
    others: float | None


@dataclass(frozen=True)
class Line:
    """What is said of a case."""

    name: str
    ours: float
    theirs: float
    value: float
    """The paired median of the ratio, or of the share."""
    faster: int
    """The number of rounds in which our side was faster, or took less CPU time."""
    rounds: int
    bound: Bound
    share: bool = False
    spreads: Mapping[Side, Spread] | None = None
    messages: float | None = None
    """How many messages our side sent for one operation."""


def schedule(pairs: Sequence[Pair], rounds: int, seed: int) -> list[list[tuple[Pair, Sequence[Side]]]]:
    """Return for each round the pairs, and the order in which the sides of each take their turns."""
    generator = random.Random(seed)
    return [[(pair, generator.sample(SIDES, 2)) for pair in pairs] for _ in range(rounds)]


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest of the values that at least this part of them does not exceed."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def ratios(rounds: Sequence[Round], value: Callable[[Sample], float]) -> list[float]:
    """Return ours / theirs within each round."""
    return [value(samples["ours"]) / value(samples["theirs"]) for samples in rounds]


def lines(pair: Pair, rounds: Sequence[Round], messages: float | None = None) -> list[Line]:
    """Return what is said of a case: a line for its time and, if the pair asks for it, one for its CPU time."""
    found = ratios(rounds, lambda sample: statistics.median(sample.times))
    spreads: dict[Side, Spread] = {side: _spread([samples[side] for samples in rounds], pair.busy) for side in SIDES}
    time = Line(
        pair.name,
        spreads["ours"].median,
        spreads["theirs"].median,
        statistics.median(pair.share / ratio for ratio in found) if pair.share else statistics.median(found),
        sum(ratio < 1 for ratio in found),
        len(found),
        pair.bound,
        bool(pair.share),
        spreads,
        messages,
    )
    return [time, *_cpu_lines(pair, rounds)]


def _cpu_lines(pair: Pair, rounds: Sequence[Round]) -> list[Line]:
    if pair.cpu is None or any(not samples[side].cpu() for samples in rounds for side in SIDES):
        return []
    name, bound = pair.cpu
    ours, theirs = ([samples[side].cpu() or 0.0 for samples in rounds] for side in SIDES)
    found = [a / b for a, b in zip(ours, theirs, strict=True)]
    middle, faster = statistics.median(found), sum(ratio < 1 for ratio in found)
    return [Line(name, statistics.median(ours), statistics.median(theirs), middle, faster, len(found), bound)]


def _spread(samples: Sequence[Sample], busy: bool) -> Spread:
    times = [time for sample in samples for time in sample.times]
    one_by_one = all(len(sample.times) == sample.count for sample in samples)
    measured = not busy and all(sample.cpu() is not None for sample in samples)
    return Spread(
        statistics.median(times),
        quantile(times, 0.1) if one_by_one else None,
        quantile(times, 0.99) if one_by_one else None,
        statistics.median((sample.caller or 0.0) / sample.count for sample in samples) if measured else None,
        statistics.median((sample.others or 0.0) / sample.count for sample in samples) if measured else None,
    )


# --- tables for people ----------------------------------------------------------------------------


def duration(seconds: float | None) -> str:
    """Return a length of time in words."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def comparison(found: Sequence[Line], ours: str = "nbdist", theirs: str = "torch", value: str = "ratio") -> str:
    """Return a table, in Markdown, of how the sides compare, with limits and aims; a missed limit stands out."""
    rows = [f"| case | {ours} | {theirs} | {value} | faster in | limit | aim | |", f"| --- |{' ---: |' * 6} --- |"]
    for line in found:
        verdict = line.bound.verdict(line.value)
        cells = [
            line.name,
            duration(line.ours),
            duration(line.theirs),
            f"{line.value:.2f}",
            "-" if line.share else f"{line.faster} of {line.rounds}",
            _bound(line.bound.limit, line.bound.at_least),
            _bound(line.bound.aim, line.bound.at_least),
            f"**{verdict}**" if verdict == "missed" else verdict,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def costs(found: Sequence[Line], ours: str = "nbdist", theirs: str = "torch") -> str:
    """Return a table, in Markdown, of what each side takes for an operation: spread, CPU time, messages."""
    rows = [
        f"| one operation | {ours}: p10, median, p99 | {theirs}: p10, median, p99 "
        f"| {ours}: CPU of the caller + the others | {theirs}: CPU | {ours}: messages |",
        f"| --- |{' ---: |' * 5}",
    ]
    for line in found:
        if line.spreads is None:
            continue
        ours_spread, theirs_spread = (line.spreads[side] for side in SIDES)
        cells = [line.name, _times(ours_spread), _times(theirs_spread), _cpu(ours_spread), _cpu(theirs_spread)]
        rows.append(f"| {' | '.join(cells)} | {_number(line.messages)} |")
    return "\n".join(rows)


def _times(spread: Spread) -> str:
    return ", ".join(duration(value) for value in (spread.tenth, spread.median, spread.ninety_ninth))


def _cpu(spread: Spread) -> str:
    return f"{duration(spread.caller)} + {duration(spread.others)}" if spread.caller is not None else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _bound(value: float | None, at_least: bool) -> str:
    return "-" if value is None else f"{'≥ ' if at_least else ''}{value:g}"
