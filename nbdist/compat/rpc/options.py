"""Replaces torch.distributed.rpc.options."""

from __future__ import annotations

from nbdist.compat.options import TensorPipeRpcBackendOptions

__all__ = ["TensorPipeRpcBackendOptions"]
