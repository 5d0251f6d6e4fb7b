"""A worker's part in a swarm: blocks that it has loaded, and the caches of the sessions that go through them.

It is a value that lives on the worker; clients call its methods by a reference. Only one thing is computed at a time,
and whoever asks how it is need not wait for that.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from nbdist.errors import UsageError
from nbdist.swarm import adapter
from nbdist.swarm.history import Step

__all__ = ["Info", "Server"]


class Info(NamedTuple):
    """How a server is."""

    pid: int
    blocks: list[int]
    sessions: int
    steps: int
    """So many steps it has taken, of all sessions."""


class _Session:
    """The caches of one session here."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.taken = 0


class Server:
    """Serves blocks of one model."""

    def __init__(self, folder: str) -> None:
        self._checkpoint = adapter.Checkpoint(folder)
        self._blocks: dict[int, nn.Module] = {}
        self._sessions: dict[tuple[str, int], _Session] = {}
        self._computing = threading.Lock()
        self._steps = 0

    # -- blocks -------------------------------------------------------------------------------

    def load(self, begin: int, end: int) -> list[int]:
        """Have these blocks; all that it has then."""
        with self._computing:
            missing = [number for number in range(begin, end) if number not in self._blocks]
            if missing:
                model = adapter.build(self._checkpoint.config)
                path = adapter.find_layers(model)
                layers = model.get_submodule(path)
                for number in missing:
                    self._checkpoint.fill(layers[number], f"{path}.{number}.")
                    self._blocks[number] = layers[number]
            return sorted(self._blocks)

    def info(self) -> Info:
        """How it is, at once."""
        return Info(os.getpid(), sorted(self._blocks), len(self._sessions), self._steps)

    # -- sessions -----------------------------------------------------------------------------

    def open(self, session: str, begin: int, cache: Any) -> None:
        """A session comes to the span that begins with this block; ``cache`` is what its caches begin as."""
        self._sessions[session, begin] = _Session(copy.deepcopy(cache))

    def close(self, session: str) -> None:
        """A session is over; what it had here is gone."""
        for key in [key for key in self._sessions if key[0] == session]:
            self._sessions.pop(key, None)

    def step(self, session: str, begin: int, number: int, step: Step) -> torch.Tensor:
        """Take the tokens of a session's step of that number through the span that begins with this block."""
        found = self._sessions.get((session, begin))
        if found is None:
            raise UsageError(f"there is no session {session} at block {begin} here")
        with self._computing, torch.no_grad():
            if found.taken != number:
                raise UsageError(f"step {number} of session {session} comes after {found.taken} others")
            for operation in step.before:
                adapter.operate(found.cache, *operation, begin, begin + len(step.calls))
            hidden = self._through(begin, step.hidden, step.calls, found.cache)
            found.taken += 1
            self._steps += 1
            return hidden

    # -- without a session --------------------------------------------------------------------

    def forward(self, begin: int, hidden: torch.Tensor, calls: Sequence[adapter.LayerCall]) -> torch.Tensor:
        """Take hidden states through blocks, and remember nothing."""
        with self._computing, torch.no_grad():
            return self._through(begin, hidden, calls, None)

    def backward(
        self, begin: int, hidden: torch.Tensor, calls: Sequence[adapter.LayerCall], gradient: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of what went in, of that of what came out: the way between is computed again."""
        with self._computing, torch.enable_grad():
            given = hidden.detach().requires_grad_()
            (found,) = torch.autograd.grad(self._through(begin, given, calls, None), [given], [gradient])
            return found

    def returns_tuple(self, begin: int, hidden: torch.Tensor, told: adapter.LayerCall) -> bool:
        """Whether a block hands on its hidden states in a tuple."""
        with self._computing, torch.no_grad():
            args, kwargs = told
            return isinstance(self._block(begin)(hidden, *args, **kwargs), tuple)

    def _through(
        self, begin: int, hidden: torch.Tensor, calls: Sequence[adapter.LayerCall], cache: Any
    ) -> torch.Tensor:
        for number, told in enumerate(calls, begin):
            hidden = adapter.call(self._block(number), hidden, told, cache)
        return hidden

    def _block(self, number: int) -> nn.Module:
        block = self._blocks.get(number)
        if block is None:
            raise UsageError(f"block {number} is not here, which has {sorted(self._blocks)}")
        return block
