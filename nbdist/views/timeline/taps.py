"""Emits events of torch's optimizers (``optimizer.stepped``) and of DataLoaders (``data.loaded``), while one records.

torch has hooks for steps. For batches it has none, so the method that all iterators of a DataLoader share is replaced,
and put back afterwards.
"""

from __future__ import annotations

import functools
import threading
import time
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from nbdist import trace
from nbdist.torch_private import loader_iterator


class Taps:
    """The taps of this process: open while at least one recording has called `open`, and not yet `close`."""

    def __init__(self) -> None:
        self._lock, self._users, self._undo = threading.Lock(), 0, ExitStack()

    def open(self) -> None:
        """Emit events from now on."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                _tap(self._undo)

    def close(self) -> None:
        """Undo one `open`; the last one removes the taps."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._undo.close()


def _tap(undo: ExitStack) -> None:
    """Emit events until ``undo`` is closed."""
    begun: dict[tuple[int, int], float] = {}  # the starts of steps, by thread and optimizer
    plain = loader_iterator.__next__

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        begun[threading.get_ident(), id(optimizer)] = time.monotonic()

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        start = begun.pop((threading.get_ident(), id(optimizer)), None)
        if start is not None:  # else the step had begun before
            trace.emit("optimizer.stepped", start=start, optimizer=type(optimizer).__name__)

    @functools.wraps(plain)
    def tapped(iterator: Any) -> Any:
        start, batch = time.monotonic(), plain(iterator)
        trace.emit("data.loaded", start=start)
        return batch

    def put_back() -> None:
        if loader_iterator.__next__ is tapped:  # else somebody has replaced it after us, and calls it
            loader_iterator.__next__ = plain

    undo.callback(optimizers.register_optimizer_step_pre_hook(before).remove)
    undo.callback(optimizers.register_optimizer_step_post_hook(after).remove)
    undo.callback(put_back)
    loader_iterator.__next__ = tapped


taps = Taps()
