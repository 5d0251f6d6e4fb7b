"""Raises errors for names of ipyparallel that nbdist does not have. The errors say what to write instead."""

from __future__ import annotations

from typing import Any

# The substitutes, as the errors name them, each with the names of ipyparallel that it replaces.
_SUBSTITUTES = {
    "nothing: the output of a task appears in the notebook at once": "stdout stderr outputs display_outputs",
    "cluster.interrupt(), which interrupts the code that the workers run": "abort",
    "the task's own class of error: except ZeroDivisionError": "error RemoteError CompositeError",
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


def refuse(owner: str, name: str) -> Any:
    """Raise AttributeError for ``owner.name``, with the substitute if there is one. Never returns."""
    asked = name.removesuffix("_sync")
    known = (f": use {instead}" for instead, names in _SUBSTITUTES.items() if asked in names.split())
    advice = next(known, "; docs/coming_from.md lists what there is")
    raise AttributeError(f"nbdist replaces only a part of ipyparallel: its {owner} has no {name!r}{advice}", name=name)


class Closed:
    """The base of classes that name a substitute for each attribute that they do not have."""

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError for a name that the class does not have, with the substitute if there is one."""
        return refuse(type(self).__name__, name)
