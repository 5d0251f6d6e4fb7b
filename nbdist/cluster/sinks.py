"""Where the output of workers is shown: under a cell of the notebook, on a terminal, or nowhere.

::

    sys.stdout is the kernel's own      KernelSink    the page; long text is cut
    sys.stdout is something else        CapturedSink  what `%%capture` or `redirect_stdout` has put there; not cut
    no kernel: a script, a terminal     PlainSink     sys.stdout, whatever it is
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from IPython import get_ipython

__all__ = ["CapturedSink", "KernelSink", "PlainSink", "Sink", "current_sink", "sink_of"]

_STREAMS = frozenset({"stdout", "stderr"})
_not_captured: tuple[Any, ...] = ()
"""The streams and the publisher with which nothing was captured."""

_DISPLAYS = ("display_data", "update_display_data", "execute_result", "clear_output")


class Sink(Protocol):
    """A place for output. Called in any thread."""

    interactive: bool
    """Whether somebody may be watching, and could be asked for input."""

    stop_says: str
    """How to tell somebody what ends a cell, such as ``Stop ends``."""

    cut: frozenset[str]
    """The streams of which only the first and the last lines are shown."""

    captured: frozenset[str]
    """The streams that the user's code takes as text: nothing in them can be replaced later."""

    @property
    def id(self) -> str:
        """The id of the request that caused the output."""
        ...

    @property
    def key(self) -> str:
        """What tells this place from all others: the id, and what captures the output."""
        ...

    @property
    def page(self) -> Sink:
        """Where notices are shown: here, or below the cell whose output is captured."""
        ...

    def publish(
        self,
        kind: str,
        content: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        buffers: Sequence[Any] | None = None,
    ) -> None:
        """Show what a Jupyter message of that kind says."""
        ...

    def hand_on(self, payload: Mapping[str, Any]) -> None:
        """Do what a cell asks for in its reply: show a page, write a next cell. In the main thread."""
        ...


class KernelSink:
    """A cell of a notebook, also after it has ended: its request is the parent of what is published."""

    stop_says = "Stop ends"
    cut = _STREAMS
    captured: frozenset[str] = frozenset()

    def __init__(self, kernel: Any, parent: Mapping[str, Any]) -> None:
        self._kernel = kernel
        self._parent = {"header": parent.get("header", {})}
        self.interactive = bool(parent.get("content", {}).get("allow_stdin", True))

    @property
    def id(self) -> str:
        """The id of the cell's request."""
        return str(self._parent["header"].get("msg_id", ""))

    @property
    def key(self) -> str:
        """The id."""
        return self.id

    @property
    def page(self) -> KernelSink:
        """This place."""
        return self

    def publish(
        self,
        kind: str,
        content: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        buffers: Sequence[Any] | None = None,
    ) -> None:
        """Publish to the front ends, over the kernel's own output thread."""
        self._kernel.session.send(
            self._kernel.iopub_socket,
            kind,
            dict(content),
            parent=self._parent,
            ident=kind.encode(),
            metadata=dict(metadata or {}),
            buffers=list(buffers or ()),
        )

    def hand_on(self, payload: Mapping[str, Any]) -> None:
        """Put it into the reply of the cell that runs."""
        self._kernel.shell.payload_manager.write_payload(dict(payload))


class CapturedSink:
    """A cell of a notebook whose output is captured, in part or all of it. Widgets and notices go to the page."""

    stop_says = KernelSink.stop_says

    def __init__(self, page: KernelSink, files: Mapping[str, Any], publisher: Any = None) -> None:
        """Write streams to ``files``, by their names, and give displays to ``publisher``; the rest goes to the page."""
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
        """The id, and the objects that capture."""
        return " ".join([self.id, *(f"{id(each):x}" for each in (*self._files.values(), self._publisher))])

    def publish(
        self,
        kind: str,
        content: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        buffers: Sequence[Any] | None = None,
    ) -> None:
        """Give a message to what captures it; show it on the page if nothing does, or if that fails."""
        try:
            taken = self._take(kind, content)
        except Exception:  # the file was closed, say; the output of workers must not be lost, nor their cell fail
            taken = False
        if not taken:
            self.page.publish(kind, content, metadata, buffers)

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
        """Put it into the reply of the cell that runs."""
        self.page.hand_on(payload)


class PlainSink:
    """Standard output and error of a script or a terminal."""

    stop_says = "Ctrl-C ends"
    interactive = True
    cut: frozenset[str] = frozenset()
    captured: frozenset[str] = frozenset()
    id = key = "terminal"

    @property
    def page(self) -> PlainSink:
        """This place."""
        return self

    def publish(
        self,
        kind: str,
        content: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        buffers: Sequence[Any] | None = None,
    ) -> None:
        """Print what text can show."""
        with contextlib.suppress(ValueError, OSError):  # closed, at the end of the process
            if kind == "stream":
                file = sys.stderr if content["name"] == "stderr" else sys.stdout
                file.write(content["text"])
                file.flush()
            elif kind in ("display_data", "execute_result"):  # what is printed cannot be updated
                print(content["data"].get("text/plain", "<a display without text>"), flush=True)
            elif kind == "error":
                print("\n".join(content["traceback"]), file=sys.stderr, flush=True)

    def hand_on(self, payload: Mapping[str, Any]) -> None:
        """Print a page."""
        if payload.get("source") == "page":
            self.publish("display_data", payload)


def current_sink() -> Sink:
    """Return where output of the code that runs now belongs."""
    shell: Any = get_ipython()
    sink = sink_of((shell.get_parent() if hasattr(shell, "get_parent") else None) or {})
    return _captured(sink, shell) if isinstance(sink, KernelSink) else sink


def _captured(page: KernelSink, shell: Any) -> Sink:
    """Return what captures the output of a page's cell at this moment; the page itself if nothing does."""
    global _not_captured
    if _not_captured == (sys.stdout, sys.stderr, shell.display_pub):  # quick: every call asks
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
    """Return where output belongs that a message of the front end causes."""
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None or not hasattr(kernel, "iopub_socket"):
        return PlainSink()
    return KernelSink(kernel, request)
