"""Arranges the output of several workers in one place: pure, messages in, messages out.

From one worker, output goes on as it came. From several, every line says whose it is; what many workers say alike is
said once; and a progress bar has a line of its own for each worker. Where nobody watches, output is held back
until all have ended, and comes grouped by worker, in their order: the same from one run to the next.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["FOLD_AFTER", "Arranger", "Grouped", "Live", "Published", "Straight", "say_names"]

FOLD_AFTER = 0.1
"""Seconds for which a line waits for others to say the same."""

_DOTS_AFTER = 0.3
"""Seconds after which the beginning of a line is shown; its end mostly comes sooner."""

_REMEMBERED = 20_000_000
"""Letters of output that are kept, to be shown again when one worker wipes its own."""

_OUTPUT = ("stream", "display_data", "execute_result", "error")
"""What takes a place below the cell; other messages concern what is there, or a widget."""

_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]*)")
_MADE_UP = re.compile(r"[0-9a-f]{32}")


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
        """All have ended. What comes all the same, from threads that run on, is shown too."""
        return []


class Straight(Arranger):
    """One worker's output as it comes, as if the cell had run here."""

    def feed(self, worker: str, message: Published, now: float) -> list[Published]:
        """Show it."""
        return [message]


def say_names(names: Sequence[str]) -> str:
    """``worker0``, ``worker0,2``, ``worker0-3``: several names in few letters."""
    if len(names) == 1:
        return names[0]
    parts = [_NUMBERED.fullmatch(name) for name in names]
    prefixes = {part[1] for part in parts if part}
    if not all(parts) or len(prefixes) != 1:
        return ",".join(names)
    numbers = sorted({int(part[2]) for part in parts if part})
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    said = [f"{span[0]}-{span[-1]}" if len(span) > 2 else ",".join(map(str, span)) for span in spans]
    return prefixes.pop() + ",".join(said)


@functools.lru_cache(maxsize=256)
def _label(names: tuple[str, ...]) -> str:
    return f"[{say_names(names)}]"


# -- pieces of output ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Item:
    """Text that ends its line, a display, or that what was there be wiped."""

    workers: list[str]
    key: str
    """The same for items of several workers that can be shown as one; empty for what stands alone."""
    since: float
    text: str = ""
    stream: str = "stdout"
    message: Published | None = None

    def render(self) -> list[Published]:
        label = _label(tuple(self.workers))
        if self.message is not None:
            return [_text("stdout", f"{label}\n"), self.message]
        lines = self.text[:-1].split("\n")
        return [_text(self.stream, "".join(f"{label} {line}\n" if line else f"{label}\n" for line in lines))]


def _text(stream: str, text: str) -> Published:
    return Published("stream", {"name": stream, "text": text})


class _Lines:
    """Cuts what one worker writes into items: whole lines, and displays."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self.wipe()

    def wipe(self) -> None:
        """Forget what has been written."""
        self._begun = {"stdout": "", "stderr": ""}
        self._since = {"stdout": 0.0, "stderr": 0.0}
        self._colours: dict[str, dict[int, str]] = {"stdout": {}, "stderr": {}}

    def take(self, message: Published, now: float) -> list[_Item]:
        content = message.content
        if message.kind == "stream":
            return self._take_text(content["name"], content["text"], now)
        if message.kind == "execute_result":
            data = content["data"]
            if set(data) == {"text/plain"}:  # shown as a line that was printed, in one piece
                colours: dict[int, str] = {}
                text = "".join(_close_colours(line, colours) + "\n" for line in data["text/plain"].split("\n"))
                return [*self.rest(now, ("stdout",)), self._item("stdout", text, now)]
            content = {"data": data, "metadata": content.get("metadata", {})}
            message = message._replace(kind="display_data", content=content)
        alone = _display_id(message) is not None  # it may be updated later, alone
        key = "" if alone else json.dumps([message.kind, content], sort_keys=True, default=str)
        return [*self.rest(now), _Item([self._worker], key, now, message=message)]

    def _take_text(self, stream: str, text: str, now: float) -> list[_Item]:
        begun = self._begun.get(stream, "")
        *lines, last = (begun + text).split("\n")
        if lines or not begun:
            self._since[stream] = now
        before, written_over, tail = last.rpartition("\r")
        self._begun[stream] = _overlaid(before) + written_over + tail  # a bar is short, however often it moved
        return [self._line(stream, line, now) for line in lines]

    def rest(self, now: float, streams: Sequence[str] = ("stdout", "stderr"), *, bars: bool = True) -> list[_Item]:
        """What has no end of line yet; with or without what is written over and over."""
        items = []
        for stream in streams:
            text = self._begun[stream]
            if text and (bars or "\r" not in text):
                self._begun[stream] = ""
                if _as_seen(text):
                    items.append(self._line(stream, text, now))
        return items

    def bars(self) -> list[str]:
        """The lines that have begun, as they stand: progress bars, or dots."""
        begun = ((stream, _as_seen(text)) for stream, text in self._begun.items() if text)
        return [_close_colours(text, dict(self._colours[stream])) for stream, text in begun if text]

    def bars_due(self) -> float:
        """From when on they should be shown."""
        return min(
            self._since[stream] + (FOLD_AFTER if "\r" in text else _DOTS_AFTER)
            for stream, text in self._begun.items()
            if text
        )

    def _line(self, stream: str, line: str, now: float) -> _Item:
        return self._item(stream, _close_colours(_as_seen(line), self._colours[stream]) + "\n", now)

    def _item(self, stream: str, text: str, now: float) -> _Item:
        return _Item([self._worker], f"{stream}:{text}", now, text, stream)


# What a terminal does with a carriage return: it writes over what is there, letter by letter.
_PIECE = re.compile(r"\x1b\[([0-9;?]*)([@-~])|.", re.DOTALL)


def _overlaid(line: str) -> str:
    """A line as it looks after its carriage returns."""
    if "\r" not in line:
        return line
    if "\x1b" in line:
        return _overlaid_in_colour(line)
    shown = ""
    for part in line.split("\r"):
        shown = part + shown[len(part) :]
    return shown


def _overlaid_in_colour(line: str) -> str:
    shown: list[str] = []  # each letter, with the escape sequences before it, which take no place
    for part in line.split("\r"):
        at, pending = 0, ""
        for piece in _PIECE.finditer(part):
            if piece[2] == "K":
                del shown[0 if piece[1] == "2" else at :]
                shown += [" "] * (at - len(shown))
            elif piece[2] is not None:
                pending += piece[0]
            else:
                shown[at : at + 1] = [pending + piece[0]]
                at, pending = at + 1, ""
        if at < len(shown):
            shown[at] = pending + shown[at]
        elif shown:
            shown[-1] += pending
    return "".join(shown)


def _as_seen(line: str) -> str:
    return _overlaid(line).rstrip() if "\r" in line else line


_COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
_ENDED_BY = {1: 22, 2: 22, 3: 23, 4: 24, 5: 25, 6: 25, 7: 27, 8: 28, 9: 29}


def _close_colours(line: str, open: dict[int, str]) -> str:
    """A line in the colours that are ``open``, which it changes, and closed, lest others' lines be coloured by it."""
    if not open and "\x1b" not in line:
        return line
    begin = _set_colours(open)
    for match in _COLOUR.finditer(line):
        codes = deque(match[1].split(";"))
        while codes:
            text = codes.popleft()
            code = int(text or 0)
            if code in (38, 48) and codes:  # with an argument of 1 number, or of 3
                length = 2 if codes[0] == "5" else 4
                text = ";".join([text, *(codes.popleft() for _ in range(min(length, len(codes))))])
            if code == 0:
                open.clear()
            elif 22 <= code <= 29 or code in (39, 49):
                open.pop(code, None)
            elif 30 <= code <= 38 or 90 <= code <= 97:
                open[39] = text
            elif 40 <= code <= 48 or 100 <= code <= 107:
                open[49] = text
            elif code in _ENDED_BY:
                open[_ENDED_BY[code]] = text
    return f"{begin}{line}\x1b[0m" if open and line else f"{begin}{line}" if line else line


def _set_colours(open: Mapping[int, str]) -> str:
    return f"\x1b[{';'.join(open.values())}m" if open else ""


# -- displays -----------------------------------------------------------------------------------


def _display_id(message: Published) -> str | None:
    id: str | None = (message.content.get("transient") or {}).get("display_id")
    return id


def _with_own_id(worker: str, message: Published) -> Published:
    """A display by the worker's own name for it: several may have called theirs alike, and each updates its own."""
    id = _display_id(message)
    if id is None or _MADE_UP.fullmatch(id):
        return message
    transient = {**message.content["transient"], "display_id": f"{worker}:{id}"}
    return message._replace(content={**message.content, "transient": transient})


def _updated(shown: Published, update: Published) -> Published:
    content = {**shown.content, "data": update.content["data"], "metadata": update.content.get("metadata", {})}
    return shown._replace(content=content, metadata=update.metadata, buffers=update.buffers)


def _merged(published: Iterable[Published]) -> list[Published]:
    """Neighbouring text of one stream as one message."""
    merged: list[Published] = []
    for stream, group in itertools.groupby(published, lambda m: m.content["name"] if m.kind == "stream" else None):
        run = list(group)
        merged += run if stream is None else [_text(stream, "".join(message.content["text"] for message in run))]
    return merged


# -- several workers, watched -------------------------------------------------------------------


class _Screen:
    """What has been shown, as far as it is remembered."""

    def __init__(self) -> None:
        self._items: deque[_Item] = deque()
        self._displays: dict[str, list[_Item]] = {}
        self._size = 0
        self._forgotten = False

    def add(self, item: _Item) -> None:
        self._items.append(item)
        self._size += _size(item)
        if item.message is not None and (id := _display_id(item.message)) is not None:
            self._displays.setdefault(id, []).append(item)
        while self._size > _REMEMBERED:
            self._forgotten = True
            self._forget(self._items.popleft())

    def wipe(self, workers: Sequence[str]) -> bool:
        """Take away what these workers have said; whether there was anything."""
        gone = set(workers)
        kept: deque[_Item] = deque()
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
        for item in self._displays.get(_display_id(message) or "", ()):
            assert item.message is not None
            self._size -= _size(item)
            item.message = _updated(item.message, message)
            self._size += _size(item)

    def render(self) -> list[Published]:
        return [message for item in self._items for message in item.render()]

    def _forget(self, item: _Item) -> None:
        self._size -= _size(item)
        if item.message is not None and (id := _display_id(item.message)) is not None:
            self._displays[id] = [other for other in self._displays[id] if other is not item]
            if not self._displays[id]:
                del self._displays[id]


def _size(item: _Item) -> int:
    data = item.message.content.get("data", {}) if item.message is not None else {}
    return 200 + len(item.text) + sum(len(value) for value in data.values() if isinstance(value, str))


@dataclass
class _Worker:
    lines: _Lines
    queue: deque[_Item] = field(default_factory=deque)
    ended: bool = False
    clear: bool = False
    """Whether it wants its output wiped as soon as it has more."""


class Live(Arranger):
    """Output of several workers as it comes, line by line."""

    def __init__(self, workers: Sequence[str], new_id: Callable[[], str] = lambda: uuid.uuid4().hex) -> None:
        self._workers = {name: _Worker(_Lines(name)) for name in workers}
        self._new_id = new_id
        self._screen = _Screen()
        self._bars_id: str | None = None
        self._bars: dict[str, list[str]] = {}
        self._bars_due: dict[str, float] = {}

    def feed(self, worker: str, message: Published, now: float) -> list[Published]:
        """Take it in; show what need not wait."""
        state = self._find(worker)
        message = _with_own_id(worker, message)
        if message.kind == "clear_output":
            if message.content.get("wait"):
                state.clear = True
                return []
            self._clear(worker, state, now)
        elif message.kind not in _OUTPUT:
            # It concerns what has its place already, or has a place of its own, as widgets do.
            if message.kind == "update_display_data":
                self._update(state, message)
            shown = self._release(now, everything=True) if message.kind == "comm_close" else []
            return [*shown, message]
        elif message.kind != "stream" or message.content["text"]:
            if state.clear:
                self._clear(worker, state, now)
            state.queue += state.lines.take(message, now)
        published = self._release(now)
        self._note_bars(worker, state, now)
        return published

    def next_flush(self) -> float | None:
        """When a line has waited long enough."""
        times = [state.queue[0].since + FOLD_AFTER for state in self._workers.values() if state.queue]
        return min([*times, *self._bars_due.values()], default=None)

    def flush(self, now: float) -> list[Published]:
        """Show what has waited long enough."""
        published = self._release(now)
        if self._bars_due and min(self._bars_due.values()) <= now:
            published += self._show_bars(now)
        return published

    def ended(self, worker: str, now: float) -> list[Published]:
        """Its last line needs no end."""
        state = self._find(worker)
        state.queue += state.lines.rest(now, bars=False)
        state.ended = True
        published = self._release(now)
        self._note_bars(worker, state, now)
        return published

    def finish(self, now: float) -> list[Published]:
        """Show all that is left."""
        for state in self._workers.values():
            state.queue += state.lines.rest(now, bars=False)
            state.ended = True
        return [*self._release(now), *self._show_bars(now, everything=True)]

    def _find(self, worker: str) -> _Worker:
        if worker not in self._workers:
            self._workers[worker] = _Worker(_Lines(worker))
        return self._workers[worker]

    # -- folding ------------------------------------------------------------------------------

    def _release(self, now: float, *, everything: bool = False) -> list[Published]:
        """Show the first items of the queues, as long as there is nothing to wait for.

        In the workers' order, unless one's has come so much sooner that it would not wait for another's.
        """
        published: list[Published] = []
        queues = {name: state.queue for name, state in self._workers.items() if state.queue}
        silent = sum(not state.queue and not state.ended for state in self._workers.values())
        alike = Counter(queue[0].key for queue in queues.values())
        shown = True
        while shown and queues:
            shown = False
            latest = min(queue[0].since for queue in queues.values()) + FOLD_AFTER
            for name in list(queues):
                while name in queues and (item := queues[name][0]).since < latest:
                    if item.key and silent and not everything and now < item.since + FOLD_AFTER:
                        break
                    shown = True
                    same = [name]
                    if item.key and alike[item.key] > 1:
                        same = [other for other, queue in queues.items() if queue[0].key == item.key]
                    del alike[item.key]
                    for each in same:
                        queue = queues[each]
                        queue.popleft()
                        if queue:
                            alike[queue[0].key] += 1
                        else:
                            del queues[each]
                            silent += not self._workers[each].ended
                    published += self._show(same, item, now)
        return _merged(published)

    def _show(self, workers: list[str], item: _Item, now: float) -> list[Published]:
        if item.message is not None and item.message.kind == "clear_output":
            return self._wipe(workers, item.message, now)
        item.workers, item.key = workers, ""
        self._screen.add(item)
        return item.render()

    # -- wiping and updating ------------------------------------------------------------------

    def _clear(self, worker: str, state: _Worker, now: float) -> None:
        """Have a worker's output wiped when it is its turn; what was not shown yet never will be."""
        message = Published("clear_output", {"wait": state.clear})
        state.clear = False
        state.lines.wipe()
        state.queue.clear()
        state.queue.append(_Item([worker], f"clear:{message.content['wait']}", now, message=message))

    def _wipe(self, workers: Sequence[str], message: Published, now: float) -> list[Published]:
        """Some workers wipe their output; that of the others stays."""
        found = self._screen.wipe(workers)
        if not found and not any(name in self._bars for name in workers):
            return []
        self._bars_due.update(dict.fromkeys(self._bars, now))
        self._bars_id, self._bars = None, {}
        for name in workers:
            self._bars_due.pop(name, None)
            self._note_bars(name, self._workers[name], now)
        return [message, *self._screen.render(), *self._show_bars(now)]

    def _update(self, state: _Worker, message: Published) -> None:
        """A display has a new content, also where it waits to be shown, or will be shown again."""
        self._screen.update(message)
        for item in state.queue:
            if item.message is not None and _display_id(item.message) == _display_id(message):
                item.message = _updated(item.message, message)

    # -- progress bars ------------------------------------------------------------------------

    def _note_bars(self, worker: str, state: _Worker, now: float) -> None:
        """See to it that the bars of a worker are shown as they are, in time."""
        bars, shown = state.lines.bars(), self._bars.get(worker, [])
        if bars == shown:
            self._bars_due.pop(worker, None)
        elif bars and not shown:
            self._bars_due[worker] = state.lines.bars_due()
        else:
            self._bars_due.setdefault(worker, now + FOLD_AFTER)

    def _show_bars(self, now: float, *, everything: bool = False) -> list[Published]:
        """Show them in one display, those that have been shown before and those whose time has come."""
        shown: dict[str, list[str]] = {}
        for name, state in self._workers.items():
            if everything or name in self._bars or self._bars_due.get(name, now) <= now:
                self._bars_due.pop(name, None)
                if bars := state.lines.bars():
                    shown[name] = bars
        if shown == self._bars:
            return []
        kind = "update_display_data"
        if self._bars_id is None:
            self._bars_id, kind = self._new_id(), "display_data"
        self._bars = shown
        text = "\n".join(f"{_label((name,))} {bar}" for name, bars in shown.items() for bar in bars)
        content = {"data": {"text/plain": text}, "metadata": {}, "transient": {"display_id": self._bars_id}}
        return [Published(kind, content)]


# -- several workers, and nobody watches --------------------------------------------------------


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
        if (id := _display_id(message)) is not None:
            self._displays.setdefault(id, []).append(len(self.messages))
        self.messages.append(message)

    def update(self, message: Published) -> bool:
        """Change a display that is here; whether it is."""
        places = self._displays.get(_display_id(message) or "", [])
        for place in places:
            self.messages[place] = _updated(self.messages[place], message)
        return bool(places)


class Grouped(Arranger):
    """Output held back to the end, by worker."""

    def __init__(self, workers: Sequence[str]) -> None:
        self._held = {name: _Held() for name in workers}
        self._finished = False
        self._late: float | None = None

    def feed(self, worker: str, message: Published, now: float) -> list[Published]:
        """Keep it; but what belongs to a widget or a display that is shown already goes on."""
        message = _with_own_id(worker, message)
        held = self._held.setdefault(worker, _Held())
        if message.kind == "clear_output":
            if message.content.get("wait"):
                held.clear = True
            else:
                held.wipe()
        elif message.kind == "update_display_data":
            return [] if held.update(message) else [message]
        elif message.kind not in _OUTPUT:
            return [message]
        elif message.kind != "stream" or message.content["text"]:
            held.add(message)
            if self._finished and self._late is None:
                self._late = now + FOLD_AFTER
        return []

    def next_flush(self) -> float | None:
        """When what came after the end is shown."""
        return self._late

    def flush(self, now: float) -> list[Published]:
        """Show what came after the end."""
        return self.finish(now) if self._late is not None and now >= self._late else []

    def finish(self, now: float) -> list[Published]:
        """Show it all; workers that said the same, together."""
        groups: dict[tuple[str, ...], tuple[list[str], list[_Item]]] = {}
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
