"""Stands for torch.distributed.optim.optimizer, whose own class needs TorchScript to know the references."""

from __future__ import annotations

from nbdist.optim.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
