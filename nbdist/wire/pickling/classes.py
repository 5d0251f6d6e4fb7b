"""Rebuilds classes that came by value: over no class that this process has made itself.

cloudpickle gives a class an id when it pickles the class for the first time. A process that unpickles the id has one
class for it: the class itself where it was made, or a *received* class, made of what came by value. cloudpickle then
writes the sender's attributes over either. This module does it so::

    a class that this process made    stays as it is: its methods use this process's globals, and its attributes may be
                                      state of this process
    a received class, other code      gets all attributes of the sender
    a received class, the same code   gets the sender's methods, which have the sender's present globals; its other
                                      attributes may be state of this process, and stay
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle.cloudpickle as cloudpickle

__all__ = ["CODE", "fill", "fill_any", "make", "reduced"]

CODE = (
    types.FunctionType,
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
)
"""The types of the attributes of a class that are code."""

_received: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
"""The received classes of this process, each with the digest of the code that it has; "" before it has any."""


def reduced(definition: type, digest: str) -> tuple[Any, ...]:
    """Return how to pickle a class by value, as ``__reduce__`` does. ``digest`` is the digest of its code."""
    make_skeleton, arguments, (attributes, _), *rest, _ = cloudpickle._class_reduce(definition)
    slots = vars(definition).get("__slots__")
    if slots and make_skeleton is cloudpickle._make_skeleton_class:
        # cloudpickle would make a class without slots, whose instances cannot come back as those of the class.
        constructor, name, bases, options, *others = arguments
        arguments = (constructor, name, bases, {**options, "__slots__": slots}, *others)
        attributes = {key: value for key, value in attributes.items() if key != "__slots__"}
    return make_skeleton, arguments, (digest, attributes), *rest, fill


def make(how: Callable[..., type], *arguments: Any) -> type:
    """Return the class of this process for the id in ``arguments``; make a skeleton, an empty class, if there is none.

    ``how`` and ``arguments`` are cloudpickle's function and its arguments, the last but one of which is the id.
    """
    known: type | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(arguments[-2])
    if known is not None:
        return known
    made = how(*arguments)
    _received.setdefault(made, "")
    return made


def fill(cls: type, state: tuple[str, dict[str, Any]]) -> type:
    """Give a received class its attributes; return it. ``state`` has the digest and the attributes of the sender's."""
    digest, attributes = state
    before = _received.get(cls)
    if before is None:  # this process has made the class
        return cls
    if before == digest:
        attributes = {name: value for name, value in attributes.items() if isinstance(value, CODE)}
    cloudpickle._class_setstate(cls, (attributes, {}))
    _received[cls] = digest
    return cls


def fill_any(cls: type, state: Any) -> type:
    """Give a received class that came without a digest its attributes, which cloudpickle has pickled; return it."""
    filled: type = cloudpickle._class_setstate(cls, state) if cls in _received else cls
    return filled
