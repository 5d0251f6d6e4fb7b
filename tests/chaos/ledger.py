"""The ledger of a storm: every call as its caller and its callee saw it, and what of that cannot be. Pure.

    caller   Sent ------------------------------------------ Answered (a value, or an error)
    callee          Ran, by the function itself, each time
    storm    Struck (a kill, a stop, ...)

`compare` returns what breaks a guarantee of the design:

==================== =====================================================================================
finding              what happened
==================== =====================================================================================
ran twice            the function of one call ran more than once (G2)
did not run          a call returned a value, or the function's own error, and no function ran (G2)
other value          a call returned another value than its function (G2)
ran elsewhere        the function of a call ran on another worker than the one that was called
forged               a function ran for a call that nobody sent
never ended          the caller lives, and its call has not ended (G3)
ended late           a call ended after its limit (G3)
counted as dead      a call failed with WorkerLost, and nobody had killed that worker (G3)
wrong                a result that the workload can compute alone came out otherwise (G1)
left behind          objects, contexts, processes or files are still there at the end (G4, G5)
failed afterwards    something failed after the storm, when nothing disturbed it any more
==================== =====================================================================================
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

PATIENCE = 20.0
"""Seconds past its limit that a call may take before it has ended late: the machine is busy with other things."""


@dataclass(frozen=True)
class Sent:
    """A call goes out; ``limit`` is the seconds within which it must end. A step of a workload goes to nobody, ""."""

    call: str
    who: str
    pid: int
    to: str
    kind: str
    limit: float
    at: float


@dataclass(frozen=True)
class Ran:
    """A function ran for a call, and is about to return ``value``; or to raise its own error, which is None."""

    call: str
    who: str
    pid: int
    value: str | None


@dataclass(frozen=True)
class Answered:
    """A call ended for its caller: with a value, or with an error; ``own`` says that the function raised it."""

    call: str
    value: str | None
    error: str | None
    own: bool
    at: float


@dataclass(frozen=True)
class Struck:
    """The storm did something to a process, from one moment to another (or for good: a kill)."""

    kind: str
    who: str
    pid: int
    at: float
    until: float


@dataclass(frozen=True)
class Settled:
    """A process has waited for all its calls; those that are open now stay open."""

    who: str
    pid: int
    at: float


@dataclass(frozen=True)
class Noted:
    """A workload, or the storm itself, found something by itself."""

    finding: str
    who: str
    text: str


Entry = Sent | Ran | Answered | Struck | Settled | Noted
KINDS: dict[str, type[Entry]] = {kind.__name__: kind for kind in (Sent, Ran, Answered, Struck, Settled, Noted)}


@dataclass(frozen=True)
class Finding:
    """What should not be."""

    kind: str
    who: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.who}: {self.text}"


class Ledger:
    """The entries of one storm, in any order."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = list(entries)
        self._sent = {each.call: each for each in self._all(Sent)}
        self._answered = {each.call: each for each in self._all(Answered)}
        self._ran: dict[str, list[Ran]] = defaultdict(list)
        for each in self._all(Ran):
            self._ran[each.call].append(each)

    def _all(self, kind: type) -> list:
        return [each for each in self.entries if type(each) is kind]

    def counts(self) -> dict[str, int]:
        """Return how many calls, answers and strikes of each kind there are."""
        calls = list(self._sent.values())
        counted = Counter(f"call {call.kind}" for call in calls)
        counted.update(f"struck {each.kind}" for each in self._all(Struck))
        counted["calls"] = len(calls)
        counted["calls with a value"] = sum(each.error is None for each in self._answered.values())
        counted["calls that failed"] = sum(each.error is not None for each in self._answered.values())
        counted["calls whose caller died"] = sum(call.call not in self._answered for call in calls)
        return dict(sorted(counted.items()))

    def compare(self) -> list[Finding]:
        """Return everything that cannot be."""
        found = [Finding(each.finding, each.who, each.text) for each in self._all(Noted)]
        for call, sent in self._sent.items():
            found += self._look_at(sent, self._ran.get(call, []), self._answered.get(call))
        for call in self._ran.keys() - self._sent.keys():
            found.append(
                Finding("forged", self._ran[call][0].who, f"a function ran for call {call}, which nobody sent")
            )
        return found

    def _look_at(self, sent: Sent, ran: list[Ran], answered: Answered | None) -> list[Finding]:
        found = []

        def find(kind: str, text: str) -> None:
            found.append(Finding(kind, sent.to, f"{sent.kind} {sent.call} of {sent.who}: {text}"))

        if len(ran) > 1:
            find("ran twice", f"its function ran {len(ran)} times, in processes {sorted(each.pid for each in ran)}")
        for each in ran:
            if each.who != sent.to:
                find("ran elsewhere", f"its function ran on {each.who}")
        if answered is None:
            settled = [each for each in self._all(Settled) if each.pid == sent.pid]
            if settled:
                find("never ended", f"sent {settled[0].at - sent.at:.1f} s before its caller gave up waiting")
            return found
        if not sent.to:
            pass  # a step of a workload, of which only the time is known here
        elif answered.error is None or answered.own:
            if not ran:
                find("did not run", f"it ended with {answered.error or answered.value}, and no function ran")
            elif all(each.value != answered.value for each in ran):
                find("other value", f"its function returned {ran[0].value}, its caller got {answered.value}")
        elif "WorkerLost" in answered.error and not self._was_struck_dead(sent, answered):
            find("counted as dead", f"nobody had killed {sent.to}: {answered.error}")
        took = answered.at - sent.at - self._stopped(sent.pid, sent.at, answered.at)
        if took > sent.limit + PATIENCE:
            find("ended late", f"it took {took:.1f} s; its limit is {sent.limit:g} s")
        return found

    def _was_struck_dead(self, sent: Sent, answered: Answered) -> bool:
        """Whether a kill before the call's end explains its WorkerLost: the callee's, or of one that it waited for."""
        return any(each.kind == "kill" and each.at <= answered.at for each in self._all(Struck))

    def _stopped(self, pid: int, start: float, end: float) -> float:
        """Return the seconds of that time in which the process was stopped."""
        stops = [each for each in self._all(Struck) if each.kind == "stop" and each.pid == pid]
        return sum(max(0.0, min(end, each.until) - max(start, each.at)) for each in stops)
