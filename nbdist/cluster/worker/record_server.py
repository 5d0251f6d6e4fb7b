"""Lets this worker's host read torch's flight recorder at any time: torch answers from C++, which needs no GIL."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

from nbdist.signals import DeferredSignals
from nbdist.torch_private import worker_server


class RecordServer:
    """Serves the record of this process's collectives at a Unix socket. `nbdist.cluster.processes.probe` reads it."""

    def __init__(self) -> None:
        self._server: Any = None

    def note_forming(self, path: str) -> None:
        """Note that the process group forms now: give this time to the socket at ``path``. The first call makes it.

        Without torch's server or its record, or without a socket, the host reads nothing.
        """
        if os.environ.get("TORCH_FR_BUFFER_SIZE") == "0":
            return  # an empty record would look as if nothing had been called
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: torch's, if it cannot bind the socket
            if self._server is None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # of this worker's previous life
                with DeferredSignals(), _without_stderr():  # a Ctrl-C in between would leave stderr shut
                    self._server = worker_server(path)
                # One reference for ever: a forked child that freed the server would shut the socket of this process.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._server))
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
