"""Runs notebooks that were written for ipyparallel, with its names for workers, calls and cells.

``%load_ext nbdist.compat.ipyparallel`` makes ``import ipyparallel`` import this package, binds ``ipp`` to it, and adds
``%px``. `Client`, its views and their handles have the names that `docs/coming_from.md` lists. Any other name of
ipyparallel raises AttributeError, which says what to write instead. ``cluster.view()`` makes a view of an nbdist
cluster. ``notebooks/10_from_ipyparallel.ipynb`` shows all this.

In ipyparallel, a worker is called an *engine*.

=========  =============================================
`closed`   ipyparallel's other names, which raise errors
`px`       ``%px`` and its kin
`results`  the handle of several tasks
`tasks`    one task of a view, on a worker
`views`    several workers as one object
`client`   `Cluster` and `Client`
=========  =============================================
"""

from __future__ import annotations

import sys
from typing import Any

from nbdist.compat.ipyparallel.client import Client, Cluster
from nbdist.compat.ipyparallel.closed import refuse
from nbdist.compat.ipyparallel.results import AsyncResult
from nbdist.compat.ipyparallel.tasks import Reference
from nbdist.errors import UsageError

__all__ = ["AsyncResult", "Client", "Cluster", "Reference", "bind_kernel", "interactive"]


def interactive(function: Any) -> Any:
    """Return the function unchanged: workers look up its global names among their own variables anyway."""
    return function


def bind_kernel() -> None:
    """Do nothing, because a worker is a kernel already; ``%remote worker0 %connect_info`` shows how to reach it."""


def load_ipython_extension(shell: Any) -> None:
    """Make ``import ipyparallel`` import this package; add ``ipp`` and ``%px`` to the notebook.

    Raises UsageError if the notebook has imported ipyparallel itself.
    """
    from nbdist.compat.ipyparallel.px import activate

    here = sys.modules[__name__]
    if sys.modules.setdefault("ipyparallel", here) is not here:
        raise UsageError(
            "the package ipyparallel has been imported in this notebook: restart the kernel, and load this extension "
            "first"
        )
    shell.push({"ipp": here}, interactive=False)
    activate()


def __getattr__(name: str) -> Any:
    return refuse("ipyparallel", name)
