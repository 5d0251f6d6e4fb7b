"""What a worker is told about itself and its cluster when it starts."""

from __future__ import annotations

import msgspec

__all__ = ["WorkerSetup", "group_folder"]


class WorkerSetup(msgspec.Struct, frozen=True):
    """One worker's place in its cluster; it travels as JSON, as the argument of the worker's entry."""

    name: str
    id: int
    """In the RPC world, of which the notebook is a member too."""
    rank: int
    """In the process group, of which the notebook is not."""
    world_size: int
    connection_file: str
    """Of its kernel."""
    folder: str
    """The run directory."""
    meeting: str
    """The ``init_method`` of the RPC world."""
    master_port: int
    """A free port, where nothing of ours listens: for a process group that the user's own code forms by ``env://``."""
    backend: str
    """Of the process group; ``none`` for no group."""
    gpu: int | None = None
    """The number of its GPU as the user knows it."""
    device: str = "cpu"
    """The same as torch in this process knows it."""
    seed: int | None = None
    master_address: str = "127.0.0.1"

    def encode(self) -> str:
        """As JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> WorkerSetup:
        """From JSON."""
        return msgspec.json.decode(text, type=cls)


def group_folder(generation: int) -> str:
    """Return the name, within the run directory, of the folder where the workers form their process group.

    Each forming, the first and every later one, has a number (`generation`) and a folder of its own, so that it cannot
    find what an earlier one wrote.
    """
    return f"group-{generation}"
