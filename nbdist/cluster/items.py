"""Pieces of output that have a place of their own: a whole line, a display, or that what was there be wiped.

Messages are cut where a worker happened to flush; items are cut where a reader would, so that they can be compared,
put under a name, and shown again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from nbdist.cluster.arrange import LEFT_OUT, Published, label_of, say_left_out

__all__ = ["Item", "display_id", "merged", "updated", "with_own_id"]

_MADE_UP = re.compile(r"[0-9a-f]{32}")


@dataclass(slots=True)
class Item:
    """Text that ends its line, a display, or that what was there be wiped."""

    workers: list[str]
    key: str
    """The same for items of several workers that can be shown as one; empty for what stands alone."""
    since: float
    text: str = ""
    stream: str = "stdout"
    message: Published | None = None

    def render(self) -> list[Published]:
        """Return the messages that show it, under the names of its workers."""
        label = label_of(tuple(self.workers))
        if self.message is not None and self.message.kind == LEFT_OUT:
            return [say_left_out(self.message, self.workers, f"{label} ")]
        if self.message is not None:
            return [_text("stdout", f"{label}\n"), self.message]
        lines = self.text[:-1].split("\n")
        return [_text(self.stream, "".join(f"{label} {line}\n" if line else f"{label}\n" for line in lines))]


def _text(stream: str, text: str) -> Published:
    return Published("stream", {"name": stream, "text": text})


# -- displays -----------------------------------------------------------------------------------


def display_id(message: Published) -> str | None:
    """What a display is called, by which it can be updated."""
    id: str | None = (message.content.get("transient") or {}).get("display_id")
    return id


def with_own_id(worker: str, message: Published) -> Published:
    """A display by the worker's own name for it: several may have called theirs alike, and each updates its own."""
    id = display_id(message)
    if id is None or _MADE_UP.fullmatch(id):
        return message
    transient = {**message.content["transient"], "display_id": f"{worker}:{id}"}
    return message._replace(content={**message.content, "transient": transient})


def updated(shown: Published, update: Published) -> Published:
    """A display with the content that an update brings."""
    content = {**shown.content, "data": update.content["data"], "metadata": update.content.get("metadata", {})}
    return shown._replace(content=content, metadata=update.metadata, buffers=update.buffers)


def merged(published: Iterable[Published]) -> list[Published]:
    """Neighbouring text of one stream as one message."""
    fewer: list[Published] = []
    for stream, group in itertools.groupby(published, lambda m: m.content["name"] if m.kind == "stream" else None):
        run = list(group)
        fewer += run if stream is None else [_text(stream, "".join(message.content["text"] for message in run))]
    return fewer
