"""Replaces torch.distributed.optim.optimizer, whose class works only with references that TorchScript knows."""

from nbdist.optim.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
