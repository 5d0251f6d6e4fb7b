"""`WorkerChanges`: restarts workers of a running cluster, lets others join, and forms their process group anew.

One change is made at a time, under one lock::

    the user     restart, rebuild_process_group ──┐
    a worker     replace (see `mending`)        ──┼──> `Lifecycle` kills, launches, forms the group
    a new host   `_take_in`                     ──┘

A *keeper* is the process on a host that starts and ends the workers there. One that comes by an invitation makes the
cluster grow::

    a keeper comes ──> InvitingLauncher.spare: is there room for new workers?
                              │ yes, also once all keepers have answered or are lost
                              v
    Lifecycle.bring_in: all start ──> all are members of the RPC world ──> Lifecycle.adopt: they are workers ──> a line
                              │
                              └── one fails: all are killed; its keeper is sent away ──> a line; the others try again

"A line" is a line of text for the user. A new worker belongs to the cluster only when it is ready, and running cells
keep their workers. The process group forms again once all workers are idle. While workers restart, new keepers wait.
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
from nbdist.cluster.hosts.launchers.inviting import InvitingLauncher
from nbdist.cluster.hosts.losses import Losses
from nbdist.cluster.kernels.workers import StartError, Worker
from nbdist.cluster.lifecycle import Lifecycle
from nbdist.cluster.output.arranger import say_names
from nbdist.cluster.spec import Spec
from nbdist.cluster.team import Targets, Team
from nbdist.cluster.undoing import undone_by
from nbdist.durations import LONGEST
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
        self._spec, self._team, self._lifecycle, self._grown, self._tell = spec, team, lifecycle, grown, tell
        self.awaited: list[str] = []
        """The workers that had to become idle, at the last `restart`, for the process group to form anew."""
        self.changing = threading.Lock()  # held while workers restart, join, or form the process group for the user
        self._has_grown = threading.Condition()  # notified after each growth
        self._losses = Losses(agent) if spec.is_remote else None
        self._is_closed = False

    def begin(self) -> None:
        """Let workers join from now on, as the cluster runs; keepers that have come before are used at once."""
        if self._spec.may_grow:
            self._launcher().on_arrival = self._grow_soon
        self._grow_soon()

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
            busy = [f"{each.name} runs In[{cell.number}]" for each in workers if (cell := each.present_cell)]
            if busy and self._lifecycle.has_group:
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
            self._grow_soon()  # keepers that came meanwhile

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
        self._launcher()  # raises an error if none can join
        with self._has_grown:
            has_all = self._has_grown.wait_for(lambda: len(self._team.workers) >= count, min(seconds, LONGEST))
        if not has_all:
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

    # -- growing --------------------------------------------------------------------------------

    def _grow_soon(self) -> None:
        """Add workers, in a new thread, if keepers have room for new ones. Any thread may call it."""
        if self._spec.may_grow and self._launcher().spare():
            threading.Thread(target=self._grow, name="nbdist-growing", daemon=True).start()

    def _grow(self) -> None:
        launcher = self._launcher()
        try:
            while launcher.spare():
                launcher.hear_from_keepers()  # without the lock: a restart need not wait for a silent host
                with self.changing:
                    if count := launcher.spare():  # again: a keeper may be lost by now
                        self._take_in(count, launcher)
        except Exception:  # of a launcher, of any class: nobody waits for this thread, and later keepers may join
            if not launcher.is_closing:
                _log.exception("workers could not join")

    def _take_in(self, count: int, launcher: InvitingLauncher) -> None:
        """Add ``count`` workers to the cluster, all or none, and tell the user. The caller holds the lock."""
        present = self._team.workers
        workers = [self._team.make(len(present) + index) for index in range(count)]
        names = [worker.name for worker in workers]
        launcher.expect(names)
        if failed := self._lifecycle.bring_in(workers, time.monotonic() + self._spec.timeout):
            firsts = {name: str(error).partition("\n")[0] for name, error in failed.items()}
            reasons = {name: f"{name} could not join the running cluster: {why}" for name, why in firsts.items()}
            launcher.dismiss(names, reasons)
            for worker in workers:
                if worker.name in reasons and not launcher.is_closing:
                    self._say(reasons[worker.name] + (f" (on {worker.host})" if worker.host else ""))
            return
        launcher.keep(names)
        hosts = ", ".join(dict.fromkeys(worker.host for worker in workers))
        size = len(present) + len(workers)  # before `adopt`, which lengthens `Team.workers`
        line = f"{say_names(names)} joined from {hosts}; {counted(size, 'worker')}."
        try:
            awaited = self._lifecycle.adopt(workers, time.monotonic() + self._spec.timeout)
        except Exception as error:  # of a worker or of RPC: the workers have joined all the same
            awaited, group = [], f"The process group did not form anew: {error}; `%dist_restart -p` tries again."
        else:
            group = "The process group is formed anew"
            group += f" once {say_names(awaited)} can take part." if awaited else "."
        self._grown()
        with self._has_grown:
            self._has_grown.notify_all()
        self._say(f"{line} {group}" if self._lifecycle.has_group else line)

    def _say(self, line: str) -> None:
        _log.info(line)
        with contextlib.suppress(Exception):  # an error of a view must not keep workers from joining
            self._tell(line)
