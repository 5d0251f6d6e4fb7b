"""Compares the collectives of the members of each process group, and says where the members part. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from nbdist.amounts import plural
from nbdist.cluster.group_history import GroupHistory
from nbdist.cluster.output.arranger import grouped, say_names

_ROUNDED = 0.1  # gloo sends a tensor in pieces whose lengths it rounds


class Parting(NamedTuple):
    """The first collective of a process group that not all of its members have called in the same way."""

    group: str
    """torch's name of the group."""
    number: int
    text: str
    absent: tuple[str, ...] = ()
    """The members that have not called it. If there are none, the members called different collectives."""
    present: Sequence[str] = ()
    """The members that have called it, and are not past it."""
    behind: int = 0
    """The number of collectives that the members that have not called it lack, at most."""


def find_partings(
    histories: Mapping[str, Sequence[GroupHistory]], names: Sequence[str], *, at_rest: bool = False
) -> list[Parting]:
    """Return where the members of each group part: at most one `Parting` for each group.

    ``histories`` has what each worker tells of its groups; nothing is claimed of a worker that has told nothing.
    ``names`` are the names of all workers, by rank. A collective that some members lack counts if another one waits in
    it; if all are ``at_rest``, it counts if these members are not busy, and so will not call it any more. A send or
    receive for which a member waits, and that the other member has not called, makes a `Parting` of its own; none
    ``at_rest``, because the other one may call it in a later cell.
    """
    groups: dict[str, dict[str, GroupHistory]] = {}
    for worker, told in histories.items():
        for history in told:
            groups.setdefault(history.name, {})[worker] = history
    found = (_part(members, names) or _lack(members, names, at_rest) for members in groups.values())
    unmatched = [] if at_rest else [each for members in groups.values() for each in _find_unmatched(members, names)]
    return [*(each for each in found if each is not None), *unmatched]


def say_last(histories: Mapping[str, Sequence[GroupHistory]], names: Sequence[str], lost: Sequence[str]) -> list[str]:
    """Return a text for each group of ``lost`` workers: the collective that each other one has called last there."""
    said = []
    for members in _groups_of(lost, histories, names):
        last = {worker: (each.last, each.kinds[each.given[-1]].text) for worker, each in members.items()}
        each = [
            f"{say_names(who)} {text} (#{number})" for (number, text), who in grouped(last, last.__getitem__).items()
        ]
        title = _title(next(iter(members.values())), names)
        said.append(f"last in the {title}: {', '.join(each)}")
    return said


def find_odd_one(
    histories: Mapping[str, Sequence[GroupHistory]], names: Sequence[str], lost: str, share: float
) -> str | None:
    """Return the worker that gave another number of bytes to the last collective than all others; None if unsure."""
    # Gloo has ended ``lost``, which expected ``share`` of the bytes that another one sent to it.
    groups = _groups_of([lost], histories, names)
    if len(groups) != 1:  # in which group it died is not known
        return None
    (members,) = groups
    is_whole = {*members, lost} == {names[rank] for history in members.values() for rank in history.ranks}
    bytes_given = {worker: history.kinds[history.given[-1]].bytes for worker, history in members.items()}
    by_size = grouped(bytes_given, bytes_given.__getitem__)
    sizes = sorted(by_size)
    if not is_whole or 0 in sizes or len({each.last for each in members.values()}) > 1:
        return None
    if len(sizes) == 1 and len(members) > 1:
        return lost
    if len(sizes) == 2 and abs(sizes[1] * share - sizes[0]) <= _ROUNDED * sizes[0]:  # the larger was the sender
        by_size[sizes[0]].append(lost)
        return next((workers[0] for workers in by_size.values() if len(workers) == 1), None)
    return None


def _groups_of(
    lost: Sequence[str], histories: Mapping[str, Sequence[GroupHistory]], names: Sequence[str]
) -> list[dict[str, GroupHistory]]:
    """Return the histories of the other members of each group of ``lost`` workers, by worker."""
    groups: dict[str, dict[str, GroupHistory]] = {}
    for worker, told in histories.items():
        for history in told:
            if history.given and any(names[rank] in lost for rank in history.ranks if rank < len(names)):
                groups.setdefault(history.name, {})[worker] = history
    return list(groups.values())


def _part(members: Mapping[str, GroupHistory], names: Sequence[str]) -> Parting | None:
    """Return the first collective for which members gave different things, if their recorders still know it."""
    told = list(members.values())
    begin = max(each.first for each in told)
    end = max(begin, min(each.last for each in told) + 1)
    same_everywhere: set[tuple[int, ...]] = set()  # thousands of collectives are of a few kinds
    known = [each.given[begin - each.first : end - each.first] for each in told]
    for number, indices in enumerate(zip(*known, strict=True), begin):
        if indices in same_everywhere:
            continue
        given = {name: history.kinds[index] for (name, history), index in zip(members.items(), indices, strict=True)}
        if all(one.agrees_with(other) for one, other in combinations(dict.fromkeys(given.values()), 2)):
            same_everywhere.add(indices)
            continue
        texts = {worker: each.text for worker, each in given.items()}
        said = [f"{say_names(workers)} {text}" for text, workers in grouped(texts, texts.__getitem__).items()]
        text = f"#{number} of the {_title(told[0], names)} is not the same collective everywhere: {', '.join(said)}"
        return Parting(told[0].name, number, text)
    return None


def _lack(members: Mapping[str, GroupHistory], names: Sequence[str], at_rest: bool) -> Parting | None:
    """Return the first collective that some members have called, and others have not."""
    number = min(history.last for history in members.values()) + 1
    absent = [worker for worker, history in members.items() if history.last < number]
    waits = {worker: wait for worker, history in members.items() for wait in history.waits if wait.number == number}
    counts = not any(members[worker].busy for worker in absent) if at_rest else bool(waits)
    there = {worker: history for worker, history in members.items() if history.first <= number <= history.last}
    if not there or not counts:  # nobody has called it, or their recorders have dropped it
        return None
    given = [history.kinds[history.given[number - history.first]] for history in there.values()]
    places = " and ".join(dict.fromkeys(each.place for each in given if each.place))
    tensors = f", {given[0].tensors}" if given[0].tensors else ""
    owner = next((f", for {wait.owner}" for wait in waits.values() if wait.owner), "")
    history = next(iter(there.values()))
    text = (
        f"{say_names(absent)} {plural(len(absent), 'has', 'have')} not come to {given[0].name} #{number}"
        f"{places and f' ({places})'}{tensors}, {_title(history, names)}{owner}"
    )
    behind = max(each.last for each in there.values()) - number + 1
    return Parting(history.name, number, text, tuple(absent), list(waits), behind)


def _find_unmatched(members: Mapping[str, GroupHistory], names: Sequence[str]) -> list[Parting]:
    """Return the sends and receives for which members wait, and that their partners have not called."""
    # Of a chain of members that wait for each other, only those for members that do not wait themselves.
    known = {names.index(worker): each.transfers for worker, each in members.items() if each.transfers is not None}
    counts = {(one.is_send, rank, one.peer, one.tag): one.count for rank, told in known.items() for one in told}
    found = []
    for worker, history in members.items():
        for own in filter(lambda each: each.waits, history.transfers or ()):
            if own.peer not in known:
                continue  # one that has told nothing may have called it; and for `recv` from any member, anyone may
            me, partner = names.index(worker), names[own.peer]
            theirs = sum(counts.get((not own.is_send, own.peer, to, own.tag), 0) for to in (me, -1))
            if (lacking := own.count - theirs) > 0:
                given = own.newest[min(lacking, len(own.newest)) - 1]
                what = f"recv #{theirs + 1} from {worker}" if own.is_send else f"send #{theirs + 1} to {worker}"
                tag = f", tag {own.tag}" if own.tag else ""
                here = f"({given.name}{given.place and f' at {given.place}'}), {given.tensors}{tag}"
                text = f"{partner} has not come to {what} {here}, {_title(history, names)}"
                found.append(Parting(history.name, theirs + 1, text, (partner,), [worker], lacking))
    waiting = {each.present[0] for each in found}
    return [each for each in found if not waiting.intersection(each.absent)] or found


def _title(history: GroupHistory, names: Sequence[str]) -> str:
    """Return the group in words: the user's own, or its members."""
    known = [names[rank] for rank in history.ranks if rank < len(names)]
    return history.title or f"group of {say_names(known)}"
