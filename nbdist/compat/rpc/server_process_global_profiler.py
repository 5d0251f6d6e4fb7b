"""Stands for torch.distributed.rpc.server_process_global_profiler, whose profiler nbdist does not have.

The name is here because programs import it; only who uses it is told.
"""

from __future__ import annotations

from typing import Any

from nbdist.errors import UsageError

__all__: list[str] = []


class _server_process_global_profile:
    """Would profile what other workers have this one run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError("nbdist has no profiler of RPC servers; profile inside the called functions")
