"""Replaces torch.distributed.rpc.rref_proxy."""

from nbdist.rpc.references.rref import Proxy as RRefProxy

__all__ = ["RRefProxy"]
