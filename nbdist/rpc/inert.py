"""Reads what an object is without running any code of its class.

Views show values that somebody else wrote. A user's `__len__`, `__repr__`, `__class__`, property, metaclass or
`__torch_function__` may be slow, may fail, may change the value, and may wait for the very worker that asks. So views
read only what Python and torch keep by themselves, through the descriptors of the base classes:

=============================  ========================================================
instead of                     this module
=============================  ========================================================
``isinstance(value, kind)``    `is_a`: the type alone, never ``value.__class__``
``cls.__qualname__``           `qualname_of`, `module_of`: past the metaclass
``dir(cls)``                   `public_names`
``module.parameters()``        `parameters_of`: the dicts that `torch.nn.Module` keeps
``tensor.shape``               `tensor_fact`, inside of `torch_private.no_torch_function`
``sys.getsizeof(value)``       `size_of`: the `__sizeof__` of the built-in base class
=============================  ========================================================
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from types import MappingProxyType, MethodDescriptorType
from typing import Any

import torch

__all__ = [
    "array_class",
    "dict_of_class",
    "is_a",
    "module_of",
    "mro",
    "nbytes_of",
    "parameters_of",
    "public_names",
    "qualname_of",
    "size_of",
    "sizer_of",
    "tensor_fact",
    "user_dispatches",
]

_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_qualname: Callable[[type], str] = type.__dict__["__qualname__"].__get__
_module: Callable[[type], Any] = type.__dict__["__module__"].__get__
_class_dict: Callable[[type], MappingProxyType[str, Any]] = type.__dict__["__dict__"].__get__
_flags: Callable[[type], int] = type.__dict__["__flags__"].__get__
_fields: Callable[[torch.nn.Module], dict[str, Any]] = torch.nn.Module.__dict__["__dict__"].__get__


def is_a(value: object, *kinds: type) -> bool:
    """Return whether a value's type is one of these classes or derives from one; no abstract base classes."""
    return issubclass(type(value), kinds)


def mro(cls: type) -> tuple[type, ...]:
    """Return a class and its base classes, nearest first."""
    return _mro(cls)


def qualname_of(cls: type) -> str:
    """Return the qualified name that Python gave a class."""
    return _qualname(cls)


def module_of(cls: type) -> str:
    """Return the name of the module that a class says it is from; "" where that is no plain text."""
    try:
        name = _module(cls)
    except AttributeError:
        return ""
    return name if type(name) is str else ""


def dict_of_class(cls: type) -> MappingProxyType[str, Any]:
    """Return the attributes that a class itself defines."""
    return _class_dict(cls)


def public_names(cls: type) -> list[str]:
    """Return the sorted names of a class and its base classes that do not begin with an underscore."""
    names = {name for each in _mro(cls) for name in _class_dict(each) if type(name) is str}
    return sorted(name for name in names if not name.startswith("_"))


# -- sizes --------------------------------------------------------------------------------------

_HEAP_TYPE = 1 << 9
"""The flag of classes that were made while Python ran, as all that are written in Python are."""

_C_CLASSES = {id(cls): cls for cls in (collections.OrderedDict, collections.deque)}
"""Classes of C that some versions of Python make while they run."""


def sizer_of(cls: type) -> Callable[[Any], int]:
    """Return what measures instances of a class: the `__sizeof__` of the nearest base class that is written in C."""
    for each in _mro(cls):
        if id(each) in _C_CLASSES or not _flags(each) & _HEAP_TYPE:
            sizer = _class_dict(each).get("__sizeof__")
            if type(sizer) is MethodDescriptorType:
                return sizer
    return object.__sizeof__


def size_of(value: object) -> int:
    """Return the bytes of the object itself, without what it refers to."""
    return sizer_of(type(value))(value)


def nbytes_of(value: object) -> int | None:
    """Return the bytes of data of an array, a text or a number; None for anything else."""
    ndarray = array_class()
    if ndarray is not None and is_a(value, ndarray):
        nbytes: int = ndarray.nbytes.__get__(value)
        return nbytes
    if type(value) is memoryview:
        return value.nbytes
    return size_of(value) if is_a(value, *_TEXTS) else None


_TEXTS = (str, bytes, bytearray, int, float)


def array_class() -> Any:
    """Return `numpy.ndarray`; None where numpy is not imported."""
    return getattr(sys.modules.get("numpy"), "ndarray", None)


# -- torch --------------------------------------------------------------------------------------


def tensor_fact(tensor: torch.Tensor, name: str) -> Any:
    """Return an attribute that torch itself keeps of a tensor, such as "shape", whatever its class makes of the name.

    Call it inside of `torch_private.no_torch_function`, where a subclass's `__torch_function__` is not asked.
    """
    return getattr(torch.Tensor, name).__get__(tensor)


def user_dispatches(cls: type) -> bool:
    """Return whether a tensor's class has a `__torch_dispatch__` of its own, which torch may ask even for a shape."""
    for each in _mro(cls):
        if each is torch.Tensor:
            return False
        if "__torch_dispatch__" in _class_dict(each) and module_of(each).partition(".")[0] != "torch":
            return True
    return False


def parameters_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters of a module and of the modules in it, each once."""
    found: dict[int, torch.Tensor] = {}
    met: set[int] = set()
    stack: list[torch.nn.Module] = [module]
    while stack:
        each = stack.pop()
        if id(each) in met:
            continue
        met.add(id(each))
        fields = _fields(each)
        found.update((id(value), value) for value in _values(fields.get("_parameters")) if is_a(value, torch.Tensor))
        stack += [value for value in _values(fields.get("_modules")) if is_a(value, torch.nn.Module)]
    return list(found.values())


def _values(kept: object) -> list[Any]:
    return list(dict.values(kept)) if type(kept) is dict else []
