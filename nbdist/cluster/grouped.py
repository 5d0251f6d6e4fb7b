"""Output of several workers where nobody watches: a log, which shall be the same from one run to the next.

So it is held back until all have ended, and does not depend on who was faster.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.cluster import arrange
from nbdist.cluster.arrange import OUTPUT, Arranger, Published
from nbdist.cluster.items import Item, display_id, merged, updated, with_own_id
from nbdist.cluster.lines import Lines

__all__ = ["Grouped"]


class _Held:
    """What one worker has said, held back."""

    def __init__(self) -> None:
        self.wipe()

    def wipe(self) -> None:
        self.messages: list[Published] = []
        self.clear = False
        """Whether to wipe as soon as there is more."""
        self._displays: dict[str, list[int]] = {}

    def add(self, message: Published) -> None:
        if self.clear:
            self.wipe()
        if (id := display_id(message)) is not None:
            self._displays.setdefault(id, []).append(len(self.messages))
        self.messages.append(message)

    def update(self, message: Published) -> bool:
        """Change a display that is here; whether it is."""
        places = self._displays.get(display_id(message) or "", [])
        for place in places:
            self.messages[place] = updated(self.messages[place], message)
        return bool(places)


class Grouped(Arranger):
    """Output held back to the end, by worker."""

    def __init__(self, workers: Sequence[str]) -> None:
        self._held = {name: _Held() for name in workers}
        self._finished = False
        self._late: float | None = None

    def feed(self, worker: str, message: Published, now: float) -> list[Published]:
        """Keep it; but what belongs to a widget or a display that is shown already goes on."""
        message = with_own_id(worker, message)
        held = self._held.setdefault(worker, _Held())
        if message.kind == "clear_output":
            if message.content.get("wait"):
                held.clear = True
            else:
                held.wipe()
        elif message.kind == "update_display_data":
            return [] if held.update(message) else [message]
        elif message.kind not in OUTPUT:
            return [message]
        elif message.kind != "stream" or message.content["text"]:
            held.add(message)
            if self._finished and self._late is None:
                self._late = now + arrange.FOLD_AFTER
        return []

    def next_flush(self) -> float | None:
        """When what came after the end is shown."""
        return self._late

    def flush(self, now: float) -> list[Published]:
        """Show what came after the end."""
        return self.finish(now) if self._late is not None and now >= self._late else []

    def finish(self, now: float) -> list[Published]:
        """Show it all; workers that said the same, together."""
        groups: dict[tuple[str, ...], tuple[list[str], list[Item]]] = {}
        for worker, held in self._held.items():
            items = _settled(worker, held.messages)
            alike = tuple(item.key or f"of {worker} alone" for item in items)
            groups.setdefault(alike, ([], items))[0].append(worker)
        published: list[Published] = []
        for workers, items in groups.values():
            for item in items:
                item.workers = workers
                published += item.render()
        self._held = {worker: _Held() for worker in self._held}
        self._finished, self._late = True, None
        return merged(published)


def _settled(worker: str, said: Sequence[Published]) -> list[Item]:
    """What one worker said, in an order that does not depend on when its streams were flushed."""
    lines = Lines(worker)
    items: list[Item] = []
    part: list[Item] = []

    def end_part() -> None:
        items.extend(item for item in part if item.stream == "stdout")
        items.extend(item for item in part if item.stream == "stderr")
        part.clear()

    for message in said:
        for item in lines.take(message, 0.0):
            if item.message is not None:
                end_part()
                items.append(item)
            else:
                part.append(item)
    part += lines.rest(0.0)
    end_part()
    return items
