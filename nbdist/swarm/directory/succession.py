"""Chooses who is a swarm's next placer when the placer is lost, and with which directory it begins. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbdist.swarm.directory.entry import ServerEntry
from nbdist.swarm.server.neighbours import Address


def successors(entries: Sequence[ServerEntry], hosts: Mapping[int, str], preferred: str) -> list[ServerEntry]:
    """Return the servers that may make the next placer, in the order in which they are asked.

    ``hosts`` has the host of each living worker, by its incarnation. Workers of the host ``preferred`` come first: they
    can read the file of weights.
    """
    alive = [entry for entry in entries if entry.there and entry.incarnation in hosts]
    return sorted(alive, key=lambda entry: (entry.state != "online", hosts[entry.incarnation] != preferred))


def settled(entries: Sequence[ServerEntry], loaded: Mapping[Address, Sequence[int]]) -> list[ServerEntry]:
    """Return a directory's last entries as the next placer begins with them.

    ``loaded`` has the blocks that are in the memory of each server that has answered. A server that was joining is
    "gone". One that was about to leave is "online": nobody may be left to dismiss it. Blocks that are loaded, and that
    no server serves, are served by the first server that has them; a move was interrupted after it had loaded them.
    """
    found = [
        entry.rested("gone", "the placer was lost while this server joined")
        if entry.state == "joining"
        else entry._replace(
            state="online" if entry.there else entry.state,
            blocks=tuple(number for number in entry.blocks if number in loaded.get(entry.address, entry.blocks)),
        )
        for entry in entries
    ]
    served = {number for entry in found for number in entry.blocks}
    for at, entry in enumerate(found):
        if entry.there and (orphans := {*loaded.get(entry.address, ())} - served):
            served |= orphans
            found[at] = entry._replace(blocks=tuple(sorted({*entry.blocks, *orphans})))
    return found
