"""Workers as processes of this host, forked from a zygote that has imported what they need."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from nbdist.cluster.processes import Processes
from nbdist.cluster.setup import WorkerSetup

__all__ = ["LocalLauncher"]

_ENTRY = "nbdist.cluster.worker:main"
_PRELOAD = (
    "torch",
    "torch.distributed",
    "numpy",
    "nbdist.rpc",
    "nbdist.cluster.worker_imports",
)
_WORDS = 20_000


class LocalLauncher:
    """The default launcher."""

    def __init__(self, folder: Path, count: int, on_end: Callable[[str, int], None]) -> None:
        threads = str(max(1, (os.cpu_count() or 1) // count))
        self._defaults = {
            "OMP_NUM_THREADS": threads,  # else every worker takes every core for itself
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # a warning of the debugger's, on standard error
        }
        self._processes = Processes(
            folder,
            on_end,
            preload=_PRELOAD,
            fork=os.environ.get("NBDIST_FORK", "1") != "0",
            environment={**self._defaults, **os.environ},
        )

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
