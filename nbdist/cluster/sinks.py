"""Where the output of workers is shown: under a cell of the notebook, or on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from IPython import get_ipython

__all__ = ["KernelSink", "PlainSink", "Sink", "current_sink", "sink_of"]


class Sink(Protocol):
    """A place for output. Called in any thread."""

    interactive: bool
    """Whether somebody may be watching, and could be asked for input."""

    stop_says: str
    """How to tell somebody what ends a cell, such as ``Stop ends``."""

    @property
    def id(self) -> str:
        """What tells it from others."""
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

    def __init__(self, kernel: Any, parent: Mapping[str, Any]) -> None:
        self._kernel = kernel
        self._parent = {"header": parent.get("header", {})}
        self.interactive = bool(parent.get("content", {}).get("allow_stdin", True))

    @property
    def id(self) -> str:
        """The id of the cell's request."""
        return str(self._parent["header"].get("msg_id", ""))

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


class PlainSink:
    """Standard output and error of a script or a terminal."""

    stop_says = "Ctrl-C ends"
    interactive = True
    id = "terminal"

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


def current_sink() -> KernelSink | PlainSink:
    """Where output of the code that runs now belongs."""
    shell: Any = get_ipython()
    return sink_of((shell.get_parent() if hasattr(shell, "get_parent") else None) or {})


def sink_of(request: Mapping[str, Any]) -> KernelSink | PlainSink:
    """Where output belongs that a message of the front end causes."""
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None or not hasattr(kernel, "iopub_socket"):
        return PlainSink()
    return KernelSink(kernel, request)
