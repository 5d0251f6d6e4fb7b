"""`Generations`: the numbers and stores of a cluster's process groups, of which each forming has its own.

The notebook begins a group that all workers form between two cells. Code in a cell may form one, too: after
``destroy_process_group``, ``init_process_group`` of each worker asks for a number. Workers get the same one, each
worker once::

    worker0   enter: 8   (interrupted)   enter: 9      it has had 8, which has not formed: 8 ends, and 9 begins
    worker1                                            enter: 9
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imports torch, which a notebook imports while the first workers' zygote does
    from nbdist.cluster.processes.group_store import GroupStores


class Generations:
    """Numbers the process groups of one cluster; makes, ends and removes their stores. Any thread may use it."""

    def __init__(self, stores: GroupStores) -> None:
        self._stores = stores
        self._lock = threading.RLock()  # reentrant: `enter` calls `begin`, and `begin` calls `end`
        self.present = 0
        """The number of the group that has formed last, or forms now; 0 for none."""
        self._oldest = 1  # the oldest group whose store has not been removed
        self._missing: set[str] = set()  # the workers that may still enter the present group

    def begin(self, missing: Iterable[str] = ()) -> int:
        """Return the number of a new group, which only the workers ``missing`` may enter; the notebook tells others."""
        with self._lock:
            if self._missing:
                self.end(self.present, "the process group did not form: a worker has begun to form the next one")
            self._stores.make(self.present + 1)  # first: if this fails, the group before is still the present one
            self.present += 1
            self._missing = set(missing)
            return self.present

    def enter(self, name: str, names: Iterable[str]) -> int:
        """Return the number of the group that worker ``name`` forms in a cell, with all workers, ``names``."""
        with self._lock:
            if name not in self._missing:  # the worker has had the present number
                self.begin(names)
            self._missing.discard(name)
            if not self._missing:  # all workers have left the groups before
                self.remove_before(self.present)
            return self.present

    def lose(self, name: str, why: str) -> None:
        """End the forming of the present group if the others wait there for the worker ``name``, which has died."""
        with self._lock:
            if name in self._missing:
                self.end(self.present, why)

    def end(self, generation: int, why: str) -> None:
        """End the forming of a group: every wait in its store raises RendezvousError with the text ``why``."""
        with self._lock:
            if generation == self.present:
                self._missing = set()  # nobody else may enter it
            if self._oldest <= generation <= self.present:  # others are removed, or not made yet
                self._stores.end(generation, why)

    def remove_before(self, generation: int) -> None:
        """Remove the stores of all groups before this one."""
        with self._lock:
            for each in range(self._oldest, generation):
                self._stores.remove(each)
            self._oldest = max(self._oldest, generation)
