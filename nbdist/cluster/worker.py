"""A worker: a stock ipykernel, and what this extension adds to it.

The kernel's own channels carry cells, output, completion and interrupts; the RPC agent has sockets and threads of
its own in the same process. The notebook brings a worker up in steps, each of them a silent cell that calls one of
the functions here, so that it can say how far each worker is, and which step failed on which.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import random
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.cluster import collectives
from nbdist.cluster.last_words import guard_streams, hand_over
from nbdist.cluster.setup import WorkerSetup
from nbdist.errors import UsageError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["WHERE_SIGNAL", "group", "join", "main", "setup", "where_file"]

WHERE_SIGNAL = signal.SIGRTMAX - 3
"""Has a worker write down where its main thread is, which works also while the GIL is held."""

_PATIENCE = 1.2
"""Seconds for what this worker waits for to stop; the notebook, which waits for this worker, has a little more."""

_setup: WorkerSetup | None = None


def setup() -> WorkerSetup:
    """What this process was told; an error elsewhere than in a worker."""
    if _setup is None:
        raise UsageError("this process is not a worker of a cluster")
    return _setup


def main(told: str) -> None:
    """Be a worker; the entry of its process."""
    global _setup
    _setup = WorkerSetup.decode(told)
    _set_environment(_setup)
    log = os.dup(2)  # the kernel makes something else of standard error
    faulthandler.enable(file=log, all_threads=False)
    _write_where_asked(_setup)
    from ipykernel.kernelapp import IPKernelApp

    guard_streams()
    app = IPKernelApp.instance()
    app.initialize(
        [
            f"--f={_setup.connection_file}",
            "--ext=nbdist.cluster.worker",
            "--HistoryManager.enabled=False",  # which would write the notebook's user's history file
            "--InteractiveShell.cache_size=1000",
            "--Session.packer=nbdist.cluster.jupyter_wire.pack",
            "--Session.unpacker=nbdist.cluster.jupyter_wire.unpack",
        ]
    )
    app.log.setLevel(logging.WARNING)  # else every message is formatted for a handler that drops it
    hand_over()
    with contextlib.suppress(OSError):
        os.ftruncate(log, 0)  # how to connect other clients, and the like
    atexit.register(_leave)  # runs behind what the user registers, before what the kernel has
    while True:
        app.start()
        if app.kernel._shutdown_message is not None:
            return
        # A KeyboardInterrupt that came between two cells has ended the loop: it was meant for neither.


def _leave() -> None:
    """Be gone: the kernel's own end may take seconds, and taking down every module copies what the zygote shares."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _set_environment(told: WorkerSetup) -> None:
    os.environ.update(
        RANK=str(told.rank),
        LOCAL_RANK=str(told.rank),
        WORLD_SIZE=str(told.world_size),
        LOCAL_WORLD_SIZE=str(told.world_size),
        MASTER_ADDR=told.master_address,
        MASTER_PORT=str(told.master_port),
    )
    if told.master_address == "127.0.0.1":
        # All workers are on this host. Gloo's and NCCL's connections know no secret, so nobody beyond the host may
        # reach them, whatever interface the environment names for programs that span hosts.
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")


def _write_where_asked(told: WorkerSetup) -> None:
    file = open(where_file(told.folder, told.name), "a")  # noqa: SIM115 (it stays open: a handler writes to it)
    faulthandler.register(WHERE_SIGNAL, file=file, all_threads=False)


def where_file(folder: str, name: str) -> str:
    """The file in which a worker writes down where it is."""
    return os.path.join(folder, f"{name}.where")


# -- the extension ------------------------------------------------------------------------------


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Make a kernel a worker; called by the kernel while it starts."""
    import torch

    from nbdist import autograd, rpc
    from nbdist.cluster import labels, translating, worker_output
    from nbdist.cluster.shell_channel import answer_through_stream

    answer_through_stream(getattr(shell, "kernel", None))
    told = setup()
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if threads.isdecimal():
        torch.set_num_threads(int(threads))  # the zygote, whose torch this is, was told another number
    device = torch.device(told.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _seed(told)
    labels.install(shell, told.name)
    labels.trim_tracebacks(shell)
    translating.install(shell)
    given = {
        "rank": told.rank,
        "world_size": told.world_size,
        "device": device,
        "gpu_id": told.gpu,
        "torch": torch,
        "dist": torch.distributed,
        "rpc": rpc,
        "dist_autograd": autograd,
        "__rank__": told.rank,  # as nbdistributed's programs know them
        "__world_size__": told.world_size,
    }
    worker_output.install(shell, given)


def _seed(told: WorkerSetup) -> None:
    """Every worker draws numbers of its own; with a seed, the same ones every time."""
    import torch

    if told.seed is None:
        torch.seed()  # which is the same in every fresh process
        return
    own = told.seed + told.rank
    random.seed(own)
    torch.manual_seed(own)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(own % 2**32)


# -- the steps of coming up ---------------------------------------------------------------------


def join() -> None:
    """Become a member of the RPC world."""
    from nbdist.cluster import labels, process_memory, worker_output
    from nbdist.rpc import failures
    from nbdist.rpc.api import initialize
    from nbdist.rpc.options import RpcBackendOptions

    told = setup()
    agent = initialize(
        told.name,
        told.id,
        None,
        RpcBackendOptions(init_method=told.meeting, rpc_timeout=60.0),
        hosted=Path(told.folder),
    )
    agent.stopping.patience = _PATIENCE
    worker_output.follow(agent)
    collectives.follow(agent, told.backend)
    failures.on_text(labels.rename_frames)
    process_memory.mark_start()


def group(generation: int) -> None:
    """Initialise the process group, or initialise it anew."""
    told = setup()
    if told.backend != "none":
        collectives.initialise(told, generation)
