"""Reads facts about an object without running any code of the object's class.

Views show values of users' classes. A user's `__len__`, `__repr__`, `__class__`, property, metaclass or
`__torch_function__` may be slow, may fail, may change the value, and may wait for the very worker that asks. So views
read only what Python and torch store themselves, through the descriptors of the base classes:

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

_module: Callable[[type], Any] = type.__dict__["__module__"].__get__
mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
"""Returns a class and its base classes, the nearest first."""
dict_of_class: Callable[[type], MappingProxyType[str, Any]] = type.__dict__["__dict__"].__get__
"""Returns the attributes that a class itself defines."""
qualname_of: Callable[[type], str] = type.__dict__["__qualname__"].__get__
"""Returns the qualified name that Python gave a class."""
_flags: Callable[[type], int] = type.__dict__["__flags__"].__get__
_fields: Callable[[torch.nn.Module], dict[str, Any]] = torch.nn.Module.__dict__["__dict__"].__get__


def is_a(value: object, *kinds: type) -> bool:
    """Return whether the type of a value is one of these classes or a subclass. Abstract base classes do not count."""
    return issubclass(type(value), kinds)


def module_of(cls: type) -> str:
    """Return the name of the module in which a class says it was defined; "" if that is not a str."""
    try:
        name = _module(cls)
    except AttributeError:
        return ""
    return name if type(name) is str else ""


def public_names(cls: type) -> list[str]:
    """Return the sorted names, without a leading underscore, that a class and its base classes define."""
    names = {name for each in mro(cls) for name in dict_of_class(each) if type(name) is str}
    return sorted(name for name in names if not name.startswith("_"))


# -- sizes --------------------------------------------------------------------------------------

_HEAP_TYPE = 1 << 9  # the flag of classes that are made while Python runs, as all classes written in Python are

# Written in C, but heap types in some versions of Python.
_C_CLASSES = {id(cls): cls for cls in (collections.OrderedDict, collections.deque)}


def sizer_of(cls: type) -> Callable[[Any], int]:
    """Return the function that measures instances of a class: the `__sizeof__` of its nearest base class in C."""
    for each in mro(cls):
        if id(each) in _C_CLASSES or not _flags(each) & _HEAP_TYPE:
            sizer = dict_of_class(each).get("__sizeof__")
            if type(sizer) is MethodDescriptorType:
                return sizer
    return object.__sizeof__


def size_of(value: object) -> int:
    """Return the bytes of the object itself, without the objects to which it refers."""
    return sizer_of(type(value))(value)


def nbytes_of(value: object) -> int | None:
    """Return the bytes of an array's or a memoryview's data, or of a whole text or number; None for other values."""
    ndarray = array_class()
    if ndarray is not None and is_a(value, ndarray):
        nbytes: int = ndarray.nbytes.__get__(value)
        return nbytes
    if type(value) is memoryview:
        return value.nbytes
    return size_of(value) if is_a(value, *_TEXTS) else None


_TEXTS = (str, bytes, bytearray, int, float)


def array_class() -> Any:
    """Return `numpy.ndarray`; None if numpy is not imported."""
    return getattr(sys.modules.get("numpy"), "ndarray", None)


# -- torch --------------------------------------------------------------------------------------


def tensor_fact(tensor: torch.Tensor, name: str) -> Any:
    """Return an attribute that torch itself stores for a tensor, such as "shape", whatever the tensor's class defines.

    Call this inside of `torch_private.no_torch_function`, so that a subclass's `__torch_function__` does not run.
    """
    return getattr(torch.Tensor, name).__get__(tensor)


def user_dispatches(cls: type) -> bool:
    """Return whether a tensor's class has a `__torch_dispatch__` of its own, which torch may call even for a shape."""
    for each in mro(cls):
        if each is torch.Tensor:
            return False
        if "__torch_dispatch__" in dict_of_class(each) and module_of(each).partition(".")[0] != "torch":
            return True
    return False


def parameters_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters of a module and of the modules in it, each parameter once."""
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
