"""Says what to write instead of the names of ipyparallel that nbdist does not have."""

from __future__ import annotations

from typing import Any

__all__ = ["Closed", "refuse"]

_SUBSTITUTES = {
    "nothing: what a task prints or shows appears in the notebook at once": "stdout stderr outputs display_outputs",
    "cluster.interrupt(), which ends what the workers do": "abort",
    "the worker's own type of error: except ZeroDivisionError": "error RemoteError CompositeError",
    "a callback: result.add_done_callback(f)": "after follow",
    "the handle itself: it stays valid": "get_result history db_query purge_results",
    "the same call again": "resubmit retries",
    "the arguments of the call": "set_flags temp_flags",
    "an import inside of the function, or a cell: %%px --local": "require sync_imports importer",
    "a view of the engines that can do it: rc[0, 2]": "depend",
    "%dist_status: a notebook has one cluster": "queue_status ClusterManager",
    "Cluster(n=...): the number of workers is fixed when they start": "start_engines stop_engines",
    "start_cluster(): there is no controller": "start_controller",
    "rpc.rpc_sync('notebook', f), which a task may call": "data datapub",
    "a cell: %%remote %reset -f": "clear",
    "the library's own client": "become_dask stop_dask stop_distributed register_joblib_backend",
}
"""What to use, and the names that it stands for."""


def refuse(owner: str, name: str) -> Any:
    """Raise an AttributeError that says what to use instead of ``owner.name``."""
    asked = name.removesuffix("_sync")
    known = (f": use {instead}" for instead, names in _SUBSTITUTES.items() if asked in names.split())
    advice = next(known, "; docs/coming_from.md lists what it has")
    raise AttributeError(f"nbdist's {owner} has no {name!r}{advice}", name=name)


class Closed:
    """Raises for each name that a class does not have, and says what to use instead: see `refuse`."""

    def __getattr__(self, name: str) -> Any:
        return refuse(type(self).__name__, name)
