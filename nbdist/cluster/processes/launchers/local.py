"""`LocalLauncher`: runs workers as processes of this host, forked from a zygote that has imported torch for them.

Importing torch is most of the time that a cluster needs to start. Therefore ``%load_ext nbdist`` calls `prepare`: it
starts a zygote that imports torch while the notebook imports it, too. The next cluster takes that zygote.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.channel import machine
from nbdist.channel.process_watch import is_alive, started_at
from nbdist.channel.resources import require_files
from nbdist.cluster.processes.launchers.contract import GIVEN_UP, OnEnd, StartedWorker
from nbdist.cluster.processes.probe import Probe, probe
from nbdist.cluster.processes.run_directory import make_folder, remove_folder
from nbdist.cluster.processes.setup import WorkerSetup
from nbdist.cluster.processes.worker_processes import Processes
from nbdist.cluster.processes.zygote import frozen_imports
from nbdist.cluster.undoing import undone_by

if TYPE_CHECKING:
    from nbdist.cluster.processes.group_store import GroupStores
    from nbdist.cluster.spec import Spec

_ENTRY = "nbdist.cluster.worker.kernel:main"  # the function that a worker process calls

_PRELOAD = ("torch", "torch.distributed", "nbdist.rpc", "nbdist.cluster.worker.imports")
# What the first optimizer or DDP module of a process imports. The last module imports the others, too; they come first
# because a start waits for the end of an import. A worker that imports all this by itself needs a second, and 90 MB.
PRELOAD_IDLE = ("mpmath", "sympy", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")
_LAST_WORDS_LETTERS = 100_000  # characters of a worker's log that `LocalLauncher.last_words` returns, at most
_ENVIRONMENT = {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}  # else the debugger writes a warning

# Of the zygote; workers have other ones, and set their own number of threads. With the second variable, torch asks NVML
# which GPUs there are. If it asked CUDA, forking would not be safe any more.
_ZYGOTE_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

# Files that this process must be able to open before it starts a zygote: with fewer it could not even clean up.
_FILES_NEEDED = 10


class _SpareZygote:
    """The zygote that waits for the next cluster: a process that imports torch and forks the workers."""

    def __init__(self) -> None:
        self._processes: Processes | None = None

    def prepare(self, *, by_fork: bool = False) -> None:
        """Start a zygote for the next cluster, if forking is allowed and none waits."""
        if self._processes is None and _may_fork():
            # This process must have no other thread then. torch is imported only once for both.
            if by_fork:
                os.environ.update(_ENVIRONMENT)
                with frozen_imports():
                    for module in _PRELOAD:
                        importlib.import_module(module)
            self._processes = _start_zygote(by_fork=by_fork, idle=PRELOAD_IDLE)

    def discard(self) -> None:
        """End the zygote of `prepare`, if no cluster has taken it."""
        if (spare := self._take()) is not None:
            spare.close()

    def take_or_start(self) -> Processes:
        """Return the zygote of `prepare`, if it can still be used, and forget it; else start a new one."""
        if (spare := self._take()) is not None:
            if spare.usable:
                spare.hurry()
                return spare
            spare.close()
        return _start_zygote()

    def _take(self) -> Processes | None:
        spare, self._processes = self._processes, None
        # In a fork, the zygote is that of the parent.
        return spare if spare is not None and spare.owner == os.getpid() else None


_spare_zygote = _SpareZygote()
prepare = _spare_zygote.prepare
discard = _spare_zygote.discard


def _start_zygote(*, by_fork: bool = False, idle: Sequence[str] = ()) -> Processes:
    """Start a zygote in a new run directory. Returns before it has imported torch."""
    require_files(_FILES_NEEDED, "the process that starts workers cannot start")
    folder = make_folder()
    environment = {**_ENVIRONMENT, **_home(folder), **os.environ, **_ZYGOTE_ENVIRONMENT}
    with undone_by(remove_folder, folder):  # no zygote lives that could do it
        return Processes(
            folder, preload=_PRELOAD, idle=idle, fork=_may_fork(), environment=environment, fork_zygote=by_fork
        )


def _home(folder: Path) -> dict[str, str]:
    """Return ``{"HOME": folder}`` if this user has no home; else an empty dict."""
    # Jupyter's packages cannot be imported without a home. In containers, a user may have neither a name nor ``HOME``.
    try:
        Path.home()
    except RuntimeError:
        return {"HOME": str(folder)}
    return {}


def _surroundings() -> dict[str, str]:
    environment = dict(os.environ)
    environment.pop("JPY_PARENT_PID", None)  # this kernel's parent, which a worker would take for its own and watch
    environment.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # figures appear below cells
    return environment


def _may_fork() -> bool:
    return os.environ.get("NBDIST_FORK", "1") != "0"


class LocalLauncher:
    """The default launcher: processes of this host. See `Launcher` for its methods.

    Every worker gets an equal share of the cores that this process may use, unless the user sets ``OMP_NUM_THREADS``.
    """

    def __init__(self, spec: Spec, on_end: OnEnd) -> None:
        # Without this, each worker would use all cores.
        threads = {"OMP_NUM_THREADS": str(max(1, machine.cores() // spec.count))}
        self.processes = _spare_zygote.take_or_start()
        """The zygote, and the workers that are forked from it."""
        self.folder = self.processes.folder
        """The path of the cluster's run directory, with its sockets, connection files and logs; `close` removes it."""
        self.rpc = {"init_method": f"file://{self.folder}/members"}
        """The options by which agents join the RPC world: they meet at a file in the run directory."""
        self._defaults = {**_ENVIRONMENT, **_home(self.folder), **threads}
        self._on_end = on_end
        self._given_up: set[str] = set()  # the workers whose start was given up, and whose process is being killed
        self.processes.on_end = self._ended

    def _ended(self, name: str, code: int) -> None:
        was_given_up = name in self._given_up
        self._given_up.discard(name)
        self._on_end(name, GIVEN_UP if was_given_up else code)

    @property
    def group_stores(self) -> GroupStores:
        """The stores at which the workers form their process groups: folders in the run directory."""
        from nbdist.cluster.processes.group_store import Folders

        return Folders(self.folder)

    def preload(self, modules: Sequence[str]) -> Future[None]:
        """Import modules in the zygote, once for all workers, which share their memory."""
        return self.processes.preload(modules, {**_home(self.folder), **_surroundings(), **_ZYGOTE_ENVIRONMENT})

    def start(self, setup: WorkerSetup, environment: Mapping[str, str]) -> Future[StartedWorker]:
        """Start a worker with this process's environment variables, which ``environment`` overrides."""
        variables = {**self._defaults, **_surroundings(), **environment}
        pid = self.processes.start(setup.name, _ENTRY, [setup.encode()], variables)
        started: Future[StartedWorker] = Future()

        def settle(pid: Future[int]) -> None:
            error = pid.exception()
            if not started.set_running_or_notify_cancel():  # given up: the caller has cancelled the future
                if error is not None:
                    self._on_end(setup.name, GIVEN_UP)
                else:
                    self._given_up.add(setup.name)
                    self.signal(setup.name, signal.SIGKILL)
            elif error is not None:
                started.set_exception(error)
            else:
                started.set_result(StartedWorker(pid.result()))

        pid.add_done_callback(settle)
        return started

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a worker; do nothing if it has ended."""
        self.processes.signal(name, number)

    def probe(self, name: str) -> Future[Probe]:
        """Ask the system about a worker's process; the answer comes within 0.3 s."""
        return probe(self.folder, name, self.processes.living.get(name), self.signal)

    def advice(self) -> str:
        """Return an empty text: a worker of this host starts by itself."""
        return ""

    def last_words(self, name: str) -> str:
        """Return the end of the worker's log, complete once the zygote has reported the worker's end; or ""."""
        try:
            return self.processes.log(name).read_text(errors="replace")[-_LAST_WORDS_LETTERS:].strip()
        except OSError:
            return ""

    def close(self) -> int:
        """Kill all workers and the zygote, and remove the run directory; return how many workers still live."""
        workers = [(pid, started_at(pid)) for pid in self.processes.living.values()]
        self.processes.close()
        return sum(is_alive(pid, started) for pid, started in workers)
