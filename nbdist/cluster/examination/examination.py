"""Examines a running cluster: asks each member for its facts, and measures the link from each one to every other one.

::

    all members at once     `describe_machine`, `describe_code`    3 s for the answers, 9 s for those about code
    one pair at a time      `measure_from_here` on the sender     about 0.7 s, less where there are many pairs; a slow
                                                                  pair once more, if there is time
    without a call          `findings.find_all`, `code_remarks.code_finding`

A dead worker takes no time, and a worker that does not answer takes 3 s once. A busy worker answers, because calls and
cells run in different threads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING

from nbdist import registry
from nbdist.autograd.api import recorder
from nbdist.cluster.examination.code_facts import CodeFacts, describe_code
from nbdist.cluster.examination.code_remarks import code_finding
from nbdist.cluster.examination.findings import ExaminedMember, Finding, find_all, slow_links
from nbdist.cluster.examination.machine import MachineFacts, describe_machine
from nbdist.cluster.examination.speed import ANSWERS_WITHIN, LinkSpeed, error_in_words, measure_from_here
from nbdist.errors import WorkerLost
from nbdist.rpc.asking import ask_each

if TYPE_CHECKING:
    from nbdist.cluster.kernels.workers import Worker
    from nbdist.rpc.agent import Agent

_PAIR_SECONDS = 0.7  # seconds for the measurement of one pair, if there is time enough for all pairs
_PAIR_WITHIN = 12.0  # seconds to wait for it: its own limits end it sooner, unless its sender's process is stopped


@dataclass(repr=False, frozen=True)
class Examination:
    """The result of `Cluster.examine`, which shows itself as text and, in a notebook, as tables."""

    members: list[ExaminedMember]
    """The notebook, and then the workers."""
    links: list[LinkSpeed]
    """The speed of each link that was measured."""
    findings: list[Finding]
    """The things that are wrong; empty if there are none."""

    def link(self, sender: str, receiver: str) -> LinkSpeed | None:
        """Return the speed of the link from ``sender`` to ``receiver``; None if it was not measured."""
        return next((link for link in self.links if (link.sender, link.receiver) == (sender, receiver)), None)

    def __repr__(self) -> str:
        return registry.text_of(self)

    def _repr_html_(self) -> str:
        return registry.pictures_of(self)["text/html"]


def examine(agent: Agent, workers: Sequence[Worker], seconds: float) -> Examination:
    """Return the examination of a running cluster, made in at most about ``seconds`` and the time of one pair.

    ``agent`` is the notebook's, and ``workers`` are the cluster's.
    """
    deadline = time.monotonic() + seconds
    with recorder().contexts.outside():  # the calls are of no training step
        members = _members(agent, workers)
        pairs = list(pairs_of([member.name for member in members if member.facts is not None]))
        links, left_out = _measure(agent, pairs, deadline)
        # Slow ones once more: a computer that does something else for a moment would look like a slow line.
        slow = [(link.sender, link.receiver) for link in slow_links(members, links)]
        again = {(link.sender, link.receiver): link for link in _measure(agent, slow, deadline)[0]}
        links = [_better(link, again.get((link.sender, link.receiver), link)) for link in links]
        code = code_finding(*read_code(agent, [each.name for each in members[1:] if each.facts is not None]))
    return Examination(members, links, [*find_all(members, links, left_out), *code])


def read_code(agent: Agent, names: Sequence[str]) -> tuple[dict[str, CodeFacts], dict[str, CodeFacts]]:
    """Return the facts about the code of the workers that answer, and of the notebook, by name."""
    with recorder().contexts.outside():
        asked = ask_each(agent, describe_code, dict.fromkeys(names, ()), timeout=3 * ANSWERS_WITHIN)
    return asked.values, {agent.me.name: describe_code()}


def _members(agent: Agent, workers: Sequence[Worker]) -> list[ExaminedMember]:
    # A dead worker is not asked, and one that is starting does not answer yet.
    ready = [worker.name for worker in workers if worker.alive and worker.step == "ready"]
    asked = ask_each(agent, describe_machine, dict.fromkeys(ready, ()), timeout=ANSWERS_WITHIN)
    places = {record.name: record.host for record in agent.members()}
    found = [ExaminedMember(agent.me.name, "", agent.me.host, True, describe_machine(), device="cpu")]
    for worker in workers:
        facts: MachineFacts | None = asked.values.get(worker.name)
        why = "" if facts is not None else "it is starting"
        if worker.name in asked.silent:
            why = f"no answer within {ANSWERS_WITHIN:g} s"
        elif (error := asked.errors.get(worker.name)) is not None:
            why = error_in_words(error)
        place, is_alive = places.get(worker.name, ""), worker.lost is None
        device = worker.device if worker.gpu is None else f"{worker.device} (GPU {worker.gpu})"
        found.append(ExaminedMember(worker.name, worker.state, place, is_alive, facts, why, device))
    return found


def _measure(agent: Agent, pairs: Sequence[tuple[str, str]], deadline: float) -> tuple[list[LinkSpeed], int]:
    """Measure one pair of members after another until ``deadline``; return the results, and how many pairs are left."""
    found: list[LinkSpeed] = []
    silent: set[str] = set()
    for number, (sender, receiver) in enumerate(pairs):
        left = deadline - time.monotonic()
        if left <= 0:
            return found, len(pairs) - number
        if silent & {sender, receiver}:  # it would take its whole time limit again
            continue
        part = min(1.0, left / (len(pairs) - number) / _PAIR_SECONDS)
        link, is_silent = measure_link(agent, sender, receiver, part)
        found.append(link)
        silent |= is_silent
    return found, 0


def _better(link: LinkSpeed, again: LinkSpeed) -> LinkSpeed:
    """Return a link with the better numbers of two measurements."""
    latencies = [each for each in (again.latency, link.latency) if each is not None]
    rates = [each for each in (again.rate, link.rate) if each is not None]
    return replace(link, latency=min(latencies, default=None), rate=max(rates, default=None))


def measure_link(agent: Agent, sender: str, receiver: str, part: float) -> tuple[LinkSpeed, set[str]]:
    """Return the speed of one link, and the end that does not answer, if any. ``part`` is as in `measure_from_here`."""
    if sender == agent.me.name:
        link = measure_from_here(receiver, part)
        return link, {receiver} if link.latency is None else set()
    asked = ask_each(agent, measure_from_here, {sender: (receiver, part)}, timeout=_PAIR_WITHIN)
    error = asked.errors.get(sender)
    is_silent = sender in asked.silent or isinstance(error, WorkerLost)
    link = asked.values[sender] if error is None else LinkSpeed(sender, receiver, error=error_in_words(error))
    return link, {sender} if is_silent else set()


def pairs_of(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each ordered pair of different names; those with the first name, the notebook, come first."""
    first, *others = names
    for other in others:
        yield first, other
        yield other, first
    yield from permutations(others, 2)
