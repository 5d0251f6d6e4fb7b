"""Rebuilds classes that came by value: over no class that this process has made itself.

cloudpickle gives a class an id when it pickles the class for the first time. A process that unpickles the id has one
class for it: the class itself where it was made, or a *received* class, made of what came by value. cloudpickle then
writes the sender's attributes over either. This module does it so:

- A class that this process has made stays as it is: its methods use this process's globals, and its attributes may be
  state of this process.
- A received class gets the sender's methods, with the sender's present globals. It gets another attribute only if the
  sender has changed it since the last message: else the attribute may be state of this process. A *fingerprint* of the
  value, which the sender puts beside it, tells.

Between two messages nothing else may refer to a received class, and a garbage collection would take its state. So the
newest received classes of each name are kept.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle.cloudpickle as cloudpickle

# The types of the attributes of a class that are code.
_CODE = (
    types.FunctionType,
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
    type(functools.cache(lambda: None)),
)

_made: weakref.WeakSet[type] = weakref.WeakSet()  # the classes that this process has made and sent
# The received classes of this process, each with the fingerprints of its attributes as they came last.
_received: weakref.WeakKeyDictionary[type, dict[str, bytes]] = weakref.WeakKeyDictionary()
# The most received classes with the same qualified name that are kept, such as those that one function makes. Another
# class comes whenever the sender defines it again, and each may keep large values alive by its methods' globals.
_KEPT_OF_A_NAME = 4
_kept: dict[str, tuple[type, ...]] = {}  # the newest received classes by qualified name, the newest one last


def reduced(definition: type) -> tuple[Any, ...]:
    """Return how to pickle a class by value, as ``__reduce__`` does."""
    if definition not in _received:
        _made.add(definition)
    make_skeleton, arguments, (attributes, _), *rest, _ = cloudpickle._dynamic_class_reduce(definition)
    if make_skeleton is cloudpickle._make_skeleton_class:
        constructor, name, bases, options, *others = arguments
        options = {**options, "__qualname__": definition.__qualname__}
        slots = vars(definition).get("__slots__")
        if slots and constructor in (type, abc.ABCMeta):
            # cloudpickle would make a class without slots, whose instances cannot come back as those of the class.
            options["__slots__"] = slots
            attributes = {key: value for key, value in attributes.items() if key != "__slots__"}
        arguments = (constructor, name, bases, options, *others)
    fingerprints = {}
    for key, value in attributes.items():
        if not isinstance(value, _CODE) and (found := _fingerprint(value)) is not None:
            fingerprints[key] = found
    return make_skeleton, arguments, (fingerprints, attributes), *rest, fill


def _fingerprint(value: Any) -> bytes | None:
    """Return a few bytes that change with a value; None for a value with code in it, which always travels anew."""
    try:
        return hashlib.blake2b(pickle.dumps(value, 5), digest_size=12).digest()
    except Exception:  # whatever the value's own methods raise: a lambda, a function in an object, a lock
        return None


def make(how: Callable[..., type], *arguments: Any) -> type:
    """Return this process's class for the id in ``arguments``; if there is none, make an empty class by ``how``.

    Both are cloudpickle's: a function and its arguments.
    """
    known: type | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(arguments[-2])  # by the id
    cls = how(*arguments) if known is None else known
    if cls not in _made:
        others = (each for each in _kept.get(cls.__qualname__, ()) if each is not cls)
        _kept[cls.__qualname__] = (*others, cls)[-_KEPT_OF_A_NAME:]
    return cls


def fill(cls: type, state: tuple[dict[str, bytes], dict[str, Any]]) -> type:
    """Give a received class the attributes of the sender's; return it. ``state`` has fingerprints and attributes."""
    # The class came back to the process that made it: its attributes here may be newer.
    if cls in _made:
        return cls
    fingerprints, attributes = state
    before = _received.get(cls, {})
    new = {
        name: value
        for name, value in attributes.items()
        if name not in fingerprints or before.get(name) != fingerprints[name]
    }
    cloudpickle._class_setstate(cls, (new, {}))
    _received[cls] = fingerprints
    return cls


def fill_any(cls: type, state: Any) -> type:
    """Give a received class that came without fingerprints its attributes, which cloudpickle has pickled; return it."""
    filled: type = cls if cls in _made else cloudpickle._class_setstate(cls, state)
    return filled
