"""A worker: a stock ipykernel, plus an RPC agent and a member of the process group in the same process.

=================  =====================  =======================================================================
step               caller                 function in this module
=================  =====================  =======================================================================
process            the zygote             `main`: runs the kernel until it is told to shut down
kernel             the kernel (``--ext``) `load_ipython_extension`: turns the kernel into a worker
rpc                the notebook           `join`: makes the worker a member of the RPC world
process group      the notebook           `group`: forms the process group with the other workers
=================  =====================  =======================================================================

The notebook calls `join` and `group` by silent cells, so that it knows how far each worker is and which step failed.
Other cells are run by ipykernel itself, with the hooks of `WorkerOutput` around them (`nbdist.cluster.worker.output`).
Cells, output, completion and interrupts use the kernel's channels; the RPC agent has its own sockets and threads.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from IPython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from nbdist.cluster.examination import imported_files  # noqa: F401 - it notes the files of modules from now on
from nbdist.cluster.processes.last_words import guard_streams, hand_over
from nbdist.cluster.processes.setup import WHERE_SIGNAL, WorkerSetup, where_file
from nbdist.cluster.worker import nccl, roots
from nbdist.cluster.worker.breakpoints import BreakpointsHere
from nbdist.cluster.worker.collectives import Collectives
from nbdist.cluster.worker.debugger import DEBUGGER
from nbdist.cluster.worker.group_hooks import HOOKS
from nbdist.cluster.worker.new_code import NewCode
from nbdist.errors import UsageError

# Seconds within which a worker has to join the RPC world; also the time limit of its calls, unless options set one.
_JOINS_WITHIN = 60.0
# Seconds to wait until the calls that this worker made have stopped after an interrupt; the notebook waits longer.
_CALLS_STOP_WITHIN = 1.2


_worker: WorkerKernel | None = None  # set by `main`; None in a process that is no worker


def setup() -> WorkerSetup:
    """Return the `WorkerSetup` of this worker: its name, rank, device, and place in the cluster.

    Raises UsageError in a process that is no worker of a cluster.
    """
    return here().setup


def here() -> WorkerKernel:
    """Return the worker that this process is. Raises UsageError in a process that is no worker of a cluster."""
    if _worker is None:
        raise UsageError("this process is not a worker of a cluster: call this on a worker, as in a cell with %%remote")
    return _worker


def main(told: str) -> None:
    """Run a worker: the entry of its process. ``told`` is its `WorkerSetup` as JSON.

    Returns when the kernel has been asked to shut down.
    """
    global _worker
    setup = WorkerSetup.decode(told)
    _worker = WorkerKernel(setup)
    _set_environment(setup)  # before the kernel starts: cells and their child processes inherit it
    # Crash reports go to the worker's log, which is standard error before the kernel replaces it. It is emptied once
    # the kernel runs: what comes afterwards may say why it died.
    log = os.dup(2)  # the kernel replaces standard error
    faulthandler.enable(file=log)  # all threads: gloo ends the process in a thread of its own
    _write_where_asked(setup)
    from ipykernel.kernelapp import IPKernelApp

    guard_streams()
    app = IPKernelApp.instance()
    with _modules_unlisted():
        app.initialize(
            [
                f"--f={setup.connection_file}",
                "--ext=nbdist.cluster.worker.kernel",
                "--HistoryManager.enabled=False",  # else the worker writes to the user's IPython history
                "--InteractiveShell.cache_size=1000",
                "--Session.packer=nbdist.cluster.jupyter.jupyter_wire.pack",
                "--Session.unpacker=nbdist.cluster.jupyter.jupyter_wire.unpack",
            ]
        )
    vars(app.shell).pop("_sys_modules_keys", None)  # else `%reset --aggressive` would remove all modules
    app.log.setLevel(logging.WARNING)  # else each message is formatted, and then dropped by a handler
    hand_over(HOOKS.follow())
    roots.follow()
    with contextlib.suppress(OSError):
        os.ftruncate(log, 0)  # drops the kernel's hints on how to connect other clients
    atexit.register(_leave)  # exit handlers run last first: after the user's, before the kernel's
    while True:
        app.start()
        if app.kernel._shutdown_message is not None:
            return
        # A KeyboardInterrupt between two cells has ended the loop, although it was meant for neither: start it again.


@contextlib.contextmanager
def _modules_unlisted() -> Iterator[None]:
    """Keep the kernel from listing `sys.modules` when it starts: for a debugger, and for ``%reset --aggressive``."""
    from ipykernel import ipkernel
    from IPython.core import shellapp

    # A list counts a reference to each of 2,000 modules and names, and so copies 8 MB that forked workers share.
    class Sys:
        modules: ClassVar[dict[str, Any]] = {}

        def __getattr__(self, name: str) -> Any:
            return getattr(sys, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(sys, name, value)

    vars(shellapp)["sys"] = vars(ipkernel)["sys"] = Sys()
    try:
        yield
    finally:
        vars(shellapp)["sys"] = vars(ipkernel)["sys"] = sys


def _leave() -> None:
    # After the user's exit handlers. The kernel's own end may take seconds, and an ordinary exit copies the memory that
    # forked workers share.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _set_environment(told: WorkerSetup) -> None:
    """Set the variables that torch's ``env://`` reads, and keep connections of process groups on this host."""
    os.environ.update(
        RANK=str(told.rank),
        LOCAL_RANK=str(told.rank if told.local_rank is None else told.local_rank),
        WORLD_SIZE=str(told.world_size),
        LOCAL_WORLD_SIZE=str(told.local_world_size or told.world_size),
        MASTER_ADDR=told.master_address,
        MASTER_PORT=str(told.master_port),
    )
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch 2.10 records no collectives by default
    nccl.set_environment()
    if told.interface:
        # Connections of gloo and NCCL are not authenticated. If all workers are on this host, no other host may reach
        # them, whatever interface the environment names for programs that span hosts; else they keep to the interface
        # by which the workers reach each other.
        os.environ.update(GLOO_SOCKET_IFNAME=told.interface, NCCL_SOCKET_IFNAME=told.interface)


def _write_where_asked(told: WorkerSetup) -> None:
    """Install a handler that writes the frames of the main thread to `where_file` at each `WHERE_SIGNAL`."""
    file = open(where_file(told.folder, told.name), "a")  # noqa: SIM115 (it stays open: a handler writes to it)
    # In C, so that it needs no GIL.
    faulthandler.register(WHERE_SIGNAL, file=file, all_threads=False)


# -- the extension ------------------------------------------------------------------------------


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Turn a starting kernel into a worker. ``--ext`` names this module, so the kernel calls this before it serves."""
    here().prepare(shell)


class WorkerKernel:
    """The worker that this process is."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        """The notebook's words to this worker. The number of workers in it grows as workers join."""
        self._collectives = Collectives()

    def prepare(self, shell: InteractiveShell) -> None:
        """Set up device, seed, tracebacks, output and variables such as ``rank``. Called before the kernel serves."""
        import torch

        from nbdist import autograd, rpc
        from nbdist.autograd.passes.local_passes import local_passes
        from nbdist.cluster import spawning
        from nbdist.cluster.jupyter import labels
        from nbdist.cluster.jupyter.versions import answer_through_stream
        from nbdist.cluster.worker import collective_errors, default_group, gpu
        from nbdist.cluster.worker.debugged_page import DebuggedPage
        from nbdist.cluster.worker.output import WorkerOutput
        from nbdist.cluster.worker.values import PushedValues

        answer_through_stream(getattr(shell, "kernel", None))
        told = self.setup
        threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        if threads.isdecimal():
            torch.set_num_threads(int(threads))  # the zygote has started torch with another number
        gpu.prepare(told)
        _seed(told)
        labels.install(shell, told.name)
        labels.trim_tracebacks(shell)
        collective_errors.install(shell, self._collectives)
        default_group.install(shell, setup, self._collectives)
        spawning.install(on_worker=True)
        if os.environ.get("PYTHONBREAKPOINT", "").startswith("ray."):
            del os.environ["PYTHONBREAKPOINT"]  # Ray's debugger works in Ray's own tasks only
        DEBUGGER.install(shell, told)
        given = {
            "rank": told.rank,
            "world_size": told.world_size,
            "device": torch.device(told.device),
            "gpu_id": told.gpu,
            "torch": torch,
            "dist": torch.distributed,
            "rpc": rpc,
            "dist_autograd": autograd,
            "__rank__": told.rank,  # the names in programs for nbdistributed
            "__world_size__": told.world_size,
        }
        shell.events.register("pre_run_cell", local_passes.cell_begins)
        shell.events.register("post_run_cell", local_passes.cell_ends)
        self._output = WorkerOutput(shell, given, self._collectives)
        self._pushed = PushedValues(shell)
        self._breakpoints = BreakpointsHere(shell)
        self._new_code = NewCode(shell)
        self._page = DebuggedPage(shell)

    def join(self) -> None:
        """Start the RPC agent and join the RPC world. Returns when this worker is a member.

        Called once in each life of a worker; its errors become the notebook's StartError, and a second call is a
        UsageError.
        """
        from nbdist.cluster.jupyter import labels
        from nbdist.cluster.processes import process_memory
        from nbdist.cluster.worker import gpu
        from nbdist.rpc import failures
        from nbdist.rpc.api import initialize
        from nbdist.rpc.options import RpcBackendOptions

        told = self.setup
        gpu.check(told)
        # A short time limit of the user's is not meant for joining.
        rpc = {**told.rpc, "rpc_timeout": _JOINS_WITHIN}
        options = RpcBackendOptions(init_method=told.meeting, secret=told.secret, host=told.host, **rpc)
        agent = initialize(told.name, told.id, None, options, hosted=Path(told.folder), device=told.device)
        agent.rpc_timeout = told.rpc.get("rpc_timeout", _JOINS_WITHIN)
        agent.stopping.patience = _CALLS_STOP_WITHIN
        self._output.follow(agent)
        DEBUGGER.follow(agent)
        agent.named.publish("pushed", self._pushed, "receive", "forget")
        self._breakpoints.agent = agent
        agent.named.publish("breakpoints", self._breakpoints, "replace")
        agent.named.publish("code", self._new_code, "follow")
        agent.named.publish("page", self._page, *self._page.METHODS)
        self._collectives.follow(agent, told)
        failures.on_text(labels.rename_frames)
        process_memory.mark_start()

    def group(self, generation: int, world_size: int) -> None:
        """Form the process group number ``generation`` of ``world_size`` workers; destroy the previous one first.

        Waits for the other workers. Raises RendezvousError if another worker fails to form it, WorkerLost if a member
        has died.
        """
        # In a cluster without a process group, too.
        self._note_world_size(world_size)
        if self.setup.backend != "none":
            self._collectives.initialise(self.setup, generation)

    def _note_world_size(self, world_size: int) -> None:
        """Note the number of workers, which grows as workers join: in the setup, the environment and the variables."""
        told = self.setup
        if world_size == told.world_size:
            return
        self.setup = msgspec.structs.replace(told, world_size=world_size)
        os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(told.local_world_size or world_size))
        shell: Any = get_ipython()
        # A variable to which the user has assigned another value stays as it is.
        own = [name for name in ("world_size", "__world_size__") if type(shell.user_ns.get(name)) is int]
        names = [name for name in own if shell.user_ns[name] == told.world_size]
        shell.push(dict.fromkeys(names, world_size), interactive=False)


def _seed(told: WorkerSetup) -> None:
    """Seed this worker's random generators with the cluster's seed plus the rank; without a seed, only torch's."""
    import torch

    if told.seed is None:
        # Those of Python and numpy differ already: a forked worker has seeded them again, a spawned one for the first
        # time.
        torch.seed()  # torch's first seed is the same in every process
        return
    own = told.seed + told.rank
    random.seed(own)
    torch.manual_seed(own)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(own % 2**32)
