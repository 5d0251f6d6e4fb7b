"""Adds up the gradients of leaves, which threads may compute on several CUDA streams."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from nbdist.gpus import side_streams


class GradientStore:
    """The gradients of leaves on this worker, added up over the steps of a pass or the passes of a context."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the leaf's id: hashing a tensor is slow
        self._lock = threading.Lock()

    def add(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a gradient to a leaf's sum. The tensor is stored as it is, so nobody may change it afterwards.

        If the thread's current CUDA stream computes the gradient, `nbdist.gpus.side_streams` must have published it.
        """
        with self._lock:
            known = self._sums.get(id(leaf))
            if known is not None:
                with torch.no_grad():
                    gradient = _sum(known[1], gradient)
            self._sums[id(leaf)] = (leaf, gradient)

    def update(self, other: GradientStore) -> None:
        """Add the sums of another object to these. If a GPU has no room, raise torch's error and add none."""
        with self._lock:
            if not self._sums:
                self._sums.update(other._sums)
                return
            sums = dict(self._sums)  # a copy, so that an error in the middle leaves all as it was
            with torch.no_grad():
                for leaf, gradient in list(other._sums.values()):  # a copy: a pass may be adding to them
                    known = sums.get(id(leaf))
                    sums[id(leaf)] = (leaf, gradient if known is None else _sum(known[1], gradient))
            self._sums = sums

    def of(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of a leaf, or None. The caller must not change it: others may use it."""
        known = self._sums.get(id(leaf))
        return known[1] if known is not None else None

    def scale(self, leaves: Iterable[torch.Tensor], factor: float) -> None:
        """Multiply the gradients of some leaves by a factor; call it only while no pass adds gradients."""
        for leaf in leaves:
            known = self._sums.get(id(leaf))
            if known is not None:
                # A new tensor, as others may use the old one.
                self._sums[id(leaf)] = (leaf, known[1] * factor)

    def items(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each leaf with its gradient."""
        return list(self._sums.values())


def _sum(known: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Return the sum of two gradients, which other threads may have computed on other CUDA streams."""
    if not known.is_cuda:
        return known + more
    side_streams.catch_up((known, more))
    total = known + more
    side_streams.publish((total,))
    return total
