"""Gives servers the weights of a model: from the client's file, or by calls if their host does not see that file.

A server on the client's host, or with a shared network folder, maps the file, so that the servers of a host share its
memory. Any other server calls the client for the weights of its blocks, and keeps them in its own memory.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from nbdist.rpc.api import current_agent
from nbdist.rpc.named import NotOffered
from nbdist.swarm import adapter, weight_file
from nbdist.swarm.carriage import seconds_for

_ANSWER_SECONDS = 60.0  # until the client has described the checkpoint
_READ_SECONDS = 600.0  # for weights, besides the time of sending them alone: all servers load at the same time
_PART_BYTES = 8_000_000  # the most bytes of weights that one call asks for, unless a single weight has more

_numbers = itertools.count()


class Source(NamedTuple):
    """Says where a server finds a checkpoint, on any host: see `offer`. It travels as an argument of calls."""

    folder: str  # the checkpoint's, on the client's host
    # Of the file of weights (`weight_file.mark_of`): another file may have the same path on another host.
    mark: tuple[int, ...]
    client: str  # the name of the client's agent
    name: str  # under which the client's agent has published the checkpoint

    @property
    def is_here(self) -> bool:
        """True if this process sees the file of weights in the folder."""
        try:
            return weight_file.mark_of(self.folder) == self.mark
        except OSError:
            return False

    def open(self) -> adapter.Checkpoint:
        """Return the checkpoint: from the folder if this process sees the same file there, else with `FarWeights`.

        Raises WorkerLost or RpcTimeout if the client does not answer, and `NotOffered` if it has closed the swarm.
        """
        if self.is_here:
            return adapter.Checkpoint(self.folder)
        config, sizes = self.ask("describe", timeout=_ANSWER_SECONDS)
        with tempfile.TemporaryDirectory(dir=current_agent().directory) as folder:
            # `Checkpoint` reads this file at once, so the folder may go.
            Path(folder, adapter.CONFIG).write_text(config)
            return adapter.Checkpoint(folder, FarWeights(self, sizes))

    def ask(self, method: str, *args: Any, timeout: float) -> Any:
        """Call a method of the client's checkpoint, and return its result. Raises the errors of `open`."""
        try:
            return current_agent().at(self.client, self.name).ask(method, *args, timeout=timeout)
        except NotOffered:
            raise NotOffered(
                "the weights of this swarm cannot be read any more: the swarm was closed. Serve the model again with "
                "nbdist.swarm.serve"
            ) from None


class _Asked(Protocol):
    def ask(self, method: str, *args: Any, timeout: float) -> Any: ...


class FarWeights:
    """The weights of a `Source`, read from the client by calls. ``sizes`` are their bytes by name."""

    def __init__(self, source: _Asked, sizes: dict[str, int]) -> None:
        self.source = source
        self.sizes = sizes

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Ask the client for the weights with these ``names``, and return them. Raises the errors of `Source.open`."""
        found: dict[str, torch.Tensor] = {}
        for part in self._parts(names):
            timeout = _READ_SECONDS + seconds_for(sum(self.sizes[name] for name in part))
            found |= self.source.ask("read", part, timeout=timeout)
        return found

    def _parts(self, names: Sequence[str]) -> Iterator[list[str]]:
        part: list[str] = []
        for name in names:
            if part and sum(self.sizes[each] for each in (*part, name)) > _PART_BYTES:
                yield part
                part = []
            part.append(name)
        if part:
            yield part


def offer(checkpoint: adapter.Checkpoint) -> Source:
    """Let servers read a ``checkpoint`` of this agent, which must have a file; return the `Source` that servers need.

    The offer ends when its name is withdrawn, or the checkpoint is deleted.
    """
    agent = current_agent()
    name = f"checkpoint {agent.me.incarnation}.{next(_numbers)}"
    agent.named.publish(name, checkpoint, "describe", "texts", "read", clients=("texts", "read"))
    return Source(str(checkpoint.folder), weight_file.mark_of(checkpoint.folder), agent.me.name, name)
