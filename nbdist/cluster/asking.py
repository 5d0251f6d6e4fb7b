"""Asks a worker's kernel for completions and for help on a name. Never waits for a busy worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from nbdist.errors import NbdistError

if TYPE_CHECKING:
    from nbdist.cluster.cluster import Cluster
    from nbdist.cluster.jupyter.kernel_connection import Message
    from nbdist.cluster.kernels.workers import Worker


def ask_kernel(
    cluster: Cluster, worker: Worker, kind: str, code: str, cursor: int, patience: float, **more: Any
) -> dict[str, Any] | None:
    """Return the content of a worker's reply to a request about ``code`` at ``cursor``, which counts characters.

    ``kind`` is ``complete_request`` or ``inspect_request``; ``more`` are further fields of the request. None if the
    worker is dead or busy, or needs over ``patience`` s.
    """
    if not worker.alive or worker.cells:  # its kernel would answer only after its cells
        return None

    async def ask() -> Message:
        assert worker.kernel is not None
        asked = worker.kernel.ask(kind, {"code": code, "cursor_pos": cursor, **more})
        return await asyncio.wait_for(asked, patience)

    try:
        content: dict[str, Any] = cluster.kernel_thread.run(ask()).result()["content"]
    except (TimeoutError, NbdistError):
        return None
    return content
