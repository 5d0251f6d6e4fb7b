"""Runs programs that were written for torch.distributed.rpc, without changing them.

``install()`` replaces the modules ``torch.distributed.rpc``, with its submodules, and ``torch.distributed.autograd`` in
this process by modules of this package. ``python -m nbdist run`` does the same for a program and every process that it
starts. The modules have torch's public names, the private names that programs and other modules of torch use, and
torch's error messages. `nbdist.rpc` and `nbdist.autograd` do the work; they do not depend on this package.
"""

from __future__ import annotations

__all__ = ["install", "is_installed"]


def install() -> None:
    """Replace ``torch.distributed.rpc`` and ``torch.distributed.autograd`` by nbdist in this process, for good.

    Modules that have imported names from torch's modules get nbdist's instead. A second call does nothing, and nothing
    undoes the first one.

    Raises:
        UsageError: torch's own RPC is running in this process.

    Call this at the top of a program, in every process, before it calls ``init_rpc``. ``docs/howto/call_functions.md``
    shows ``python -m nbdist run``, which needs no line in the program.

    Example:
        >>> from nbdist import compat
        >>> compat.install()  # doctest: +SKIP
    """
    from nbdist.compat import substitution  # here, because it imports torch, which `nbdist.compat.run` does not need

    substitution.install()


def is_installed() -> bool:
    """Return whether `install` has replaced ``torch.distributed.rpc`` in this process. Once True, it stays True.

    Example:
        >>> from nbdist import compat
        >>> compat.is_installed()
        False
    """
    from nbdist.compat import substitution

    return substitution.installed
