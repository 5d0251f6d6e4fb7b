"""Pickles values of a few tensors, atoms and built-in containers, without looking at anything else."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from nbdist.wire.quick import ATOMS
from nbdist.wire.tensors import TensorPacker, is_packable

__all__ = ["COMPLEX", "PLAIN", "TENSORS", "TensorPickler", "simplicity"]

_FEW = 64

COMPLEX, TENSORS, PLAIN = range(3)
"""What pickling a value takes: all that `nbdist.wire.pickler` does, only its tensors, or nothing special."""


def simplicity(value: Any, record: bool, depth: int = 4) -> int:
    """Return what pickling ``value`` takes: `COMPLEX`, `TENSORS` or `PLAIN`."""
    kind = type(value)
    if kind in ATOMS:
        return PLAIN
    if kind is torch.Tensor:
        return TENSORS if is_packable(value) and (record or not value.requires_grad) else COMPLEX
    if kind is dict:
        value = [*value, *value.values()]
    elif kind is not tuple and kind is not list:
        return COMPLEX
    if not depth or len(value) > _FEW:
        return COMPLEX
    simplest = PLAIN
    for item in value:
        if type(item) not in ATOMS:
            simplest = min(simplest, simplicity(item, record, depth - 1))
    return simplest


class TensorPickler(pickle.Pickler):
    """For the usual arguments and results: a few tensors, and atoms."""

    def __init__(self, file: io.BytesIO, packer: TensorPacker, record: bool) -> None:
        super().__init__(file, protocol=5)
        self.recorded: list[torch.Tensor] = []
        self.places: list[int] = []
        self._recorded_at: dict[int, int] = {}
        self._packer = packer
        self._record = record

    def persistent_id(self, obj: Any) -> int | None:
        """Where a tensor is in the message: among its tensors, or, counted downwards from -1, the recorded ones."""
        if type(obj) is not torch.Tensor:
            return None
        if not self._record or not obj.requires_grad:
            return self._packer.add(obj)
        index = self._recorded_at.get(id(obj))
        if index is None:
            index = self._recorded_at[id(obj)] = len(self.recorded)
            self.recorded.append(obj)
            self.places.append(self._packer.add(obj.detach()))
        return -1 - index
