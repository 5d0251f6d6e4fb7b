"""One server of a swarm, as its directory has it for all clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from nbdist.rpc.core.members import RESTARTED
from nbdist.swarm.server.neighbours import Address

State = Literal["joining", "online", "draining", "offline", "gone"]


class ServerEntry(NamedTuple):
    """One server; `nbdist.swarm.placer` draws its states."""

    name: str  # of its worker
    incarnation: int
    address: Address
    state: State = "joining"
    note: str = ""  # why it is gone
    blocks: tuple[int, ...] = ()  # that it serves; it may have others that it has not freed yet
    had: tuple[int, ...] = ()  # the blocks that it served when it died or left

    @property
    def there(self) -> bool:
        """True while the server can be called: it is online or draining."""
        return self.state in ("online", "draining")

    def rested(self, state: State, note: str = "") -> ServerEntry:
        """Return the entry as "gone" or "offline": without blocks. ``note`` is the reason, to show."""
        # After a second call, it must still be known what the server had.
        return self._replace(state=state, note=note, blocks=(), had=self.blocks or self.had)


def orphans(entries: Sequence[ServerEntry], living: Mapping[str, int]) -> list[int]:
    """Return the blocks that servers had, that none serves now, and that one should load though nobody asks, in order.

    ``living`` has the incarnation of each living worker, by name. A worker that is joining, or that was restarted and
    will `join`, loads the blocks that it had itself: these are left out. None are returned if no server is online.
    """
    served, had, awaited = set[int](), set[int](), set[int]()
    for entry in entries:
        is_back = living.get(entry.name, entry.incarnation) != entry.incarnation or entry.note.startswith(RESTARTED)
        served.update(entry.blocks)
        (awaited if entry.state == "joining" or (entry.state == "gone" and is_back) else had).update(entry.had)
    return sorted(had - served - awaited) if any(entry.state == "online" for entry in entries) else []
