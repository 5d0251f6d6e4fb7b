"""Reads what the nodes of torch's graph have saved of the forward pass, as it is kept: no hook is called."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from nbdist.autograd.edges import Node

__all__ = ["Saved", "saved_by"]

_RAW = "_raw_saved_"

_names: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()
"""The attributes under which the nodes of a class keep what they have saved; each Function of a user's has a class."""


class Saved(NamedTuple):
    """Something that a node has saved."""

    name: str
    """As torch calls it: ``self``, ``other``, ``result``; ``tensors`` of a user's Function."""
    tensor: torch.Tensor | None
    """None where hooks have packed it into something else."""
    data: Any
    """What is kept: the tensor, or whatever hooks have made of it."""
    packed: bool
    """Whether hooks for saved tensors have packed it: to unpack it is to call the user's code, or a checkpoint's."""


def saved_by(node: Node) -> list[Saved]:
    """Return what a node has saved, as far as no pass has let go of it."""
    names = _names.get(type(node))
    if names is None:
        names = _names[type(node)] = tuple(name for name in dir(type(node)) if name.startswith(_RAW))
    found = []
    for name in names:
        try:
            raw = getattr(node, name)
        except RuntimeError:  # a pass has been here, and let go of it
            continue
        for each in raw if issubclass(type(raw), tuple | list) else (raw,):
            if type(each).__name__ != "SavedTensor":  # a node that keeps something else under such a name
                continue
            with contextlib.suppress(RuntimeError, AttributeError):  # there is none, or it has been let go of
                data = each.data
                tensor = data if issubclass(type(data), torch.Tensor) else None
                packed = getattr(each, "unpack_hook", None) is not None or (tensor is None and data is not None)
                if tensor is not None or packed:
                    found.append(Saved(name.removeprefix(_RAW), tensor, data, packed))
    return found
