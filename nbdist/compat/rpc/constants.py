"""Replaces torch.distributed.rpc.constants."""

from __future__ import annotations

from datetime import timedelta

from nbdist.rpc import options

__all__: list[str] = []

DEFAULT_RPC_TIMEOUT_SEC: float = options.DEFAULT_RPC_TIMEOUT_SEC
DEFAULT_INIT_METHOD: str = options.DEFAULT_INIT_METHOD
DEFAULT_NUM_WORKER_THREADS: int = options.DEFAULT_NUM_WORKER_THREADS
UNSET_RPC_TIMEOUT: float = options.UNSET_RPC_TIMEOUT
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)
