"""Replaces torch.distributed.rpc.functions."""

from nbdist.rpc.functions import async_execution

__all__ = ["async_execution"]
