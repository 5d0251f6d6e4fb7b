"""Replaces torch.distributed.rpc.functions."""

from __future__ import annotations

from nbdist.rpc.functions import async_execution

__all__ = ["async_execution"]
