"""What stages draw at random, and the random generators of a process, saved and restored.

A stage's draws are derived from the pipeline's seed, the step, the stage and the micro-batch, and from nothing else:
neither where the stage runs, nor after what, nor whether it is run once more for a checkpoint. A stage uses up none of
the process's own numbers. So the seed and the count of steps decide what a pipeline draws next. The generators'
states are saved beside them for what the user's own code draws.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from nbdist.rpc.futures import blocking_wait

__all__ = ["random_state", "restore_random_state", "seed_of", "seeded"]

_drawing = threading.RLock()
"""There is one generator for all threads of a process."""

_CPU = torch.device("cpu")


def seed_of(seed: int, step: int, stage: int, micro_batch: int) -> int:
    """Return the seed of what one stage draws for one micro-batch."""
    packed = struct.pack("<4q", seed, step, stage, micro_batch)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(number: int, device: torch.device) -> Iterator[None]:
    """Draw from a generator with this seed for the time of the block."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(_generator_of(device))
    with _undisturbed():
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(number)
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def random_state(device: torch.device = _CPU) -> dict[str, Any]:
    """Return the states of this process's generators: torch's, that of a GPU, Python's, and numpy's if it is imported.

    All of it are tensors, tuples and numbers, which ``torch.load(weights_only=True)`` reads.
    """
    with _undisturbed():
        found: dict[str, Any] = {"torch": torch.default_generator.get_state(), "python": random.getstate()}
        if device.type == "cuda":
            found["cuda"] = _generator_of(device).get_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        state = numpy.random.get_state()
        if isinstance(state, tuple):  # else the user has put another kind of generator in its place
            name, key, *rest = state
            found["numpy"] = (name, torch.from_numpy(key.astype("int64")), *rest)
    return found


def restore_random_state(state: Mapping[str, Any], device: torch.device = _CPU) -> None:
    """Give this process's generators the states that `random_state` returned, here or in another process."""
    with _undisturbed():
        torch.default_generator.set_state(state["torch"])
        random.setstate(state["python"])
        if device.type == "cuda" and "cuda" in state:
            _generator_of(device).set_state(state["cuda"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        name, key, *rest = state["numpy"]
        numpy.random.set_state((name, key.numpy().astype("uint32"), *rest))


def _generator_of(device: torch.device) -> torch.Generator:
    torch.cuda.init()
    found: torch.Generator = torch.cuda.default_generators[device.index or 0]
    return found


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let no stage of this process draw for the time of the block."""
    if not _drawing.acquire(blocking=False):
        with blocking_wait():
            _drawing.acquire()
    try:
        yield
    finally:
        _drawing.release()
