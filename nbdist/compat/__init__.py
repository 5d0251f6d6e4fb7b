"""Runs programs that were written for torch.distributed.rpc and cannot be edited.

``install()`` makes the name ``torch.distributed.rpc``, its submodules and ``torch.distributed.autograd`` mean
nbdist in this process. Only names are here, also the private ones that torch's own test suites use; what they
do is done below, in `nbdist.rpc`, which knows nothing of this package. ``python -m nbdist run`` does the same
for a program and every process that it starts.
"""

from __future__ import annotations

__all__ = ["install", "is_installed"]


def install() -> None:
    """Make ``torch.distributed.rpc`` and ``torch.distributed.autograd`` mean nbdist, from now on.

    A second call does nothing. It is too late once torch's own RPC is running.
    """
    from nbdist.compat import substitution  # imports torch, which `nbdist.compat.run` need not wait for

    substitution.install()


def is_installed() -> bool:
    """Whether ``torch.distributed.rpc`` means nbdist in this process."""
    from nbdist.compat import substitution

    return substitution.installed
