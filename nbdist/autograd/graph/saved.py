"""Reads the values that torch's nodes have saved for the backward pass, without calling hooks for saved tensors."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from nbdist.autograd.graph.edges import Node

_RAW = "_raw_saved_"  # begins the names under which torch's nodes keep saved values as they were packed
# By class of node, the names of the attributes with saved values. Weak, since every user's Function has its own class.
_names: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()


class Saved(NamedTuple):
    """One value that a node has saved for its backward."""

    name: str  # torch's, such as ``self``, ``other`` or ``result``; ``tensors`` in a user's Function
    tensor: torch.Tensor | None  # None if hooks have packed it into something else
    data: Any  # the tensor, or what hooks have packed it into
    packed: bool  # by hooks for saved tensors: to unpack it would call the user's code, or a checkpoint's
    unpack: Any = None  # the hook that would be called


def saved_by(node: Node) -> list[Saved]:
    """Return the saved tensors of a node that can be read, and that no pass has freed yet."""
    found = []
    for name in _raw_names(type(node)):
        try:
            raw = getattr(node, name)
        except RuntimeError:  # a pass has freed it
            continue
        for each in raw if issubclass(type(raw), tuple | list) else (raw,):
            if type(each).__name__ != "SavedTensor":  # some nodes have other values under such a name
                continue
            with contextlib.suppress(RuntimeError, AttributeError):  # there is none, or a pass has freed it
                data = each.data
                tensor = data if issubclass(type(data), torch.Tensor) else None
                unpack = getattr(each, "unpack_hook", None)
                packed = unpack is not None or (tensor is None and data is not None)
                if tensor is not None or packed:
                    found.append(Saved(name.removeprefix(_RAW), tensor, data, packed, unpack))
    return found


def packed_by(node: Node) -> list[Saved]:
    """Return the values that hooks for saved tensors have packed. Takes 2 µs, a third of `saved_by`, for none."""
    for name in _raw_names(type(node)):
        with contextlib.suppress(RuntimeError):  # a pass has freed it
            raw = getattr(node, name)
            for each in raw if type(raw) is tuple else (raw,):
                # A value of another kind, or of an older torch, has no such attribute.
                if getattr(each, "unpack_hook", each) is not None and each is not None:
                    return [value for value in saved_by(node) if value.packed]
    return []


def _raw_names(kind: type) -> tuple[str, ...]:
    if (names := _names.get(kind)) is None:
        names = _names[kind] = tuple(name for name in dir(kind) if name.startswith(_RAW))
    return names
