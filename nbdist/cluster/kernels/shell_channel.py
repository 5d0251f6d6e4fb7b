"""Works around a bug of ipykernel 7.3 that loses requests.

ipykernel 7.3 answers directly on the socket of its shell channel, past the stream that reads the socket. The stream
then overlooks a request that arrives at that moment, and all later ones. Version 7.4 mends this:
https://github.com/ipython/ipykernel/pull/1529.
"""

from __future__ import annotations

from typing import Any

__all__ = ["answer_through_stream"]


def answer_through_stream(kernel: Any) -> None:
    """Make ipykernel 7.3 send its replies by the stream that reads the shell socket, as version 7.4 does.

    Otherwise it loses requests. Does nothing for other versions. Call it in the kernel's main thread.
    """
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is not None and hasattr(thread.manager, "_shell_socket"):  # not in 7.4
        thread.manager._shell_socket = kernel.shell_stream
