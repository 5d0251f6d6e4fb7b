"""`WorkerChanges`: restarts workers of a running cluster, lets others join, and forms their process group anew.

One change is made at a time, under one lock::

    the user     restart, rebuild_process_group ──┐
    a worker     replace (see `mending`)        ──┼──> `Lifecycle` kills, launches, forms the group
    a new host   `Growth`                       ──┘
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

from nbdist.amounts import counted
from nbdist.channel.resources import refusals_in_words
from nbdist.cluster.growing import Growth
from nbdist.cluster.hosts.launchers.inviting import InvitingLauncher
from nbdist.cluster.hosts.losses import Losses
from nbdist.cluster.kernels.workers import StartError, Worker
from nbdist.cluster.lifecycle import Lifecycle
from nbdist.cluster.spec import Spec
from nbdist.cluster.team import Targets, Team
from nbdist.cluster.undoing import undone_by
from nbdist.errors import UsageError
from nbdist.rpc.agent import Agent

_log = logging.getLogger("nbdist.cluster")


class WorkerChanges:
    """Changes the workers of one cluster. Its methods do what those of `Cluster` say.

    ``grown`` is called when workers have been added, and ``tell`` with a line for the user; "" for none.
    """

    def __init__(
        self,
        spec: Spec,
        team: Team,
        lifecycle: Lifecycle,
        agent: Agent,
        grown: Callable[[], object],
        tell: Callable[[str], object],
    ) -> None:
        self._spec, self._team, self._lifecycle, self._tell = spec, team, lifecycle, tell
        self.awaited: list[str] = []
        """The workers that had to become idle, at the last `restart`, for the process group to form anew."""
        self.changing = threading.Lock()  # held while workers restart, join, or form the process group for the user
        self._losses = Losses(agent) if spec.is_remote else None
        self._growth: Growth | None = None  # None if the launcher lets no worker join
        if spec.may_grow:
            self._growth = Growth(team, lifecycle, self._launcher(), self.changing, spec.timeout, grown, tell)
        self._is_closed = False

    def begin(self) -> None:
        """Let workers join from now on: the cluster runs."""
        if self._growth is not None:
            self._growth.begin()

    def close(self) -> None:
        """From now on, let `replace` do nothing: the cluster ends."""
        self._is_closed = True

    def restart(self, targets: Targets = None, *, process_group: bool = False) -> list[str]:
        """Kill workers and start them again; return their names."""
        with self._alone():
            dead = [worker for worker in self._team.workers if worker.lost is not None]
            return self._restart(dead if targets is None else self._team.select(targets), process_group)

    def _restart(self, chosen: Sequence[Worker], process_group: bool = False, because: str = "") -> list[str]:
        """Kill and start these workers, and form the process group, as `restart` does. The caller holds the lock."""
        self.awaited = []
        deadline = time.monotonic() + self._spec.timeout
        workers = self._team.workers
        if chosen:
            with refusals_in_words("the workers cannot be restarted"):
                self._lifecycle.kill(chosen, deadline, because)
                if self._losses is not None:  # a worker can join under its name once all have given it up
                    self._losses.wait()
                with undone_by(self._lifecycle.abandon, chosen):  # no worker stays half started
                    self._lifecycle.launch(chosen)
                    self._tell(self._lifecycle.launcher.advice())  # a worker whose host is lost needs a person
                    self._lifecycle.bring_up(chosen, deadline)
        if process_group and len(chosen) < len(workers):
            if busy := [f"{each.name} runs In[{cell.number}]" for each in workers if (cell := each.present_cell)]:
                self._tell(f"The process group forms once all workers are idle: {', '.join(busy)}")
            self._lifecycle.form_group(deadline)
        elif chosen and len(chosen) < len(workers):
            self.awaited = self._lifecycle.form_group_once_idle(deadline)
        return [worker.name for worker in chosen]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            with self.changing:
                yield
        finally:
            if self._growth is not None:
                self._growth.look_soon()  # keepers that came meanwhile

    def replace(self, name: str, incarnation: int, because: str) -> None:
        """Restart the worker called ``name`` for the reason ``because``, which the errors of its cells then say."""
        with self._alone():
            found = [each for each in self._team.workers if (each.name, each.incarnation) == (name, incarnation)]
            if not found or self._is_closed:
                return
            try:
                self._restart(found, because=because)
            except Exception as error:  # of a start, of any class: a worker asked for this, and nobody waits
                if not self._is_closed:
                    _log.error("%s could not be restarted, although %s: %s", name, because, error)

    def rebuild_process_group(self) -> None:
        """Form a new process group of all workers."""
        with self._alone():
            self._lifecycle.form_group(time.monotonic() + self._spec.timeout)

    def invite(self, file: str, *, uses: int, expires: float) -> None:
        """Write another invitation."""
        self._launcher().hub.invite(expires, uses).write(Path(file).expanduser())

    def revoke_invitations(self) -> int:
        """Make all invitations invalid; return how many were valid."""
        return self._launcher().hub.revoke()

    def wait_for_workers(self, count: int, seconds: float) -> None:
        """Wait until the cluster has at least ``count`` workers, dead ones included."""
        if len(self._team.workers) >= count:
            return
        self._launcher()
        assert self._growth is not None
        if not self._growth.wait_for(count, seconds):
            raise StartError(
                f"the cluster has {counted(len(self._team.workers), 'worker')}, and not {count}, after {seconds:g} s: "
                "invite workers with %dist_invite, and start them by `python -m nbdist worker --connect FILE`"
            )

    def _launcher(self) -> InvitingLauncher:
        """Return the cluster's launcher. Raises UsageError if no worker can join the cluster."""
        if not self._spec.may_grow:
            raise UsageError(
                "no worker can join this cluster: start one with `%dist_init -n N --host ADDRESS`, the address at "
                "which other hosts reach this one, or with `--launcher join`"
            )
        return cast("InvitingLauncher", self._lifecycle.launcher)
