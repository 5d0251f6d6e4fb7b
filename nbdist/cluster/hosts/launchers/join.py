"""`JoinLauncher`: workers that a person, or a batch system, starts by ``python -m nbdist worker --connect FILE``."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

import msgspec

from nbdist.amounts import counted
from nbdist.cluster.hosts.invitations import Invitation
from nbdist.cluster.hosts.launchers.inviting import InvitingLauncher
from nbdist.cluster.processes.launchers.contract import OnEnd
from nbdist.cluster.spec import DEFAULT_INVITATION, VALID_FOR, Spec
from nbdist.cluster.undoing import undone_by


class JoinLauncher(InvitingLauncher):
    """Waits for workers that join. It writes an invitation for as many workers as the cluster has."""

    def __init__(self, spec: Spec, on_end: OnEnd) -> None:
        super().__init__(spec, on_end)
        self._file = Path(spec.invitation or DEFAULT_INVITATION).expanduser().absolute()
        self._first = self.hub.invite(VALID_FOR, spec.count)
        with undone_by(self.close):  # the hub and the zygote would stay
            self._first.write(self._file)

    def advice(self) -> str:
        """Return how to start the workers that are missing."""
        count = self._missing()
        said = (
            f"{counted(count, 'worker')} must be started: {how_to_join(self._file)}; if that invitation is used up, "
            "write another one with %dist_invite"
        )
        return said if count else ""

    def close(self) -> int:
        """End all workers, and remove the run directory and the invitation."""
        try:
            return super().close()
        finally:
            # Another notebook may have written its own invitation there.
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                if msgspec.json.decode(self._file.read_bytes(), type=Invitation).token == self._first.token:
                    self._file.unlink()


def how_to_join(file: Path) -> str:
    """Return the command with which a worker joins by an invitation."""
    return f"on each host, with a copy of the file, run `python -m nbdist worker --connect {shlex.quote(str(file))}`"
