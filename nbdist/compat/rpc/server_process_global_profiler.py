"""Replaces torch.distributed.rpc.server_process_global_profiler, whose profiler nbdist does not have.

Programs can import the profiler's name; an error is raised only when they use it.
"""

from __future__ import annotations

from typing import Any

from nbdist.errors import UsageError

__all__: list[str] = []


class _server_process_global_profile:
    """Stands in for torch's profiler of the calls that a worker runs; using it raises UsageError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError("nbdist has no profiler of RPC servers; profile inside the called functions")
