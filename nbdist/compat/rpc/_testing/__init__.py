"""Replaces torch.distributed.rpc._testing, with the backend that injects faults.

===============================  ==========================================
`faulty_agent_backend_registry`  torch's module of this name, for its tests
===============================  ==========================================
"""

from __future__ import annotations

from nbdist.compat.agents import FaultyTensorPipeAgent
from nbdist.compat.options import FaultyTensorPipeRpcBackendOptions

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions", "is_available"]


def is_available() -> bool:
    """Return True, because nbdist can inject faults."""
    return True
