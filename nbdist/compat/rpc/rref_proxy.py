"""Replaces torch.distributed.rpc.rref_proxy."""

from __future__ import annotations

from nbdist.rpc.references.rref import Proxy as RRefProxy

__all__ = ["RRefProxy"]
