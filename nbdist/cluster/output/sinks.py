"""The places where the output of workers is shown: under a cell of the notebook, in captured output, or on a terminal.

::

    sys.stdout is the kernel's own      KernelSink    the page; long text is cut
    sys.stdout is something else        CapturedSink  what `%%capture` or `redirect_stdout` has put there; not cut
    no kernel: a script, a terminal     PlainSink     sys.stdout, whatever it is
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from IPython import get_ipython

from nbdist.cluster.output.arranger import Published

_STREAMS = frozenset({"stdout", "stderr"})
_not_captured: tuple[Any, ...] = ()  # the streams and the publisher that were found not to capture anything
# The messages that IPython gives to the hooks of displays (`display_pub.register_hook`).
_SHOWN = ("display_data", "update_display_data")
_DISPLAYS = ("display_data", "update_display_data", "execute_result", "clear_output")


class Sink(Protocol):
    """A place for output. Any thread may use it."""

    interactive: bool
    """True if a user may be watching, and can be asked for input."""

    stop_says: str
    """The words that tell the user what ends a cell, such as ``Stop ends``."""

    cut: frozenset[str]
    """The streams whose long text is cut to its first and last lines."""

    captured: frozenset[str]
    """The streams that the user's code takes as text, so that nothing in them can be replaced later."""

    @property
    def id(self) -> str:
        """The id of the request that caused the output."""

    @property
    def key(self) -> str:
        """A key for `origins` that only this place has: the request's id, and the objects that capture its output."""

    @property
    def page(self) -> Sink:
        """The place for notices: this one, or the notebook's page if this one captures output."""

    def publish(self, message: Published) -> None:
        """Show a message; a place that cannot show messages of its kind drops it."""

    def hand_on(self, payload: Mapping[str, Any]) -> None:
        """Carry out a cell's requests to the front end, such as to show a help page. Main thread only."""


class KernelSink:
    """A cell of a notebook, even after it has ended: published messages have the cell's request as their parent."""

    stop_says = "Stop ends"
    cut = _STREAMS
    captured: frozenset[str] = frozenset()

    def __init__(self, kernel: Any, parent: Mapping[str, Any], hooks: Sequence[Callable[[Any], Any]] = ()) -> None:
        """Show output below the cell whose request is ``parent``."""
        self._kernel = kernel
        self._parent = {"header": parent.get("header", {})}
        # Each gets a message with a display before it is sent, and returns what to send instead, None for nothing.
        # Colab's says in a widget's metadata where the page finds the program that draws it.
        self._display_hooks = tuple(hooks)
        self.interactive = bool(parent.get("content", {}).get("allow_stdin", True))

    @property
    def id(self) -> str:
        """The id of the cell's request."""
        return str(self._parent["header"].get("msg_id", ""))

    key = id

    @property
    def page(self) -> KernelSink:
        """This place itself."""
        return self

    def publish(self, message: Published) -> None:
        """Send a message to the front ends, over the kernel's own output thread."""
        session = self._kernel.session
        made = session.msg(message.kind, dict(message.content), parent=self._parent, metadata=dict(message.metadata))
        for hook in self._display_hooks if message.kind in _SHOWN else ():
            if (made := hook(made)) is None:
                return
        session.send(self._kernel.iopub_socket, made, ident=message.kind.encode(), buffers=list(message.buffers))

    def hand_on(self, payload: Mapping[str, Any]) -> None:
        """Add ``payload`` to the reply of the cell that runs now; the front end acts on it when that cell ends."""
        self._kernel.shell.payload_manager.write_payload(dict(payload))


class CapturedSink:
    """A cell of a notebook whose output is captured, all or part of it. Widgets and notices go to the page.

    ``%%capture`` replaces the streams and the shell's publisher of displays; ``redirect_stdout`` and the like replace
    only a stream.
    """

    stop_says = KernelSink.stop_says

    def __init__(self, page: KernelSink, files: Mapping[str, Any], publisher: Any = None) -> None:
        """Write streams to ``files``, by stream name, and displays to ``publisher``; the rest goes to ``page``."""
        self.page = page
        self.interactive = page.interactive
        self.captured = frozenset(files)
        self.cut = _STREAMS - self.captured
        self._files = files
        self._publisher = publisher

    @property
    def id(self) -> str:
        """The id of the cell's request."""
        return self.page.id

    @property
    def key(self) -> str:
        """The id of the cell's request, and the ids of the objects that capture."""
        return " ".join([self.id, *(f"{id(each):x}" for each in (*self._files.values(), self._publisher))])

    def publish(self, message: Published) -> None:
        """Give a message to the object that captures it; show it on the page if none does, or if that fails."""
        try:
            taken = self._take(message.kind, message.content)
        except Exception:  # such as a closed file; the output must not be lost, and the cell must not fail
            taken = False
        if not taken:
            self.page.publish(message)

    def _take(self, kind: str, content: Mapping[str, Any]) -> bool:
        if kind == "stream" and content["name"] in self._files:
            self._files[content["name"]].write(content["text"])
        elif kind not in _DISPLAYS or self._publisher is None:
            return False
        elif kind == "clear_output":
            self._publisher.clear_output(bool(content.get("wait")))
        else:
            transient, update = content.get("transient"), kind == "update_display_data"
            self._publisher.publish(content["data"], content.get("metadata"), transient=transient, update=update)
        return True

    def hand_on(self, payload: Mapping[str, Any]) -> None:
        """Add ``payload`` to the reply of the cell that runs now."""
        self.page.hand_on(payload)


class PlainSink:
    """The standard output and error of a script or a terminal.

    Displays are printed as their plain text. Updates of displays are dropped, because printed text stays.
    """

    stop_says = "Ctrl-C ends"
    interactive = True
    cut: frozenset[str] = frozenset()
    captured: frozenset[str] = frozenset()
    id = key = "terminal"

    @property
    def page(self) -> PlainSink:
        """This place itself."""
        return self

    def publish(self, message: Published) -> None:
        """Print the parts of a message that are text, if it has any and the streams are open."""
        kind, content, *_ = message
        with contextlib.suppress(ValueError, OSError):  # the streams close at the end of the process
            if kind == "stream":
                file = sys.stderr if content["name"] == "stderr" else sys.stdout
                file.write(content["text"])
                file.flush()
            elif kind in ("display_data", "execute_result"):
                print(content["data"].get("text/plain", "<a display without text>"), flush=True)
            elif kind == "error":
                print("\n".join(content["traceback"]), file=sys.stderr, flush=True)

    def hand_on(self, payload: Mapping[str, Any]) -> None:
        """Print the help page that a worker's reply asks for; ignore anything else that it asks for."""
        if payload.get("source") == "page":
            self.publish(Published("display_data", payload))


def current_sink() -> Sink:
    """Return the place for the output of the code that runs now: the present cell, or the object that captures it."""
    shell: Any = get_ipython()
    sink = sink_of((shell.get_parent() if hasattr(shell, "get_parent") else None) or {})
    return _captured(sink, shell) if isinstance(sink, KernelSink) else sink


def _captured(page: KernelSink, shell: Any) -> Sink:
    """Return the sink for the object that captures the cell's output now; ``page`` if none does."""
    global _not_captured
    # Every call asks for its sink, so the usual case is looked at first.
    if _not_captured == (sys.stdout, sys.stderr, shell.display_pub):
        return page
    from ipykernel.iostream import OutStream
    from IPython.core.displaypub import CapturingDisplayPublisher

    publisher = shell.display_pub if isinstance(shell.display_pub, CapturingDisplayPublisher) else None
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    files = {name: file for name, file in streams.items() if not isinstance(file, OutStream)}
    if files or publisher is not None:
        return CapturedSink(page, files, publisher)
    _not_captured = sys.stdout, sys.stderr, shell.display_pub
    return page


def sink_of(request: Mapping[str, Any]) -> KernelSink | PlainSink:
    """Return the place for output that a front end's message causes; standard output without a kernel."""
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None or not hasattr(kernel, "iopub_socket"):
        return PlainSink()
    return KernelSink(kernel, request, getattr(kernel.shell.display_pub, "_hooks", ()))
