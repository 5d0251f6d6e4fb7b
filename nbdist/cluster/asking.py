"""Asks a worker's kernel for completions and for help on a name. Never waits for a busy worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from nbdist.errors import NbdistError

if TYPE_CHECKING:
    from nbdist.cluster.cluster import Cluster
    from nbdist.cluster.jupyter.kernel_connection import Message
    from nbdist.cluster.kernels.workers import Worker


def complete(
    cluster: Cluster, worker: Worker, code: str, cursor: int, patience: float
) -> tuple[list[str], int, int] | None:
    """Return a worker's completions of ``code`` at ``cursor``, and the start and end of the text that one replaces.

    All three places count characters of ``code``. None if the worker is dead or busy, or needs over ``patience`` s.
    """
    content = _ask(cluster, worker, "complete_request", {"code": code, "cursor_pos": cursor}, patience)
    return None if content is None else (content["matches"], content["cursor_start"], content["cursor_end"])


def inspect(
    cluster: Cluster, worker: Worker, code: str, cursor: int, detail_level: int, patience: float
) -> dict[str, Any] | None:
    """Return the content of a worker's `inspect_reply` for the name at ``cursor``, what Shift-Tab shows, or None."""
    asked = {"code": code, "cursor_pos": cursor, "detail_level": detail_level}
    return _ask(cluster, worker, "inspect_request", asked, patience)


def _ask(cluster: Cluster, worker: Worker, kind: str, asked: dict[str, Any], patience: float) -> dict[str, Any] | None:
    if not worker.alive or worker.cells:  # its kernel would answer only after its cells
        return None

    async def ask() -> Message:
        assert worker.kernel is not None
        return await asyncio.wait_for(worker.kernel.ask(kind, asked), patience)

    try:
        answer = cluster.kernel_thread.run(ask()).result()
    except (TimeoutError, NbdistError):
        return None
    content: dict[str, Any] = answer["content"]
    return content
