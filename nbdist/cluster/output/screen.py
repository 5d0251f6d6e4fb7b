"""The output of several workers that is shown in one place, where the page can only clear all of it.

When one worker clears its own output, the output of the others is shown again. A display that was updated meanwhile is
shown in its newest form.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from nbdist.cluster.output.arranger import Published
from nbdist.cluster.output.pieces import OutputItem, display_id, updated

_CHARACTERS_KEPT = 20_000_000  # characters of output that are kept to be shown again; the oldest are forgotten first


class Screen:
    """The items that have been shown, as far as they are remembered."""

    def __init__(self) -> None:
        self._items: deque[OutputItem] = deque()
        self._displays: dict[str, list[OutputItem]] = {}  # those with a display id, by this id
        self._size = 0
        self._forgotten = False  # True once older items had to be forgotten

    def add(self, item: OutputItem) -> None:
        """Remember an item that has been shown."""
        self._items.append(item)
        self._size += _size(item)
        if item.message is not None and (id := display_id(item.message)) is not None:
            self._displays.setdefault(id, []).append(item)
        while self._size > _CHARACTERS_KEPT:
            self._forgotten = True
            self._forget(self._items.popleft())

    def wipe(self, workers: Sequence[str]) -> bool:
        """Forget what these workers have printed; return whether the page may show any of it."""
        gone = set(workers)
        kept: deque[OutputItem] = deque()
        found = self._forgotten  # forgotten items may have been theirs
        for item in self._items:
            left = [name for name in item.workers if name not in gone]
            found = found or len(left) < len(item.workers)
            item.workers = left  # what others have printed, too, stays with their names
            if left:
                kept.append(item)
            else:
                self._forget(item)
        self._items = kept
        return found

    def update(self, message: Published) -> None:
        """Replace the content of every item with the message's display id."""
        for item in self._displays.get(display_id(message) or "", ()):
            assert item.message is not None
            self._size -= _size(item)
            item.message = updated(item.message, message)
            self._size += _size(item)

    def render(self) -> list[Published]:
        """Return the messages that show all remembered items again."""
        return [message for item in self._items for message in item.render()]

    def _forget(self, item: OutputItem) -> None:
        self._size -= _size(item)
        if item.message is not None and (id := display_id(item.message)) is not None:
            self._displays[id] = [other for other in self._displays[id] if other is not item]
            if not self._displays[id]:
                del self._displays[id]


def _size(item: OutputItem) -> int:
    data = item.message.content.get("data", {}) if item.message is not None else {}
    return 200 + len(item.text) + sum(len(value) for value in data.values() if isinstance(value, str))
