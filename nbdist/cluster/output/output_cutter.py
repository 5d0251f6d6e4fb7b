"""Cuts a worker's output in one cell to its first and last lines: a page that shows 100,000 lines freezes. Pure.

::

    line      1 ... 2,000            2,001 ... N - 2,000     N - 1,999 ... N
    is shown  when it is printed     never                   when the worker has ended the cell, below one line that
                                                             says how many were left out, and which magic shows them

Displays are never cut, and neither is a line that the worker overwrites, such as a progress bar.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from nbdist.cluster.output.arranger import LEFT_OUT, OUTPUT, Published, stream_text
from nbdist.cluster.output.pieces import merged
from nbdist.cluster.output.terminal import as_seen

LINES_KEPT = 2000  # lines shown at the beginning, and again at the end
_LINE_KEPT = 100_000  # characters of one line that are shown at its beginning, and again at its end


class OutputCutter:
    """Cuts one worker's text in one cell: messages go in, the messages to show now come out."""

    def __init__(self, cell: int, streams: Container[str]) -> None:
        """Cut the worker's output in cell ``cell`` on these streams, such as "stdout"; other output passes uncut."""
        self._cell = cell
        self._streams = streams
        self._begin()

    def _begin(self) -> None:
        """Forget all lines, and count `left_out` from 0 again."""
        self._shown = 0  # lines that have been shown
        self._open = {"stdout": False, "stderr": False}  # True if the stream's shown text ends in the middle of a line
        self._held: deque[Published] = deque(maxlen=LINES_KEPT)  # the last lines that have not been shown
        self._begun = {"stdout": "", "stderr": ""}  # a held line whose end has not arrived, by stream
        self.left_out = 0
        """The number of lines that were dropped; only the worker's print log has them."""
        self._coloured = False  # True once a held or dropped line may have set a colour
        self._wipe = False  # True after a ``clear_output`` that waits for the next output

    @property
    def holds(self) -> bool:
        """True if there are lines that have not been shown."""
        return bool(self._held or any(self._begun.values()))

    def take(self, message: Published) -> list[Published]:
        """Take a message; return the messages to show now, which may be earlier ones."""
        kind, content = message.kind, message.content
        if self._wipe and kind in OUTPUT:
            self._begin()
        if kind == "clear_output":
            if content.get("wait"):
                self._wipe = True
            else:
                self._begin()
        elif kind == "execute_result":  # usually the cell's end, which is shown below the printed lines
            return [*self.release(), message]
        elif kind == "stream" and content["name"] in self._streams:
            text = "\n".join(map(_cut_line, content["text"].split("\n")))
            return self._take_text(stream_text(content["name"], text), content["name"], text)
        return [message]

    def _take_text(self, message: Published, stream: str, text: str) -> list[Published]:
        """Take text of a stream that is cut; return what to show now."""
        lines = text.count("\n")
        whole_lines = text.endswith("\n")
        # The first LINES_KEPT lines pass as they came, whole or not.
        if not self.holds and (self._shown + lines < LINES_KEPT or (self._shown + lines == LINES_KEPT and whole_lines)):
            self._shown += lines
            self._open[stream] = not whole_lines if text else self._open[stream]
            return [message]
        shown = ""
        *whole, rest = (self._begun[stream] + text).split("\n")
        self._coloured = self._coloured or "\x1b" in text
        for line in whole:
            if self._shown < LINES_KEPT or self._open[stream]:
                shown += f"{line}\n"
                self._shown += 1
                self._open[stream] = False
            else:
                self.left_out += len(self._held) == LINES_KEPT  # the deque drops its oldest line now
                self._held.append(stream_text(stream, f"{line}\n"))
        # More of a line that is shown already, or a progress bar.
        if rest and (self._shown < LINES_KEPT or self._open[stream] or "\r" in rest):
            shown, rest, self._open[stream] = shown + rest, "", True
        self._begun[stream] = rest
        return [stream_text(stream, shown)] if shown else []

    def release(self) -> list[Published]:
        """Return the held lines, below one that says how many were left out."""
        # Also when the worker asks for input: the user must see the text that goes with the question.
        said = [Published(LEFT_OUT, {"lines": self.left_out, "cell": self._cell})] if self.left_out else []
        if self.left_out and self._coloured:
            said.append(stream_text("stdout", "\x1b[0m"))  # the end of a colour may be among the lines left out
        held = merged(self._held)
        held += [stream_text(stream, text) for stream, text in self._begun.items() if text]
        for stream, text in self._begun.items():
            self._open[stream] = bool(text) or self._open[stream]
        self._held.clear()
        self._begun = {"stdout": "", "stderr": ""}
        self.left_out, self._coloured = 0, False
        return [*said, *held]

    def last(self, lines: int) -> list[str]:
        """Return the last of the held lines, as a terminal would show them. They stay held."""
        held = [message.content["text"] for message in list(self._held)[-lines:]]
        texts = [*held, *filter(None, self._begun.values())][-lines:]
        return [as_seen(text.removesuffix("\n")) for text in texts]


def _cut_line(line: str) -> str:
    """Return a line without the middle of what was printed at once; an overwritten line stays whole."""
    if len(line) <= 2 * _LINE_KEPT or "\r" in line:
        return line
    return f"{line[:_LINE_KEPT]} ... {len(line) - 2 * _LINE_KEPT:,} characters left out ... {line[-_LINE_KEPT:]}"
