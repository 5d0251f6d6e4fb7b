"""Seeds the random draws of stages, and saves and restores the random generators of a process.

The pipeline's seed, the step, the stage and the micro-batch decide what a stage draws from torch's generators, and
nothing else does: not the worker, not the order of operations, not a checkpoint that computes the stage again. A stage
takes no torch numbers out of the process's own sequence. So the seed and the count of steps decide what a pipeline
draws next. The states of the process's generators are saved for two other uses: the user's own code, and stages that
draw from Python's or numpy's generators, which are not seeded here.
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

from nbdist.rpc.waits import blocking_wait

# Held during a stage's forward, which draws from torch's generators: all threads of a process share them. So the
# forwards of the stages of one process run one at a time.
_drawing = threading.RLock()

_CPU = torch.device("cpu")


def seed_of(seed: int, step: int, stage: int, micro_batch: int) -> int:
    """Return the seed, a number of 63 bits, for what one stage draws for one micro-batch of one step."""
    packed = struct.pack("<4q", seed, step, stage, micro_batch)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(number: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators, of the CPU and of ``device``, for the time of the block, then restore them."""
    gpus = [torch.device("cuda", device.index or 0)] if device.type == "cuda" else []
    with _alone(), torch.random.fork_rng(gpus):
        for generator in (torch.default_generator, *map(_generator_of, gpus)):
            generator.manual_seed(number)
        yield


def random_state(device: torch.device = _CPU) -> dict[str, Any]:
    """Return the states of this process's generators: torch's, a GPU's, Python's, and numpy's if it is imported."""
    with _alone():
        found: dict[str, Any] = {"torch": torch.default_generator.get_state(), "python": random.getstate()}
        if device.type == "cuda":
            found["cuda"] = _generator_of(device).get_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        state = numpy.random.get_state()
        if isinstance(state, tuple):  # not so if the user has installed another kind of generator
            name, key, *rest = state
            # A tensor, because ``torch.load(weights_only=True)`` reads no array.
            found["numpy"] = (name, torch.from_numpy(key.astype("int64")), *rest)
    return found


def restore_random_state(state: Mapping[str, Any], device: torch.device = _CPU) -> None:
    """Set this process's generators to the states that `random_state` returned, here or in another process."""
    with _alone():
        torch.default_generator.set_state(state["torch"])
        random.setstate(state["python"])
        if device.type == "cuda" and "cuda" in state:
            _generator_of(device).set_state(state["cuda"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:  # numpy is not imported for this
        name, key, *rest = state["numpy"]
        numpy.random.set_state((name, key.numpy().astype("uint32"), *rest))


def _generator_of(device: torch.device) -> torch.Generator:
    torch.cuda.init()  # before this, `default_generators` is empty
    found: torch.Generator = torch.cuda.default_generators[device.index or 0]
    return found


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock under which stages draw random numbers, so that no other thread's stage draws during the block."""
    if not _drawing.acquire(blocking=False):
        with blocking_wait():  # a thread of the agent's pool: the pool may add one meanwhile
            _drawing.acquire()
    try:
        yield
    finally:
        _drawing.release()
