"""`WorkerSetup`: the facts about itself and its cluster that a worker gets when its process starts."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

import msgspec

AUTO = "auto"  # the backend of a process group whose workers choose it when it forms: see `choose_backend`
# The signal at which a worker writes the frames of its main thread to `where_file`, even while the GIL is held.
WHERE_SIGNAL = signal.SIGRTMAX - 3


class WorkerSetup(msgspec.Struct, frozen=True):
    """One worker's place in its cluster, passed as JSON to the entry of its process: `cluster.worker.kernel.main`."""

    name: str
    id: int
    """Its id in the RPC world. The notebook is a member of that world, too."""
    rank: int
    """Its rank in the process group. The notebook is not a member of the group."""
    world_size: int
    connection_file: str
    folder: str
    """The run directory."""
    meeting: str
    """The ``init_method`` of the RPC world."""
    master_port: int
    """A free port, at which nbdist does not listen, for a process group that user code forms by ``env://``."""
    backend: str
    """The backend of the process group; ``none`` for no process group, `AUTO` if the workers choose."""
    local_rank: int | None = None
    """The worker's place among the workers of its host; None to use its rank."""
    local_world_size: int = 0  # the number of workers of its host; 0 for all
    gpu: int | None = None  # the number of its GPU as the user knows it
    device: str = "cpu"
    """Its device as torch in its process calls it."""
    gpu_memory: float | None = None
    """The part of its GPU's memory that torch may take in this worker; None for all of it."""
    rpc: dict[str, Any] = {}
    """Arguments for the options of its RPC agent."""
    seed: int | None = None
    """The cluster's seed; the worker adds its rank. None for random numbers that differ in every run."""
    driver: str = "notebook"
    """The name of the notebook's agent."""
    master_address: str = "127.0.0.1"
    """The address of the host of rank 0, for a process group that user code forms by ``env://``."""
    interface: str = "lo"
    """The network interface for the connections of process groups; empty to let gloo and NCCL choose."""
    host: str | None = None
    """The address at which agents on other hosts reach this worker's; None if all are on one host."""
    secret: str | None = None
    """The secret that the members of the RPC world share; None for the user's own, if all are on one host."""

    def encode(self) -> str:
        """Return this setup as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> WorkerSetup:
        """Return the setup that `encode` has written."""
        return msgspec.json.decode(text, type=cls)


def where_file(folder: str, name: str) -> str:
    """Return the path of the file of a worker's frames; ``folder`` is the run directory on the worker's host."""
    return os.path.join(folder, f"{name}.where")


def record_socket(folder: str, name: str) -> str:
    """Return the path of the Unix socket at which torch tells the collectives of the worker ``name``."""
    # Its time of modification is when the present process group began to form.
    return os.path.join(folder, f"{name}.record")


def group_folder(generation: int) -> str:
    """Return the name of the folder, in the run directory, where the workers form the group of this number."""
    return f"group-{generation}"  # a folder for each: no worker reads what an earlier attempt wrote


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of an address of this host that is free; another process may take it before it is used."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def choose_backend(gpus: Sequence[object]) -> str:
    """Return the backend of a process group, as torch writes it, for workers with these GPUs; None for no GPU."""
    alone = len(set(gpus) - {None}) == len(gpus)
    return "cpu:gloo,cuda:nccl" if alone else "gloo"
