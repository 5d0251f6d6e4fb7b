"""Runs programs that were written for torch.distributed.rpc and cannot be edited.

``install()`` makes the name ``torch.distributed.rpc``, its submodules and ``torch.distributed.autograd`` mean
nbdist in this process. Only names are here, also the private ones that torch's own test suites use; what they
do is done below, in `nbdist.rpc`, which knows nothing of this package. ``python -m nbdist run`` does the same
for a program and every process that it starts.
"""

from __future__ import annotations

from nbdist.compat.substitution import install, is_installed

__all__ = ["install", "is_installed"]
