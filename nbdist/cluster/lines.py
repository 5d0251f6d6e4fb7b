"""Cuts what one worker writes into items, because only whole lines can be put under a name or compared with others'.

What has no end of line yet is kept: mostly its end comes soon, and otherwise it is a progress bar, or dots.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence

from nbdist.cluster import arrange
from nbdist.cluster.arrange import LEFT_OUT, Published
from nbdist.cluster.items import Item, display_id
from nbdist.cluster.terminal import as_seen, close_colours, overlaid

__all__ = ["Lines"]

_DOTS_AFTER = 0.3
"""Seconds after which the beginning of a line is shown; its end mostly comes sooner."""


class Lines:
    """Cuts what one worker writes into items: whole lines, and displays.

    The streams in ``plain`` have no progress bars: of a line that is written over and over, its last state is a line.
    """

    def __init__(self, worker: str, plain: Container[str] = ()) -> None:
        self._worker = worker
        self._plain = plain
        self.wipe()

    def wipe(self) -> None:
        """Forget what has been written."""
        self._begun = {"stdout": "", "stderr": ""}
        self._since = {"stdout": 0.0, "stderr": 0.0}
        self._colours: dict[str, dict[int, str]] = {"stdout": {}, "stderr": {}}

    def take(self, message: Published, now: float) -> list[Item]:
        """What is whole with this message; the beginning of a line is kept."""
        content = message.content
        if message.kind == "stream":
            return self._take_text(content["name"], content["text"], now)
        if message.kind == "execute_result":
            data = content["data"]
            if set(data) == {"text/plain"}:  # shown as a line that was printed, in one piece
                colours: dict[int, str] = {}
                text = "".join(close_colours(line, colours) + "\n" for line in data["text/plain"].split("\n"))
                return [*self.rest(now, ("stdout",)), self._item("stdout", text, now)]
            content = {"data": data, "metadata": content.get("metadata", {})}
            message = message._replace(kind="display_data", content=content)
        if message.kind == LEFT_OUT:
            return [*self.rest(now, bars=False), Item([self._worker], json.dumps(content), now, message=message)]
        alone = display_id(message) is not None  # it may be updated later, alone
        key = "" if alone else json.dumps([message.kind, content], sort_keys=True, default=str)
        return [*self.rest(now), Item([self._worker], key, now, message=message)]

    def _take_text(self, stream: str, text: str, now: float) -> list[Item]:
        begun = self._begun.get(stream, "")
        *lines, last = (begun + text).split("\n")
        if lines or not begun:
            self._since[stream] = now
        before, written_over, tail = last.rpartition("\r")
        self._begun[stream] = overlaid(before) + written_over + tail  # a bar is short, however often it moved
        return [self._line(stream, line, now) for line in lines]

    def rest(self, now: float, streams: Sequence[str] = ("stdout", "stderr"), *, bars: bool = True) -> list[Item]:
        """What has no end of line yet; with or without what is written over and over."""
        items = []
        for stream in streams:
            text = self._begun[stream]
            if text and (bars or "\r" not in text or stream in self._plain):
                self._begun[stream] = ""
                if as_seen(text):
                    items.append(self._line(stream, text, now))
        return items

    def bars(self) -> list[str]:
        """The lines that have begun, as they stand: progress bars, or dots."""
        begun = ((stream, as_seen(text)) for stream, text in self._moving())
        return [close_colours(text, dict(self._colours[stream])) for stream, text in begun if text]

    def bars_due(self) -> float:
        """From when on they should be shown."""
        return min(
            self._since[stream] + (arrange.FOLD_AFTER if "\r" in text else _DOTS_AFTER)
            for stream, text in self._moving()
        )

    def _moving(self) -> Iterator[tuple[str, str]]:
        return ((stream, text) for stream, text in self._begun.items() if text and stream not in self._plain)

    def _line(self, stream: str, line: str, now: float) -> Item:
        return self._item(stream, close_colours(as_seen(line), self._colours[stream]) + "\n", now)

    def _item(self, stream: str, text: str, now: float) -> Item:
        return Item([self._worker], f"{stream}:{text}", now, text, stream)
