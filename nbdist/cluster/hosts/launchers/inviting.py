"""`InvitingLauncher`: the common part of the launchers whose clusters grow when people start workers by an invitation.

A *keeper* is the process that starts the workers of one host. When a keeper comes with an invitation, the launcher uses
its room for the first row of this table that applies::

    a worker that a start of the cluster or a restart waits for     `RemoteLauncher._place` starts it at once
    a worker that has lost its keeper: an open place                the keeper waits until a restart starts the worker
    a new worker                                                    `WorkerChanges` adds `spare` of them

A worker whose process has ended keeps its place at its keeper: its place is not open.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from nbdist.cluster.hosts.hub import KeeperMember
from nbdist.cluster.hosts.launchers.remote import RemoteLauncher
from nbdist.cluster.processes.launchers.contract import OnEnd, StartedWorker
from nbdist.cluster.processes.setup import WorkerSetup
from nbdist.cluster.spec import Spec
from nbdist.errors import NbdistError, WorkerLost
from nbdist.rpc.asking import ask_each


class InvitingLauncher(RemoteLauncher):
    """The common part of launchers with invitations. See `Launcher` for its other methods."""

    def __init__(self, spec: Spec, on_end: OnEnd) -> None:
        self._ranks: dict[str, int] = {}  # of each worker that was ever started or waited for a keeper, by its name
        super().__init__(spec, on_end)

    # -- growing ------------------------------------------------------------------------------

    def spare(self) -> int:
        """Return how many new workers the keepers have room for, open places not counted; 0 once the cluster ends."""
        with self._lock, self.hub.lock:
            if self.is_closing or self._master is None:  # rank 0 has no place, and the others start after it
                return 0
            invited = [member for member in self.hub.members if self._is_invited(member)]
            free = sum(max(0, member.room - len(member.workers)) for member in invited)
            placed = {name for member in invited for name in member.workers}
            known = {name for name, rank in self._ranks.items() if self._needs_invited(rank)}
            return max(0, free - len(known - placed))

    def hear_from_keepers(self) -> None:
        """Wait until each keeper has answered, or is lost, so that the places of lost ones are open in `spare`."""
        # The hub notices only after 12 seconds that another host is gone. Until then its workers would keep their
        # places, and who comes for one of these would become a new worker.
        with self.hub.lock:
            names = [member.record.name for member in self.hub.members]
        ask_each(self.hub.agent, os.getpid, dict.fromkeys(names, ()))

    def _is_invited(self, member: KeeperMember) -> bool:
        """Return whether a keeper came with one of the user's invitations, and not with one of the launcher's own."""
        return True

    def _needs_invited(self, rank: int) -> bool:
        """Return whether the worker of a rank must run at a keeper for which `_is_invited` is True."""
        return True

    def _suits(self, member: KeeperMember, setup: WorkerSetup) -> bool:
        return self._is_invited(member) == self._needs_invited(setup.rank)

    def expect(self, names: Sequence[str]) -> None:
        """Let the next starts of these new workers fail if no keeper has room at once, or if their keeper is lost."""
        with self._lock:
            self._joining.update(names)

    def keep(self, names: Sequence[str]) -> None:
        """Note that these workers now belong to the cluster: from now on they may wait for a keeper, as others do."""
        with self._lock:
            self._joining.difference_update(names)

    def dismiss(self, names: Sequence[str], failed: Mapping[str, str]) -> None:
        """Forget new workers that could not join, whose processes have ended; ``failed`` has reasons, by name."""
        told: list[tuple[KeeperMember, str, object]] = []
        with self._lock, self.hub.lock:
            for name in names:
                self._ranks.pop(name, None)
            self._joining.difference_update(names)
            self._missed.difference_update(names)
            for member in self.hub.members:
                gone = member.workers & set(names)
                member.workers -= gone
                # A failed worker's place is never used again; those of the other workers are free again.
                member.room -= len(gone & failed.keys())
                if gone and member.room:
                    told.append((member, "free_places", sorted(gone)))
                elif gone:
                    told.append((member, "finish", next(failed[name] for name in gone if name in failed)))
        for member, method, argument in told:
            with contextlib.suppress(NbdistError):  # it is lost by now
                self.hub.call(member, method, argument).wait()  # before the next start there

    def start(self, setup: WorkerSetup, environment: Mapping[str, str]) -> Future[StartedWorker]:
        """Start a worker as soon as a keeper has room; a worker that `expect` has named must have a place at once."""
        with self._lock:
            self._ranks[setup.name] = setup.rank
        future = super().start(setup, environment)
        with self._lock:
            # `super().start` leaves it in `wanted` if no keeper has room.
            if setup.name in self._joining and (start := self.wanted.get(setup.name)) is not None:
                error = WorkerLost(f"{setup.name} has lost its place: the process that came for it has ended")
                self._refuse(start, error)
        return future
