"""What must be nothing when nobody calls and nobody refers to anything any more (G4)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from chaos import recorder
from chaos.ledger import Noted

MUST_BE_NOTHING = (
    "pending_calls",
    "running_calls",
    "owned_values",
    "forks_of_owned",
    "used_references",
    "pending_references",
    "unacknowledged",
    "arena_bytes_used",
    "arena_blocks_held",
    "contexts",
)
"""The counters of an agent that `chaos.tasks.left` knows."""


def wait_for_nothing(name: str, left: Callable[[], dict[str, int]]) -> None:
    """Wait until ``left()`` is empty; note what is left after the storm's patience."""
    deadline = time.monotonic() + float(os.environ["NBDIST_CHAOS_LEAKS_AFTER"])
    while found := left():
        if time.monotonic() > deadline:
            recorder.write(Noted("left behind", name, f"objects: {found}"))
            return
        time.sleep(0.1)
