"""Adds workers to a running cluster when new keepers come, on any host, by an invitation.

A *keeper* is the process on a host that starts and ends the workers there::

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
from collections.abc import Callable
from dataclasses import dataclass, field

from nbdist.amounts import counted
from nbdist.cluster.hosts.launchers.inviting import InvitingLauncher
from nbdist.cluster.lifecycle import Lifecycle
from nbdist.cluster.output.arranger import say_names
from nbdist.cluster.team import Team
from nbdist.durations import LONGEST

_log = logging.getLogger("nbdist.cluster")


@dataclass(eq=False, repr=False)
class Growth:
    """Lets one cluster grow.

    ``changing`` is held while workers are added; `WorkerChanges` holds it while it restarts workers. ``grown`` is
    called when workers have been added; the process group may still have to form. ``tell`` gets a line for the user.
    """

    team: Team
    lives: Lifecycle
    launcher: InvitingLauncher
    changing: threading.Lock
    timeout: float
    grown: Callable[[], object]
    tell: Callable[[str], object]
    changed: threading.Condition = field(init=False, default_factory=threading.Condition)  # notified after each growth

    def begin(self) -> None:
        """Let the cluster, which now runs, grow from now on; keepers that have come before are used at once."""
        self.launcher.on_arrival = self.look_soon
        self.look_soon()

    def look_soon(self) -> None:
        """Add workers, in a new thread, if keepers have room for new ones. Any thread may call it."""
        if self.launcher.spare():
            threading.Thread(target=self._look, name="nbdist-growing", daemon=True).start()

    def wait_for(self, count: int, timeout: float) -> bool:
        """Wait until the cluster has at least ``count`` workers; return False after ``timeout`` seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: len(self.team.workers) >= count, min(timeout, LONGEST))

    def _look(self) -> None:
        try:
            while self.launcher.spare():
                self.launcher.hear_from_keepers()  # without the lock: a restart need not wait for a silent host
                with self.changing:
                    if count := self.launcher.spare():  # again: a keeper may be lost by now
                        self._take_in(count)
        except Exception:  # of a launcher, of any class: nobody waits for this thread, and later keepers may join
            if not self.launcher.is_closing:
                _log.exception("workers could not join")

    def _take_in(self, count: int) -> None:
        """Add ``count`` workers to the cluster, all or none, and tell the user. The caller holds `changing`."""
        deadline = time.monotonic() + self.timeout
        workers = [self.team.make(len(self.team.workers) + index) for index in range(count)]
        names = [worker.name for worker in workers]
        self.launcher.expect(names)
        if failed := self.lives.bring_in(workers, deadline):
            firsts = {name: str(error).partition("\n")[0] for name, error in failed.items()}
            reasons = {name: f"{name} could not join the running cluster: {why}" for name, why in firsts.items()}
            self.launcher.dismiss(names, reasons)
            for worker in workers:
                if worker.name in reasons and not self.launcher.is_closing:
                    self._say(reasons[worker.name] + (f" (on {worker.host})" if worker.host else ""))
            return
        self.launcher.keep(names)
        hosts = ", ".join(dict.fromkeys(worker.host for worker in workers))
        size = len(self.team.workers) + len(workers)  # before `adopt`, which lengthens `Team.workers`
        line = f"{say_names(names)} joined from {hosts}; {counted(size, 'worker')}."
        try:
            awaited = self.lives.adopt(workers, time.monotonic() + self.timeout)
        except Exception as error:  # of a worker or of RPC: the workers have joined all the same
            awaited, group = [], f"The process group did not form anew: {error}; `%dist_restart -p` tries again."
        else:
            group = "The process group is formed anew"
            group += f" once {say_names(awaited)} can take part." if awaited else "."
        self.grown()
        with self.changed:
            self.changed.notify_all()
        self._say(f"{line} {group}" if self.lives.has_group else line)

    def _say(self, line: str) -> None:
        _log.info(line)
        with contextlib.suppress(Exception):  # an error of a view must not keep workers from joining
            self.tell(line)
