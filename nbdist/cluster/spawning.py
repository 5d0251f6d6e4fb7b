"""Says what to write in place of ``torch.multiprocessing.spawn`` with a function of a cell.

The processes that it starts cannot import such a function, and fail one by one after seconds. The workers of a cluster
are such processes already.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch.multiprocessing

from nbdist.errors import UsageError

mp: Any = torch.multiprocessing  # Any: torch does not declare that this module exports `spawn`
_spawn: Any = mp.spawn


def install(*, on_worker: bool) -> None:
    """Let ``spawn`` raise UsageError for functions of cells; on a worker also for those of a script in ``%run``."""

    @functools.wraps(_spawn)
    def spawn(fn: Any, *args: Any, **kwargs: Any) -> Any:
        is_lost = on_worker or not hasattr(sys.modules["__main__"], "__file__")
        # On several workers, each would start the processes of such a script, which then meet at one port.
        if is_lost and getattr(fn, "__module__", None) == "__main__":
            where = "" if on_worker else "start them with `%dist_init -n 4`, and "
            raise UsageError(
                f"mp.spawn starts processes that have no {fn.__name__} of a notebook. nbdist's workers are such "
                f"processes: {where}call `{fn.__name__}(rank, *args)` in a cell with %%remote"
            )
        return _spawn(fn, *args, **kwargs)

    mp.spawn = spawn


def uninstall() -> None:
    """Make ``spawn`` torch's own again."""
    mp.spawn = _spawn
