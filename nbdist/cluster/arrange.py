"""Arranges the output of several workers in one place: pure, messages in, messages out.

From one worker, output goes on as it came. From several, every line says whose it is; what many workers say alike is
said once; and a progress bar has a line of its own for each worker. Where nobody watches, output is held back
until all have ended, and comes grouped by worker, in their order: the same from one run to the next.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["FOLD_AFTER", "Arranger", "Grouped", "Live", "Published", "Straight", "say_names"]

FOLD_AFTER = 0.1
"""Seconds for which a line waits for others to say the same."""

_DOTS_AFTER = 0.3
"""Seconds after which the beginning of a line is shown; its end mostly comes sooner."""

_REMEMBERED = 10_000
_NUMBERED = re.compile(r"(.*?)(\d+)")


class Published(NamedTuple):
    """A message to be shown."""

    kind: str
    content: Mapping[str, Any]
    metadata: Mapping[str, Any] = {}
    buffers: Sequence[Any] = ()


class Arranger:
    """What takes messages of workers and gives messages to be shown."""

    def feed(self, worker: str, message: Published, now: float) -> list[Published]:
        """A message of a worker has come."""
        raise NotImplementedError

    def flush(self, now: float) -> list[Published]:
        """It is later now."""
        return []

    def next_flush(self) -> float | None:
        """When `flush` has something to do."""
        return None

    def ended(self, worker: str, now: float) -> list[Published]:
        """A worker will say no more, or nothing that others should wait for."""
        return []

    def finish(self, now: float) -> list[Published]:
        """All have ended."""
        return []


class Straight(Arranger):
    """One worker's output as it comes, as if the cell had run here."""

    def feed(self, worker: str, message: Published, now: float) -> list[Published]:
        """Show it."""
        return [message]


def say_names(names: Sequence[str]) -> str:
    """``worker0``, ``worker0,2``, ``worker0-3``: several names in few letters."""
    parts = [_NUMBERED.fullmatch(name) for name in names]
    prefixes = {part[1] for part in parts if part}
    if len(names) == 1 or not all(parts) or len(prefixes) != 1:
        return ",".join(names)
    numbers = sorted(int(part[2]) for part in parts if part)
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    said = [f"{span[0]}-{span[-1]}" if len(span) > 2 else ",".join(map(str, span)) for span in spans]
    return prefixes.pop() + ",".join(said)


# -- pieces of output ---------------------------------------------------------------------------


@dataclass
class _Item:
    """A line of text, or a display."""

    workers: list[str]
    key: str
    message: Published | None
    stream: str = "stdout"
    text: str = ""
    since: float = 0.0

    def render(self) -> list[Published]:
        label = f"[{say_names(self.workers)}]"
        if self.message is None:
            text = f"{label} {self.text}" if self.text.strip("\n") else f"{label}{self.text}"
            return [Published("stream", {"name": self.stream, "text": text})]
        return [Published("stream", {"name": "stdout", "text": f"{label}\n"}), self.message]


class _Lines:
    """Cuts what one worker writes into items: whole lines, and displays."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._begun: dict[str, str] = {}

    def take(self, message: Published, now: float) -> list[_Item]:
        if message.kind == "stream":
            return self._text(message.content["name"], message.content["text"], now)
        items = self.rest(now)
        content = message.content
        if message.kind == "execute_result":
            data = content["data"]
            if set(data) == {"text/plain"}:
                return items + self._text("stdout", data["text/plain"] + "\n", now)
            message = Published("display_data", {"data": data, "metadata": content.get("metadata", {})})
        key = "" if message.content.get("transient") else json.dumps(message.content, sort_keys=True, default=str)
        return [*items, _Item([self._worker], key, message, since=now)]

    def _text(self, stream: str, text: str, now: float) -> list[_Item]:
        text = self._begun.pop(stream, "") + text
        *lines, last = text.split("\n")
        if last:
            self._begun[stream] = last
        return [self._line(stream, _overwritten(line) + "\n", now) for line in lines]

    def rest(self, now: float) -> list[_Item]:
        """What has no end of line yet."""
        begun, self._begun = self._begun, {}
        return [self._line(stream, _overwritten(text) + "\n", now) for stream, text in begun.items() if text]

    def bar(self) -> str | None:
        """A line that has begun, as it stands: a progress bar, or dots."""
        for text in self._begun.values():
            return _overwritten(text)
        return None

    def is_overwritten(self) -> bool:
        """Whether that line is one that is written over and over."""
        return any("\r" in text for text in self._begun.values())

    def _line(self, stream: str, text: str, now: float) -> _Item:
        return _Item([self._worker], f"{stream}:{text}", None, stream, text, now)


def _overwritten(line: str) -> str:
    """A line as it looks after its carriage returns."""
    shown = ""
    for part in line.split("\r"):
        shown = part + shown[len(part) :] if part else shown
    return shown.rstrip() if "\r" in line else shown


# -- several workers, watched -------------------------------------------------------------------


@dataclass
class _Worker:
    lines: _Lines
    queue: list[_Item] = field(default_factory=list)
    ended: bool = False
    clear: bool = False


class Live(Arranger):
    """Output of several workers as it comes, line by line."""

    def __init__(self, workers: Sequence[str], new_id: Callable[[], str] = lambda: uuid.uuid4().hex) -> None:
        self._workers = {name: _Worker(_Lines(name)) for name in workers}
        self._new_id = new_id
        self._shown: list[_Item] = []
        self._bars: str | None = None
        self._bars_shown = ""
        self._bars_due: float | None = None

    def feed(self, worker: str, message: Published, now: float) -> list[Published]:
        """Take it in; show what need not wait."""
        state = self._workers.setdefault(worker, _Worker(_Lines(worker)))
        if message.kind == "clear_output":
            if message.content.get("wait"):
                state.clear = True
                return []
            return self._clear(worker, now, wait=False)
        if message.kind.startswith("comm_") or message.kind == "update_display_data":
            return [*self._release(now, everything=True), message]
        published = []
        if state.clear:
            state.clear = False
            published += self._clear(worker, now, wait=True)
        state.queue += state.lines.take(message, now)
        published += self._release(now)
        if self._bars_due is None and self._bar_text() != self._bars_shown:
            self._bars_due = now + (FOLD_AFTER if state.lines.is_overwritten() else _DOTS_AFTER)
        return published

    def next_flush(self) -> float | None:
        """When a line has waited long enough."""
        times = [state.queue[0].since + FOLD_AFTER for state in self._workers.values() if state.queue]
        if self._bars_due is not None:
            times.append(self._bars_due)
        return min(times, default=None)

    def flush(self, now: float) -> list[Published]:
        """Show what has waited long enough."""
        published = self._release(now)
        if self._bars_due is not None and now >= self._bars_due:
            self._bars_due = None
            published += self._show_bars()
        return published

    def ended(self, worker: str, now: float) -> list[Published]:
        """Its last line needs no end."""
        state = self._workers[worker]
        if not state.lines.is_overwritten():
            state.queue += state.lines.rest(now)
        state.ended = True
        return self._release(now)

    def finish(self, now: float) -> list[Published]:
        """Show all that is left."""
        published = self._release(now, everything=True)
        if self._bar_text() != self._bars_shown:
            published += self._show_bars()
        return published

    # -- folding ------------------------------------------------------------------------------

    def _release(self, now: float, *, everything: bool = False) -> list[Published]:
        """Show the first lines of the queues, as long as there is nothing to wait for."""
        published: list[Published] = []
        while True:
            heads = [(state.queue[0].since, name) for name, state in self._workers.items() if state.queue]
            if not heads:
                return published
            earliest = min(since for since, _ in heads)
            first = next(name for since, name in heads if since < earliest + FOLD_AFTER)  # in the workers' order
            item = self._workers[first].queue[0]
            same = [n for n, s in self._workers.items() if s.queue and item.key and s.queue[0].key == item.key]
            same = same or [first]
            missing = [n for n, s in self._workers.items() if not s.ended and not s.queue]
            if missing and item.key and not everything and now < item.since + FOLD_AFTER:
                return published
            for name in same:
                self._workers[name].queue.pop(0)
            shown = _Item(same, item.key, item.message, item.stream, item.text)
            self._shown.append(shown)
            if len(self._shown) > _REMEMBERED:
                del self._shown[: _REMEMBERED // 10]
            published += shown.render()

    def _clear(self, worker: str, now: float, *, wait: bool) -> list[Published]:
        """One worker wipes its output; that of the others stays."""
        self._release(now, everything=True)
        kept = []
        for item in self._shown:
            item.workers = [name for name in item.workers if name != worker]
            if item.workers:
                kept.append(item)
        self._shown = kept
        self._bars, self._bars_shown = None, ""
        published = [Published("clear_output", {"wait": wait})]
        for item in kept:
            published += item.render()
        return published

    # -- progress bars ------------------------------------------------------------------------

    def _bar_text(self) -> str:
        bars = [(name, state.lines.bar()) for name, state in self._workers.items()]
        return "\n".join(f"[{name}] {bar}" for name, bar in bars if bar is not None)

    def _show_bars(self) -> list[Published]:
        text = self._bar_text()
        if text == self._bars_shown:
            return []
        kind = "update_display_data"
        if self._bars is None:
            self._bars, kind = self._new_id(), "display_data"
        self._bars_shown = text
        content = {"data": {"text/plain": text}, "metadata": {}, "transient": {"display_id": self._bars}}
        return [Published(kind, content)]


# -- several workers, or one, and nobody watches ------------------------------------------------


class Grouped(Arranger):
    """Output held back to the end, by worker."""

    def __init__(self, workers: Sequence[str], *, by_worker: bool = True) -> None:
        self._said: dict[str, list[Published]] = {name: [] for name in workers}
        self._clear: set[str] = set()
        self._by_worker = by_worker

    def feed(self, worker: str, message: Published, now: float) -> list[Published]:
        """Keep it; but what belongs to a widget or a display that is shown already goes on."""
        said = self._said.setdefault(worker, [])
        if message.kind == "clear_output":
            if message.content.get("wait"):
                self._clear.add(worker)
            else:
                said.clear()
            return []
        if message.kind.startswith("comm_"):
            return [message]
        if message.kind == "update_display_data":
            return self._update(message)
        if worker in self._clear:
            self._clear.discard(worker)
            said.clear()
        said.append(message)
        return []

    def _update(self, message: Published) -> list[Published]:
        id = message.content.get("transient", {}).get("display_id")
        for said in self._said.values():
            for index, shown in enumerate(said):
                if shown.content.get("transient", {}).get("display_id") == id:
                    said[index] = Published(shown.kind, {**shown.content, "data": message.content["data"]})
        return []

    def finish(self, now: float) -> list[Published]:
        """Show it all; workers that said the same, together."""
        groups: list[tuple[list[str], list[_Item]]] = []
        for worker, said in self._said.items():
            items = _settled(worker, said)
            for names, others in groups:
                if [item.key for item in others] == [item.key for item in items]:
                    names.append(worker)
                    break
            else:
                groups.append(([worker], items))
        published: list[Published] = []
        for names, items in groups:
            for item in items:
                item.workers = names
                published += item.render()
        self._said = {name: [] for name in self._said}
        return _merged(published)


def _settled(worker: str, said: Sequence[Published]) -> list[_Item]:
    """What one worker said, in an order that does not depend on when its streams were flushed."""
    lines = _Lines(worker)
    items: list[_Item] = []
    part: list[_Item] = []

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


def _merged(published: Sequence[Published]) -> list[Published]:
    """Neighbouring text of one stream as one message."""
    merged: list[Published] = []
    for message in published:
        last = merged[-1] if merged else None
        if (
            last is not None
            and message.kind == last.kind == "stream"
            and message.content["name"] == last.content["name"]
        ):
            merged[-1] = Published(
                "stream", {"name": last.content["name"], "text": last.content["text"] + message.content["text"]}
            )
        else:
            merged.append(message)
    return merged
