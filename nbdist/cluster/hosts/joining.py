"""``python -m nbdist worker``: joins a notebook's cluster from this host, and runs workers until the cluster ends."""

from __future__ import annotations

import os
import signal
import sys
import threading

from nbdist.amounts import counted
from nbdist.channel.process_watch import ProcessWatch, started_at
from nbdist.cluster.hosts.invitations import read_invitation
from nbdist.cluster.hosts.keeper import Keeper
from nbdist.cluster.processes.launchers.local import prepare
from nbdist.errors import UsageError


def join(path: str, workers: int, host: str | None, with_parent: bool = False) -> int:
    """Run a number of ``workers`` for the cluster of the invitation at ``path``; return this process's exit code.

    ``host`` is this host's address for the others; None for the one on the way to the notebook. ``with_parent`` ends
    this process with the one that has started it, even if that is killed. Returns 0 once the cluster has ended in
    order, or after Ctrl-C or SIGTERM; 1 if the notebook is lost.
    """
    if workers < 1:
        raise UsageError(f"-n must be 1 or more, not {workers}")
    invitation = read_invitation(path)
    prepare(by_fork=True)  # now, while this process has one thread
    keeper = Keeper(invitation, workers, host)
    if with_parent:
        watch = ProcessWatch(lambda pid: keeper.finish("the process that has started this one has ended"))
        watch.watch(os.getppid(), started_at(os.getppid()))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: _finish(keeper))
    print(f"nbdist: {counted(workers, 'worker')} on {keeper.host} for the notebook; Ctrl-C ends this", file=sys.stderr)
    try:
        keeper.run()
    except KeyboardInterrupt:
        keeper.close()
    if keeper.why:
        print(f"nbdist: {keeper.why}; its workers here have ended", file=sys.stderr)
        return 1
    return 0


def _finish(keeper: Keeper) -> None:
    # The handler of SIGTERM calls this at any place of the main thread, perhaps while that holds the lock of the event
    # to be set. So a thread sets the event.
    threading.Thread(target=keeper.finish, args=("",), name="nbdist-finish", daemon=True).start()
