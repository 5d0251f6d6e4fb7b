"""Lets this worker's host read torch's flight recorder at any time: torch answers from C++, which needs no GIL."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from nbdist.torch_private import worker_server


class RecordServer:
    """Serves the record of this process's collectives at a Unix socket. `nbdist.cluster.processes.probe` reads it."""

    def __init__(self) -> None:
        self._server: Any = None
        """torch's server. It lives as long as the process: its end would be written to the worker's log."""

    def note_forming(self, path: str) -> None:
        """Note that the process group forms now: give this time to the socket at ``path``. The first call makes it.

        Without torch's server, or a socket, the host reads no record.
        """
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: torch's, if it cannot bind the socket
            if self._server is None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # of this worker's previous life
                with _without_stderr():
                    self._server = worker_server(path)
            os.utime(path)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Keep C++ from writing to standard error in the block, in which torch says that it listens."""
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)
