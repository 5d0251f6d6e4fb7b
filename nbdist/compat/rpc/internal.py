"""Replaces torch.distributed.rpc.internal, whose pickler knows how to send the instances of some classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbdist.wire.pickling.registered import register_reducer

__all__: list[str] = []


class _InternalRPCPickler:
    """Stands in for torch's pickler. Calls use nbdist's codec, to which this passes the reducers."""

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Send instances of a class with ``reducer`` in calls and results. If the class has a reducer, do nothing.

        ``torch.distributed.nn`` registers one for its `RemoteModule`.
        """
        register_reducer(obj_class, reducer)


_internal_rpc_pickler = _InternalRPCPickler()
