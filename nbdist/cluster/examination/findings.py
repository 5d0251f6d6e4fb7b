"""Finds the faults of a machine, of the members of a cluster, and of the links between them. Pure.

Facts and measured numbers go in. Each finding comes out with one sentence that says what to do about it. The limits are
the constants below. A link is compared only with links of its kind: within a host, or between hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbdist.amounts import counted, duration, size
from nbdist.cluster.output.arranger import grouped, say_members

if TYPE_CHECKING:
    from nbdist.cluster.examination.machine import MachineFacts
    from nbdist.cluster.examination.speed import LinkSpeed

_LITTLE_MEMORY = 500_000_000  # bytes of memory left below which a process gets a finding
# Free bytes of /dev/shm below which NCCL or DataLoader may fail. Containers have 64 MB, by default; 1 GB is usual.
_LITTLE_SHARED_FILES = 500_000_000
_FEW_FILES = 256  # that a process should still be able to open; in the notebook a worker of another host takes 35
# Ports below which a host may run out of them: each agent takes some, and so do gloo and NCCL for each connection.
_FEW_PORTS = 1000
_CLOCKS_APART = 1.0  # seconds between two clocks from which lines of different hosts may be sorted wrongly
_TIMES_SLOWER = 10  # a link is slow if it is this many times slower than the fast links of its kind
_FAST_ENOUGH = 0.01  # a latency of up to this many seconds is never called slow: a busy machine has it at times
# A rate of this many bytes a second is never called slow: on most machines, encrypted messages are not faster.
_MOVES_FAST_ENOUGH = 200_000_000
_LINKS_COMPARED = 3  # links of a kind that are needed to compare them


@dataclass(frozen=True)
class Finding:
    """A fault, and what to do about it."""

    topic: str
    """The subject: shared memory, open files, ports, GPUs, NCCL, members, versions, clocks or links."""
    problem: str
    """The problem with its numbers, as a sentence without a full stop."""
    remedy: str
    """One sentence that says what to do."""
    about: str = ""
    """The names of the members that it is about; empty for this process."""

    def __str__(self) -> str:
        about = f"{self.about}: " if self.about else ""
        return f"{about}{self.problem}. {self.remedy}."


@dataclass(frozen=True)
class ExaminedMember:
    """One member of a cluster as an examination found it: a worker, or the notebook."""

    name: str
    state: str
    """The worker's state, such as ``idle``, ``busy``, or the way in which it died; empty for the notebook."""
    place: str
    """The identity of the member's host, which members of one host have in common; empty if it is not known."""
    is_alive: bool
    facts: MachineFacts | None
    """The facts that the member told; None if it is dead or did not answer."""
    error: str = ""
    """The reason for which an alive member told no facts."""
    device: str = ""
    """The worker's device as torch names it, with the GPU's number on the host in brackets."""


def of_machine(facts: MachineFacts) -> list[Finding]:
    """Return the faults of a process's machine: of its memory and its ports, which all processes of the host share."""
    found = []
    if facts.memory_left < _LITTLE_MEMORY:
        memory = f"{size(facts.memory_left)} of {size(facts.memory)} of memory"
        problem = f"only {memory} are left, and shared tensors take them"
        remedy = "End what uses memory, which %dist_memory shows, or give a container more with docker run --memory"
        found.append(Finding("shared memory", problem, remedy))
    left = facts.shared_files_left
    if left is None or left < _LITTLE_SHARED_FILES:
        problem = "there is no /dev/shm" if left is None else f"only {size(left)} are free in /dev/shm"
        remedy = (
            "nbdist needs nothing there, but NCCL and the workers of a DataLoader do: start the container with docker "
            "run --shm-size 1g"
        )
        found.append(Finding("shared memory", problem, remedy))
    if facts.ports is not None and (count := facts.ports[1] - facts.ports[0] + 1) < _FEW_PORTS:
        ports = f"{counted(count, 'port')} for programs that ask for any, from {facts.ports[0]} on"
        remedy = 'Allow more with sysctl -w net.ipv4.ip_local_port_range="32768 60999"'
        found.append(Finding("ports", f"the system has only {ports}", remedy))
    return found


def of_process(facts: MachineFacts) -> list[Finding]:
    """Return the faults of a process's own use of its machine: shared memory, open files, GPUs and NCCL."""
    found = []
    if not facts.can_share:
        problem = (
            "this process shares no memory with others of its host, so large tensors go through sockets, which is "
            "slower"
        )
        remedy = "Unset NBDIST_ARENA_BYTES=0 and arena_bytes=0, and let the container use memfd_create and /proc"
        found.append(Finding("shared memory", problem, remedy))
    if facts.files_limit >= 0 and facts.files_limit - facts.files_open < _FEW_FILES:
        problem = f"{facts.files_open:,} of at most {counted(facts.files_limit, 'file')} are open"
        remedy = "Raise the limit with ulimit -n 65536 in the shell that starts Jupyter, or the worker"
        found.append(Finding("open files", problem, remedy))
    return [*found, *_of_gpus(facts)]


def _of_gpus(facts: MachineFacts) -> Iterator[Finding]:
    if not facts.gpu_count and facts.has_driver:
        if not facts.cuda:
            problem, remedy = "torch is built without CUDA", "Install a torch that is built for CUDA to use the GPUs"
        else:
            problem = "torch sees no GPU"
            remedy = "Look at CUDA_VISIBLE_DEVICES and nvidia-smi, and start a container with docker run --gpus all"
        yield Finding("GPUs", f"NVIDIA's driver runs here, but {problem}", remedy)
    for gpu in facts.gpus:
        if not gpu.is_supported:
            major, minor = gpu.capability
            yield Finding(
                "GPUs",
                f"torch {facts.torch} has no code for GPU {gpu.index}, a {gpu.name} of compute capability "
                f"{major}.{minor}",
                "Choose other GPUs with %dist_init -g, or install a torch that is built for it",
            )
        elif gpu.lacks_convolutions:
            problem, _, remedy = gpu.lacks_convolutions.partition(". ")
            yield Finding("GPUs", f"GPU {gpu.index}, {problem}", remedy)
        if gpu.unshared:
            yield Finding(
                "GPUs",
                f"the memory of GPU {gpu.index} cannot be shared between processes ({gpu.unshared}), so tensors "
                "between workers on this GPU go through the host's memory",
                "A newer driver, or a GPU that is not virtual, may share it",
            )
    if facts.unpinned:
        yield Finding(
            "GPUs",
            f"large tensors leave and reach the GPU without pinned memory, which is slower: {facts.unpinned}",
            "Free memory of the host, and restart the worker",
        )
    if facts.gpu_count and not facts.nccl:
        yield Finding(
            "NCCL",
            "torch has no NCCL, so collectives of tensors on GPUs go by way of the host, with gloo",
            "Install a torch that is built for CUDA with NCCL",
        )


def of_clock(ahead: float) -> list[Finding]:
    """Return a finding if a clock is too far from the notebook's: ``ahead`` seconds ahead, or behind if negative."""
    problem = f"the clock is {duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the notebook's"
    remedy = (
        "Set the clocks of both hosts by a time server (timedatectl set-ntp true), or files and logs of the two have "
        "times that do not fit"
    )
    return [Finding("clocks", problem, remedy)] if abs(ahead) > _CLOCKS_APART else []


def find_all(members: Sequence[ExaminedMember], links: Sequence[LinkSpeed], left_out: int = 0) -> list[Finding]:
    """Return all findings about a cluster. Equal findings about several members are one.

    Args:
        members: The members; the notebook is the first.
        links: The measured links. Links to and from members that did not tell their facts are left out.
        left_out: The number of links for whose measurement there was no time.
    """
    found = [*_of_members(members), *_of_versions(members)]
    known = [(member, member.facts) for member in members if member.facts is not None]
    # Reversed, so that the first member of a host stands for the host.
    first_of_host = {member.place: (member, facts) for member, facts in reversed(known)}
    faults = [(member.name, of_machine(facts)) for member, facts in first_of_host.values()]
    faults += [(member.name, of_process(facts)) for member, facts in known]
    from_notebook = [link for link in links if link.sender == members[0].name]  # clocks are held against its clock
    faults += [(link.receiver, of_clock(link.ahead)) for link in from_notebook if link.ahead is not None]
    groups = grouped([(name, each) for name, findings in faults for each in findings], lambda pair: pair[1])
    found += [replace(each, about=say_members([name for name, _ in pairs])) for each, pairs in groups.items()]
    found += _of_links(members, links)
    if left_out:
        problem = f"there was no time to measure {counted(left_out, 'link')}"
        found.append(Finding("links", problem, "Allow more time: %dist_doctor -t 300"))
    return found


def _of_members(members: Sequence[ExaminedMember]) -> Iterator[Finding]:
    for member in members:
        if not member.is_alive:
            yield Finding("members", member.state, f"Start it again with %dist_restart {member.name}", member.name)
        elif member.facts is None and member.state not in ("idle", "busy"):
            problem = f"it is still starting, and has reached the step {member.state!r}"
            yield Finding("members", problem, "Examine the cluster again once it is ready", member.name)
        elif member.facts is None:
            remedy = (
                "%dist_status shows the line that it runs. Code that holds the GIL keeps it from answering: wait, stop "
                f"its cell, or run %dist_restart {member.name}"
            )
            yield Finding("members", f"it does not answer: {member.error}".rstrip("."), remedy, member.name)


def _of_versions(members: Sequence[ExaminedMember]) -> Iterator[Finding]:
    for what in ("torch", "Python", "nbdist", "NCCL"):
        found = [(each.name, each.facts, getattr(each.facts, what.lower())) for each in members if each.facts]
        # Where there is no GPU, nobody misses NCCL.
        versions = {name: version for name, facts, version in found if version or facts.gpu_count}
        holders = grouped(versions, versions.__getitem__)
        if len(holders) > 1:
            told = "; ".join(f"{version or 'none'} on {say_members(names)}" for version, names in holders.items())
            remedy = f"Install the same {what} on all hosts"
            if what in ("torch", "NCCL"):
                remedy = "Install the same torch on all hosts: NCCL works only with itself, and saved files may differ"
            yield Finding("versions", f"the members have different versions of {what}: {told}", remedy)


def _of_links(members: Sequence[ExaminedMember], links: Sequence[LinkSpeed]) -> Iterator[Finding]:
    by_name = {member.name: member for member in members}
    yield from (_failed(link, _is_inside(by_name, link)) for link in links if link.error)
    for link, told in _compared(by_name, links):
        busy = [name for name in (link.sender, link.receiver) if by_name[name].state == "busy"]
        yield _slow(link, told, busy, _is_inside(by_name, link))


def slow_links(members: Sequence[ExaminedMember], links: Sequence[LinkSpeed]) -> list[LinkSpeed]:
    """Return the links that are much slower than others of their kind, by these measurements."""
    return [link for link, _ in _compared({member.name: member for member in members}, links)]


def _compared(by_name: Mapping[str, ExaminedMember], links: Sequence[LinkSpeed]) -> Iterator[tuple[LinkSpeed, str]]:
    """Yield each link that is much slower than others of its kind, with a text that says how slow it is."""
    for is_inside in (True, False):
        of_kind = [link for link in links if _is_inside(by_name, link) is is_inside]
        latencies = [link.latency for link in of_kind if link.latency is not None]
        rates = [link.rate for link in of_kind if link.rate is not None]
        for link in of_kind:
            told = []
            if len(latencies) >= _LINKS_COMPARED and link.latency is not None:
                usual = _of_fast_ones(sorted(latencies))
                if link.latency > max(usual * _TIMES_SLOWER, _FAST_ENOUGH):
                    told.append(f"a small call takes {duration(link.latency)}, and {duration(usual)} elsewhere")
            if len(rates) >= _LINKS_COMPARED and link.rate is not None:
                usual = _of_fast_ones(sorted(rates, reverse=True))
                if link.rate < min(usual / _TIMES_SLOWER, _MOVES_FAST_ENOUGH):
                    told.append(f"a tensor moves at {size(int(link.rate))}/s, and at {size(int(usual))}/s elsewhere")
            if told:
                yield link, " and ".join(told)


def _is_inside(by_name: Mapping[str, ExaminedMember], link: LinkSpeed) -> bool:
    return by_name[link.sender].place == by_name[link.receiver].place


def _of_fast_ones(best_first: Sequence[float]) -> float:
    # The number that a fifth of the links reach or surpass. The median would not do: one slow host among three makes
    # four of the six links slow.
    return best_first[len(best_first) // 5]


def _failed(link: LinkSpeed, is_inside: bool) -> Finding:
    remedy = (
        f"Look at {link.receiver} with %dist_status; %dist_restart {link.receiver} starts it anew"
        if is_inside
        else "Open all TCP ports between the two hosts: workers reach each other directly, at free ports. If a host "
        "has several addresses, name the one that the others reach with --host"
    )
    return Finding("links", f"calls fail: {link.error}".rstrip("."), remedy, f"{link.sender} → {link.receiver}")


def _slow(link: LinkSpeed, told: str, busy: Sequence[str], is_inside: bool) -> Finding:
    if busy:
        remedy = f"Measure again when {' and '.join(busy)} is idle: a cell that computes slows the answers"
    elif is_inside:
        remedy = "Look for other programs that use the cores of this host, and measure again"
    else:
        remedy = (
            "Look for a slow line, a tunnel or a limit between the two hosts; if they share a faster network, name "
            "their addresses in it with --host"
        )
    return Finding("links", told, remedy, f"{link.sender} → {link.receiver}")
