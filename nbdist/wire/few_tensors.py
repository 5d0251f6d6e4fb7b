"""Pickles values of a few tensors, atoms and built-in containers, with a pickler that looks for tensors only."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from nbdist.wire.quick import ATOMS
from nbdist.wire.tensors import TensorPacker, is_packable

_MOST_ITEMS = 64  # of a container that `simplicity` looks into; a dict's keys and values both count

# The answers of `simplicity`: a value needs `wire.pickling.pickler`, a pickler that finds tensors, or plain pickle.
COMPLEX, TENSORS, PLAIN = range(3)


def simplicity(value: Any, record: bool, depth: int = 4) -> int:
    """Return which pickler ``value`` needs: `PLAIN` for pickle itself, `TENSORS` for `TensorPickler`, else `COMPLEX`.

    `PLAIN` values are atoms (None, bool, int, float, str, bytes) in tuples, lists and dicts. `TENSORS` values have
    tensors among these. Containers of more than 64 items, or more than ``depth`` deep, are `COMPLEX`, and so is a
    tensor that requires grad, unless ``record``.
    """
    kind = type(value)
    if kind in ATOMS:
        return PLAIN
    if kind is torch.Tensor:
        return TENSORS if is_packable(value) and (record or not value.requires_grad) else COMPLEX
    if kind is dict:
        value = [*value, *value.values()]
    elif kind is not tuple and kind is not list:
        return COMPLEX
    if not depth or len(value) > _MOST_ITEMS:  # the depth also ends the search in a list that contains itself
        return COMPLEX
    simplest = PLAIN
    for item in value:
        if type(item) not in ATOMS:
            simplest = min(simplest, simplicity(item, record, depth - 1))
    return simplest


class TensorPickler(pickle.Pickler):
    """Pickles the usual arguments and results, with fewer checks than `nbdist.wire.pickling.pickler`."""

    def __init__(self, file: io.BytesIO, packer: TensorPacker, record: bool) -> None:
        """Pickle into ``file``; tensors go to ``packer``. With ``record``, those that require grad go to `recorded`."""
        super().__init__(file, protocol=5)
        self.recorded: list[torch.Tensor] = []
        self.places: list[int] = []  # the index of each recorded tensor among the message's tensors
        self._recorded_at: dict[int, int] = {}  # by ``id``: `recorded` keeps the tensors alive
        self._packer = packer
        self._record = record

    def persistent_id(self, obj: Any) -> int | None:
        """Return a tensor's index in the message, for tensors in `recorded` -1, -2, …; None for other objects."""
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
