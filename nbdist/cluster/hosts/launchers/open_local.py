"""`OpenLocalLauncher`: workers of this host, in a cluster that workers of other hosts may join: ``%dist_init --host``.

A worker that `LocalLauncher` starts listens only at sockets of this host, and cannot listen elsewhere later. So this
launcher starts the workers of this host like the workers of other hosts: by a *keeper*, a process that starts and ends
the workers of one host, with addresses and encryption for other hosts. The launcher starts the keeper, and starts it
again if it has died and workers wait for it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import msgspec

from nbdist.amounts import counted
from nbdist.cluster.hosts.hub import KeeperMember
from nbdist.cluster.hosts.launchers.inviting import InvitingLauncher
from nbdist.cluster.processes.launchers.contract import OnEnd, StartedWorker
from nbdist.cluster.processes.setup import WorkerSetup
from nbdist.cluster.spec import Spec
from nbdist.errors import ResourceError

_INVITED_FOR = 600.0  # seconds within which the keeper must join; it needs a few
_ENDS_WITHIN = 5.0  # seconds for the keeper to end after SIGTERM; then it gets SIGKILL


class OpenLocalLauncher(InvitingLauncher):
    """Starts a keeper on this host with room for the cluster's first workers. Others join by invitations."""

    def __init__(self, spec: Spec, on_end: OnEnd) -> None:
        # The keepers that this launcher has started, by the token of the invitation that each one got.
        self._own: dict[str, subprocess.Popen[bytes]] = {}
        super().__init__(spec, on_end)

    def start(self, setup: WorkerSetup, environment: Mapping[str, str]) -> Future[StartedWorker]:
        """Start a worker; the first workers have the places on this host in the order of their ranks."""
        if not self._needs_invited(setup.rank):
            setup = msgspec.structs.replace(setup, local_rank=setup.rank)
        return super().start(setup, environment)

    def _provide(self) -> None:
        """Start a keeper for the workers of this host, if some wait for one and none runs."""
        with self._lock:
            waiting = any(not self._needs_invited(start.setup.rank) for start in self.wanted.values())
            if waiting and not self.is_closing and all(own.poll() is not None for own in self._own.values()):
                self._start_keeper()

    def _start_keeper(self) -> None:
        """Start a keeper, which then connects to the hub by itself. The caller holds the lock."""
        invitation = self.hub.invite(_INVITED_FOR, self.spec.count)
        command = [sys.executable, "-m", "nbdist", "worker", "--connect", "-", "--with-parent"]
        command += ["-n", str(self.spec.count), "--host", self.hub.host]
        said = self.folder / f"keeper-{len(self._own)}.log"
        with open(said, "wb") as log:
            own = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        assert own.stdin is not None
        with contextlib.suppress(OSError), own.stdin:  # the keeper has ended already
            own.stdin.write(msgspec.json.encode(invitation))
        self._own[invitation.token] = own
        threading.Thread(
            target=self._watch, args=(invitation.token, own, said), name="nbdist-own-keeper", daemon=True
        ).start()

    def _watch(self, token: str, own: subprocess.Popen[bytes], said: Path) -> None:
        """Wait until a keeper's process has ended. If the keeper never joined, fail the starts that wait for it."""
        own.wait()
        with self._lock:
            if self.is_closing or token in self.hub.came:
                return  # the hub notices the end of a keeper that has joined
            try:
                why = said.read_text(errors="replace").strip().rpartition("\n")[2]
            except OSError:  # the run directory is gone
                why = "its last words are lost"
            for start in [start for start in self.wanted.values() if not self._needs_invited(start.setup.rank)]:
                error = ResourceError(f"the process that starts the workers of this host has ended: {why}")
                self._refuse(start, error)

    def _is_invited(self, member: KeeperMember) -> bool:
        return member.token not in self._own

    def _needs_invited(self, rank: int) -> bool:
        # Workers that joined later have the higher ranks.
        return rank >= self.spec.count

    def advice(self) -> str:
        """Return how to start missing workers of other hosts, or ""; workers of this host start by themselves."""
        with self._lock:
            missing = [name for name in {*self.wanted, *self._missed} if self._needs_invited(self._ranks[name])]
        said = f"{counted(len(missing), 'worker')} must join again: write an invitation with %dist_invite"
        return said if missing else ""

    def close(self) -> int:
        """End all workers and this host's keeper, and remove the run directory."""
        try:
            return super().close()
        finally:
            for own in self._own.values():
                own.terminate()  # does nothing if the keeper has ended
            for own in self._own.values():
                try:
                    own.wait(_ENDS_WITHIN)
                except subprocess.TimeoutExpired:
                    own.kill()
                    own.wait()
