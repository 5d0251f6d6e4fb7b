"""Pickles values of a few tensors, atoms and built-in containers, with a pickler that looks for tensors only."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from nbdist.wire.quick import ATOMS
from nbdist.wire.tensors import TensorPacker, is_packable

_MOST_ITEMS = 64
"""The most items of a container that `simplicity` looks into. A dict's keys and values both count."""

COMPLEX, TENSORS, PLAIN = range(3)
"""The answers of `simplicity`: a value needs `wire.pickling.pickler`, a pickler that finds tensors, or plain pickle."""


def simplicity(value: Any, record: bool, depth: int = 4) -> int:
    """Return which pickler ``value`` needs: `PLAIN` for pickle itself, `TENSORS` for `TensorPickler`, else `COMPLEX`.

    `PLAIN` values are atoms (None, bool, int, float, str, bytes) in tuples, lists and dicts. `TENSORS` values have
    tensors among these. Looks ``depth`` containers deep. Deeper containers are `COMPLEX`, and so are containers of more
    than 64 items (a dict's keys and values both count). A tensor that requires grad is `COMPLEX`, unless ``record``.
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
    if not depth or len(value) > _MOST_ITEMS:
        return COMPLEX
    simplest = PLAIN
    for item in value:
        if type(item) not in ATOMS:
            simplest = min(simplest, simplicity(item, record, depth - 1))
    return simplest


class TensorPickler(pickle.Pickler):
    """Pickles the usual arguments and results: a few tensors, atoms, containers.

    Pickle calls `persistent_id` for each object in the value, which costs less than all the checks of
    `nbdist.wire.pickling.pickler`.
    """

    def __init__(self, file: io.BytesIO, packer: TensorPacker, record: bool) -> None:
        """Pickle into ``file``; tensors go to ``packer``. With ``record``, those that require grad go to `recorded`."""
        super().__init__(file, protocol=5)
        self.recorded: list[torch.Tensor] = []
        """The tensors that were recorded."""
        self.places: list[int] = []
        """The index of each recorded tensor among the message's tensors."""
        self._recorded_at: dict[int, int] = {}
        self._packer = packer
        self._record = record

    def persistent_id(self, obj: Any) -> int | None:
        """Return the index by which the pickle refers to a tensor; None for other objects, which are pickled as usual.

        Pickle calls this for each object. The index counts the tensors of the message from 0 on; for tensors in
        `recorded` it is -1, -2, …
        """
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
