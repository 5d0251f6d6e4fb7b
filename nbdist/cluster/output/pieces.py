"""Pieces of output with a place of their own: a whole line, a display, or a request to clear the output.

Messages end where a worker happened to flush. Items end where a reader would end them, so that they can be compared,
labelled with a worker's name, and shown again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from nbdist.cluster.output.arranger import LEFT_OUT, Published, label_of, say_left_out, stream_text

_GENERATED_ID = re.compile(r"[0-9a-f]{32}")  # a display id that IPython has generated, and that no other worker has


@dataclass(slots=True)
class OutputItem:
    """A whole line of text, a display, or a request to clear the output."""

    workers: list[str]  # the workers whose item this is; more than one if they are shown as one
    # Equal for items of several workers that can be shown as one; "" for an item that is always shown alone, as every
    # item is once `Live` has shown it.
    key: str
    since: float  # when the item was made, by the clock of the arranger
    text: str = ""  # whole lines, with their ends; "" for anything but text
    stream: str = "stdout"
    message: Published | None = None  # for anything but text

    def render(self) -> list[Published]:
        """Return the messages that show the item, labelled with the names of its workers."""
        label = label_of(tuple(self.workers))
        if self.message is not None and self.message.kind == LEFT_OUT:
            return [say_left_out(self.message, self.workers, f"{label} ")]
        if self.message is not None:
            return [stream_text("stdout", f"{label}\n"), self.message]
        lines = self.text[:-1].split("\n")
        return [stream_text(self.stream, "".join(f"{label} {line}\n" if line else f"{label}\n" for line in lines))]


# -- displays -----------------------------------------------------------------------------------


def display_id(message: Published) -> str | None:
    """Return the id by which a display can be updated; None if it has none."""
    id: str | None = (message.content.get("transient") or {}).get("display_id")
    return id


def with_own_id(worker: str, message: Published) -> Published:
    """Return a display with the worker's name before its id: each worker updates its own display."""
    id = display_id(message)
    if id is None or _GENERATED_ID.fullmatch(id):
        return message
    transient = {**message.content["transient"], "display_id": f"{worker}:{id}"}
    return message._replace(content={**message.content, "transient": transient})


def updated(shown: Published, update: Published) -> Published:
    """Return the display ``shown`` with the content that ``update`` brings."""
    content = {**shown.content, "data": update.content["data"], "metadata": update.content.get("metadata", {})}
    return shown._replace(content=content, metadata=update.metadata, buffers=update.buffers)


def merged(published: Iterable[Published]) -> list[Published]:
    """Return the messages with neighbouring text of one stream merged into one message."""
    fewer: list[Published] = []
    for stream, group in itertools.groupby(published, lambda m: m.content["name"] if m.kind == "stream" else None):
        run = list(group)
        fewer += run if stream is None else [stream_text(stream, "".join(message.content["text"] for message in run))]
    return fewer
