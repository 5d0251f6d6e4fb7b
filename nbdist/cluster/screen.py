"""What of several workers has been shown, in one place where only all of it can be wiped.

When one worker wipes its own output, that of the others is shown again; and a display that was updated meanwhile is
shown as it is by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from nbdist.cluster.arrange import Published
from nbdist.cluster.items import Item, display_id, updated

__all__ = ["Screen"]

_REMEMBERED = 20_000_000
"""Letters of output that are kept, to be shown again when one worker wipes its own."""


class Screen:
    """What has been shown, as far as it is remembered."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._displays: dict[str, list[Item]] = {}
        self._size = 0
        self._forgotten = False

    def add(self, item: Item) -> None:
        """It has been shown."""
        self._items.append(item)
        self._size += _size(item)
        if item.message is not None and (id := display_id(item.message)) is not None:
            self._displays.setdefault(id, []).append(item)
        while self._size > _REMEMBERED:
            self._forgotten = True
            self._forget(self._items.popleft())

    def wipe(self, workers: Sequence[str]) -> bool:
        """Take away what these workers have said; whether there was anything."""
        gone = set(workers)
        kept: deque[Item] = deque()
        found = self._forgotten
        for item in self._items:
            left = [name for name in item.workers if name not in gone]
            found = found or len(left) < len(item.workers)
            item.workers = left
            if left:
                kept.append(item)
            else:
                self._forget(item)
        self._items = kept
        return found

    def update(self, message: Published) -> None:
        """A display has a new content."""
        for item in self._displays.get(display_id(message) or "", ()):
            assert item.message is not None
            self._size -= _size(item)
            item.message = updated(item.message, message)
            self._size += _size(item)

    def render(self) -> list[Published]:
        """All that is remembered, to be shown again."""
        return [message for item in self._items for message in item.render()]

    def _forget(self, item: Item) -> None:
        self._size -= _size(item)
        if item.message is not None and (id := display_id(item.message)) is not None:
            self._displays[id] = [other for other in self._displays[id] if other is not item]
            if not self._displays[id]:
                del self._displays[id]


def _size(item: Item) -> int:
    data = item.message.content.get("data", {}) if item.message is not None else {}
    return 200 + len(item.text) + sum(len(value) for value in data.values() if isinstance(value, str))
