"""Workers as processes of this host, forked from a zygote that has imported what they need.

Importing torch is most of the time that a cluster takes to start. So the extension has a zygote begin with that as
soon as it is loaded, while the notebook itself imports torch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from nbdist.channel.resources import require_files
from nbdist.cluster.folder import make_folder
from nbdist.cluster.processes import Processes
from nbdist.cluster.setup import WorkerSetup

__all__ = ["LocalLauncher", "discard", "prepare"]

_ENTRY = "nbdist.cluster.worker:main"
_PRELOAD = ("torch", "torch.distributed", "nbdist.rpc", "nbdist.cluster.worker_imports")
_WORDS = 20_000
_ENVIRONMENT = {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}  # a warning of the debugger's, on standard error

# Who asks which GPUs there are is told by a library that leaves no mark in the process, which could not be forked then.
_BEFORE = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Where workers are forked from; each sets its own number of threads."""

_FILES_NEEDED = 10
"""Files that must be free to start a process and to talk to it; with fewer, its folder could not even be removed."""
_prepared: Processes | None = None


def prepare() -> None:
    """Start a zygote for the cluster to come. It ends with this process, whatever comes."""
    global _prepared
    if _prepared is None and _may_fork():
        _prepared = _start_zygote()


def discard() -> None:
    """No cluster is to come."""
    global _prepared
    prepared, _prepared = _prepared, None
    if prepared is not None and prepared.owner == os.getpid():
        prepared.close()


def _take() -> Processes:
    global _prepared
    prepared, _prepared = _prepared, None
    if prepared is not None and prepared.owner == os.getpid():  # else it is the parent's
        if prepared.usable:
            return prepared
        prepared.close()
    return _start_zygote()


def _start_zygote() -> Processes:
    environment = {**_ENVIRONMENT, **os.environ, **_BEFORE}
    require_files(_FILES_NEEDED, "the process that starts workers cannot start")
    folder = make_folder()
    try:
        return Processes(folder, _nobody, preload=_PRELOAD, fork=_may_fork(), environment=environment)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # there is no zygote to do it
        raise


def _may_fork() -> bool:
    return os.environ.get("NBDIST_FORK", "1") != "0"


def _nobody(name: str, code: int) -> None:
    """Nobody cares for the end of a worker of which there is none yet."""


class LocalLauncher:
    """The default launcher."""

    def __init__(self, count: int, on_end: Callable[[str, int], None]) -> None:
        threads = str(max(1, (os.cpu_count() or 1) // count))
        self._defaults = {**_ENVIRONMENT, "OMP_NUM_THREADS": threads}  # else every worker takes every core for itself
        self._processes = _take()
        self._processes.on_end = on_end

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self._processes.folder

    def preload(self, modules: Sequence[str], environment: Mapping[str, str]) -> Future[None]:
        """Import these once, for all workers; they share the memory of that."""
        return self._processes.preload(modules, {**environment, **_BEFORE})

    def start(self, setup: WorkerSetup, environment: Mapping[str, str]) -> Future[int]:
        """Start a worker; its pid, as soon as it is known."""
        return self._processes.start(setup.name, _ENTRY, [setup.encode()], {**self._defaults, **environment})

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a worker, if it lives."""
        self._processes.signal(name, number)

    def last_words(self, name: str) -> str:
        """The end of what a worker wrote to its standard error outside of cells."""
        try:
            return self._processes.log(name).read_text(errors="replace")[-_WORDS:].strip()
        except OSError:
            return ""

    def close(self) -> None:
        """Kill all that lives, and leave nothing."""
        self._processes.close()
