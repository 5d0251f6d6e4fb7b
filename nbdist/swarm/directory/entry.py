"""One server of a swarm, as its directory has it for all clients."""

from __future__ import annotations

from typing import Literal, NamedTuple

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
