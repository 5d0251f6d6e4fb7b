"""Cuts one worker's output into items: only whole lines can be labelled, and compared with other workers' lines.

A line without an end is held back: usually its end arrives soon; otherwise it is a progress bar, or dots that a program
prints one by one.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence

from nbdist.cluster.output import arranger
from nbdist.cluster.output.arranger import LEFT_OUT, Published
from nbdist.cluster.output.pieces import OutputItem, display_id
from nbdist.cluster.output.terminal import as_seen, close_colours, overlaid

_DOTS_AFTER = 0.3  # seconds after which an unfinished line without carriage returns is shown; usually its end is sooner


class Lines:
    """Cuts one worker's output into items: whole lines, and displays.

    In the streams ``plain``, nothing that is shown can be replaced: of a line that is overwritten, only the last state
    becomes an item.
    """

    def __init__(self, worker: str, plain: Container[str] = ()) -> None:
        self._worker = worker
        self._plain = plain
        self.wipe()

    def wipe(self) -> None:
        """Forget the unfinished lines and the colours."""
        # All by stream: the text of the unfinished line, when it began, and the colours that are set at this point.
        self._begun = {"stdout": "", "stderr": ""}
        self._since = {"stdout": 0.0, "stderr": 0.0}
        self._colours: dict[str, dict[int, str]] = {"stdout": {}, "stderr": {}}

    def take(self, message: Published, now: float) -> list[OutputItem]:
        """Take a message; return the items (whole lines, or displays) that it completes."""
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
            return [*self.rest(now, bars=False), OutputItem([self._worker], json.dumps(content), now, message=message)]
        alone = display_id(message) is not None  # the worker may update its own display later
        key = "" if alone else json.dumps([message.kind, content], sort_keys=True, default=str)
        return [*self.rest(now), OutputItem([self._worker], key, now, message=message)]

    def _take_text(self, stream: str, text: str, now: float) -> list[OutputItem]:
        """Add text that arrived at ``now`` to a stream; return the lines that it completes."""
        begun = self._begun.get(stream, "")
        *lines, last = (begun + text).split("\n")
        if lines or not begun:  # else the unfinished line is the one that began earlier
            self._since[stream] = now
        before, written_over, tail = last.rpartition("\r")
        self._begun[stream] = overlaid(before) + written_over + tail  # a bar is short, however often it moved
        return [self._line(stream, line, now) for line in lines]

    def rest(self, now: float, streams: Sequence[str] = ("stdout", "stderr"), *, bars: bool = True) -> list[OutputItem]:
        """Return the unfinished lines as items, and forget them; without ``bars``, progress bars stay."""
        items = []
        for stream in streams:
            text = self._begun[stream]
            # Bars are lines with carriage returns, but not in the plain streams, where nothing can be replaced.
            if text and (bars or "\r" not in text or stream in self._plain):
                self._begun[stream] = ""
                if as_seen(text):
                    items.append(self._line(stream, text, now))
        return items

    def bars(self) -> list[str]:
        """Return the unfinished lines as they stand: progress bars, or dots."""
        begun = ((stream, as_seen(text)) for stream, text in self._replaceable())
        # The lines stay unfinished, so their colours are not taken over: `dict` makes a copy.
        return [close_colours(text, dict(self._colours[stream])) for stream, text in begun if text]

    def bars_due(self) -> float:
        """Return when the unfinished lines should be shown. Raises ValueError if none can be shown."""
        return min(
            self._since[stream] + (arranger.FOLD_AFTER if "\r" in text else _DOTS_AFTER)
            for stream, text in self._replaceable()
        )

    def _replaceable(self) -> Iterator[tuple[str, str]]:
        """Yield the stream and text of each unfinished line whose display can be replaced."""
        return ((stream, text) for stream, text in self._begun.items() if text and stream not in self._plain)

    def _line(self, stream: str, line: str, now: float) -> OutputItem:
        return self._item(stream, close_colours(as_seen(line), self._colours[stream]) + "\n", now)

    def _item(self, stream: str, text: str, now: float) -> OutputItem:
        return OutputItem([self._worker], f"{stream}:{text}", now, text, stream)
