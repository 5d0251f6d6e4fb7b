"""Replaces torch.distributed.rpc.options."""

from nbdist.compat.options import TensorPipeRpcBackendOptions

__all__ = ["TensorPipeRpcBackendOptions"]
