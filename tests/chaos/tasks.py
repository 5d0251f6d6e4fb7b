"""What members run for others: functions that enter themselves into the ledger each time they run."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from chaos import recorder
from chaos.ledger import Ran
from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.rpc.api import current_agent


def _enter(call: str, value: Any) -> None:
    recorder.write(
        Ran(call, rpc.get_worker_info().name, os.getpid(), None if value is None else recorder.digest(value))
    )


def echo(call: str, value: Any, seconds: float = 0.0) -> Any:
    """Return ``value``, after a while."""
    if seconds:
        time.sleep(seconds)
    _enter(call, value)
    return value


def add_one(call: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor plus one."""
    value = tensor + 1
    _enter(call, value)
    return value


def fail(call: str) -> None:
    """Raise an error that names the call."""
    _enter(call, None)
    raise LookupError(call)


def fetch(call: str, rref: Any) -> Any:
    """Fetch a reference that somebody else holds, too, and return its value."""
    value = rref.to_here(10)
    _enter(call, value)
    return value


def relay(call: str, to: str, value: Any) -> Any:
    """Call `echo` on another member, as a call of its own, and return what that returns."""
    from chaos.calling import Caller

    got = Caller.here().sync(to, "nested", echo, value, limit=10.0)
    _enter(call, got)
    return got


def wave(call: str, tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a tensor that depends on ``tensor``, for backward passes."""
    value = torch.sin(tensor * factor)
    _enter(call, value)
    return value


def enter(call: str, value: Any) -> None:
    """Enter that a cell ran on this worker, for the call of that name, and came to ``value``."""
    _enter(call, value)


def gradients(context_id: int, rrefs: list[Any]) -> list[torch.Tensor]:
    """Return the gradients that this worker has in a context, of parameters that live here."""
    found = dist_autograd.get_gradients(context_id)
    return [found[rref.local_value()] for rref in rrefs]


LASTING = ("owned_values", "forks_of_owned", "used_references", "arena_bytes_used", "arena_blocks_held", "contexts")
"""The counters that are nothing although this worker is just being asked for them."""


def left(counters: Sequence[str]) -> dict[str, int]:
    """Return those of this agent's counters that are not zero."""
    gc.collect()
    agent = current_agent()
    contexts = len(agent.recorder.contexts.all()) if agent.recorder is not None else 0
    now = {**agent.statistics(), "contexts": contexts}
    return {counter: now[counter] for counter in counters if now[counter]}
