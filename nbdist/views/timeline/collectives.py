"""Joins the collectives that each worker has called to those that the workers ran together. Pure.

::

    worker0   came ├───────────────┤▒▒▒▒▒┤       waits for the last, and in the collective
    worker1            came ├──────┤▒▒▒▒▒┤
    worker2                   came ┤▒▒▒▒▒┤       came last
              start               last  end      an end is known only where torch has noted one
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from nbdist.amounts import duration, size
from nbdist.cluster.group_history import TRANSFERS, Given
from nbdist.cluster.output.arranger import grouped, say_names
from nbdist.cluster.worker.flight_recorder import CollectiveCall, CollectiveCalls

_OFF = "collectives are missing: TORCH_FR_BUFFER_SIZE=0 switches torch's recorder of them off"
_DROPPED = "collectives before {} are missing: only the last ones are kept (TORCH_FR_BUFFER_SIZE; 2000 transfers)"


class Collective(NamedTuple):
    """A collective of several workers, or a send with its receive. Times are in seconds since the recording began."""

    title: str
    number: int
    given: dict[str, Given]
    """The tensors and the line of each worker, by its name."""
    came: dict[str, float]
    """The time at which each worker came, by its name, the first one first."""
    end: float
    is_over: bool
    missing: str
    """The members that have not come, or told nothing, in words; empty if all have come."""

    @property
    def is_transfer(self) -> bool:
        """True for a send with its receive."""
        return next(iter(self.given.values())).kind in TRANSFERS

    @property
    def last(self) -> str:
        """The worker that came last; empty if not all are known to have come, or if there is only one."""
        return list(self.came)[-1] if len(self.came) > 1 and not self.missing else ""

    @property
    def waits(self) -> dict[str, float]:
        """The seconds that each other worker came before the last one, by its name; empty where `last` is."""
        others = list(self.came)[:-1] if self.last else []
        return {each: self.came[self.last] - self.came[each] for each in others}

    def __str__(self) -> str:
        texts = grouped(self.given, lambda worker: _text(self.given[worker]))
        said = [text if len(texts) == 1 else f"{say_names(who)} {text}" for text, who in texts.items()]
        waits = grouped(self.waits, lambda worker: duration(self.waits[worker]))
        waited = ", ".join(f"{say_names(who)} waited {text}" for text, who in waits.items())
        if waits:  # a member of a transfer need not wait for the other one
            apart = duration(max(self.waits.values()))
            said.append(f"{self.last} came {apart} later" if self.is_transfer else f"{self.last} came last: {waited}")
        said += [text for text in (self.missing, "" if self.is_over else "it had not ended") if text]
        return f"{'; '.join(said)} (#{self.number}, {self.title})"


def join(calls: Mapping[str, CollectiveCalls], begun: Mapping[str, float], seconds: float) -> list[Collective]:
    """Return the collectives of a recording of so many ``seconds``, the first one first."""
    # ``begun`` is when the recording began, on each worker's clock. A collective is left out if a member came to it
    # before the member's calls are known.
    names = {each.rank: worker for worker, each in calls.items()}
    together: dict[tuple[object, ...], dict[str, CollectiveCall]] = {}
    for worker, each in calls.items():
        for one in each.arrivals:
            mapped = one._replace(came=one.came - begun[worker], left=one.left - begun[worker])
            together.setdefault((one.group, one.number, *one.ranks), {})[worker] = mapped
    # The groups along one dimension of a mesh have one title.
    members = {(one.title, tuple(one.ranks)) for each in together.values() for one in each.values()}
    alike = Counter(title for title, _ in members)
    joined = []
    for arrivals in together.values():
        one = next(iter(arrivals.values()))
        told = [names[rank] for rank in one.ranks if rank in names]
        others = [each for each in told if each not in arrivals]
        is_transfer = one.given.kind in TRANSFERS
        unknown = 0 if is_transfer else math.inf  # all transfers are counted
        if any(calls[each].last.get(one.group, unknown) >= one.number for each in others):
            continue
        title = one.title if alike[one.title] == 1 else f"{one.title} of {say_names(told)}"
        if is_transfer:
            title = " to ".join(names.get(rank, f"rank {rank}") for rank in one.ranks)
        silent = [f"rank {rank}" for rank in one.ranks if rank not in names]
        missing = [f"{say_names(others)} had not come"] if others else []
        missing += [f"nothing is known of {say_names(silent)}"] if silent else []
        came = {worker: each.came for worker, each in sorted(arrivals.items(), key=lambda item: item[1].came)}
        given = {worker: arrivals[worker].given for worker in calls if worker in arrivals}
        is_over = all(each.is_over for each in arrivals.values()) and not (is_transfer and others)
        end = max(seconds * (not is_over), *came.values(), *(each.left for each in arrivals.values()))
        joined.append(Collective(title, one.number, given, came, end, is_over, "; ".join(missing)))
    return sorted(joined, key=lambda each: min(each.came.values()))


def say_gaps(calls: Mapping[str, CollectiveCalls], begun: Mapping[str, float]) -> list[str]:
    """Return sentences about the collectives that are missing; the arguments are as for `join`."""
    until = {name: each.missing_until - begun[name] for name, each in calls.items() if each.missing_until is not None}
    off, late = ([name for name in until if (until[name] == math.inf) == is_off] for is_off in (True, False))
    said = [f"{say_names(off)}: {_OFF}"] if off else []
    latest = duration(max((until[name] for name in late), default=0.0))
    return said + ([f"{say_names(late)}: {_DROPPED.format(latest)}"] if late else [])


def _text(given: Given) -> str:
    amount = f", {size(given.bytes)}" if given.bytes else ""
    return f"{given.name} {given.tensors}".rstrip() + amount + (f", {given.place}" if given.place else "")
