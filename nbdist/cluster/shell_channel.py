"""Keeps ipykernel 7.3 from losing requests.

It answers directly on the socket of its shell channel, past the stream that reads it. A request that comes in at that
moment is not noticed, nor is any after it: https://github.com/ipython/ipykernel/pull/1529, in 7.4.
"""

from __future__ import annotations

from typing import Any

__all__ = ["answer_through_stream"]


def answer_through_stream(kernel: Any) -> None:
    """Have a kernel answer as 7.4 does; called in its main thread."""
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is not None and hasattr(thread.manager, "_shell_socket"):  # 7.4 has no such thing
        thread.manager._shell_socket = kernel.shell_stream
