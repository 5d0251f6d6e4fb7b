"""Where the output of workers is shown: under a cell of the notebook, or on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from IPython import get_ipython

__all__ = ["KernelSink", "PlainSink", "Sink", "current_sink"]


class Sink(Protocol):
    """A place for output. Called in any thread."""

    interactive: bool
    """Whether somebody may be watching, and could be asked for input."""

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


class KernelSink:
    """A cell of a notebook, also after it has ended: its request is the parent of what is published."""

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


class PlainSink:
    """Standard output and error of a script or a terminal."""

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
            elif kind in ("display_data", "execute_result", "update_display_data"):
                print(content["data"].get("text/plain", "<a display without text>"), flush=True)
            elif kind == "error":
                print("\n".join(content["traceback"]), file=sys.stderr, flush=True)


def current_sink() -> KernelSink | PlainSink:
    """Where output of the code that runs now belongs."""
    shell: Any = get_ipython()
    kernel = getattr(shell, "kernel", None)
    if kernel is None or not hasattr(kernel, "iopub_socket"):
        return PlainSink()
    return KernelSink(kernel, shell.get_parent() or {})
