"""Classes whose every method says that it was called, and fails: nothing that only looks may call any of them."""

import threading

import torch

called = []
"""What was called, since the test began."""


def refuse(name):
    def method(*args, **kwargs):
        called.append((name, threading.current_thread().name))
        raise RuntimeError(f"{name} was called")

    return method


_NAMES = (
    *("__len__", "__repr__", "__str__", "__format__", "__eq__", "__ne__", "__lt__", "__hash__", "__bool__", "__iter__"),
    *(
        "__next__",
        "__contains__",
        "__dir__",
        "__getitem__",
        "__getattribute__",
        "__getattr__",
        "__sizeof__",
        "__call__",
    ),
    *("__reduce__", "__reduce_ex__", "__index__", "__int__", "__float__", "__bytes__", "__array__", "keys", "values"),
    *("items", "get", "parameters", "buffers", "modules", "children", "named_parameters", "mro", "__instancecheck__"),
    *("__subclasscheck__", "__torch_function__", "__array_interface__", "__array_function__", "__array_finalize__"),
)
_PROPERTIES = ("__class__", "nbytes", "shape", "dtype", "device", "grad", "grad_fn", "name", "base", "__traceback__")


def methods(*left_out):
    """The names that a hostile class defines, without some that Python needs to make it."""
    found = {name: refuse(name) for name in _NAMES if name not in left_out}
    found |= {name: property(refuse(name)) for name in _PROPERTIES if name not in left_out}
    return found


class Plain:
    """An object with two fields."""

    def __init__(self, one, two=None):
        object.__setattr__(self, "one", one)
        object.__setattr__(self, "two", two)


def make(base, *left_out, metaclass=type):
    """A hostile class that derives from ``base``."""
    return metaclass(f"Hostile{base.__name__}", (base,), {**methods(*left_out), "__module__": "__main__"})


class Meta(type):
    """The class of a class: what is asked of the class comes here."""

    def __getattribute__(cls, name):
        called.append((f"Meta.{name}", threading.current_thread().name))
        raise RuntimeError(f"Meta.{name} was called")

    __hash__ = __eq__ = __repr__ = __dir__ = __len__ = __instancecheck__ = __subclasscheck__ = refuse("Meta")


def every(tensor):
    """Hostile objects of all kinds; each that can holds the tensor."""
    hostile = make(Plain, "__init__")
    objects = [object.__new__(hostile), object.__new__(make(Plain, metaclass=Meta))]
    for each in objects:
        object.__setattr__(each, "one", tensor)
    for base in (list, tuple, set, frozenset):
        objects.append(base.__new__(make(base), [1, 2] if base in (tuple, frozenset) else ()))
    list.append(objects[2], tensor)
    mapping = dict.__new__(make(dict))
    dict.__setitem__(mapping, "tensor", tensor)
    objects.append(mapping)
    objects += [cls.__new__(make(cls), value) for cls, value in ((int, 7), (float, 0.5), (str, "text"), (bytes, b"1"))]
    objects.append(torch.Tensor._make_subclass(make(torch.Tensor), torch.ones(30)))
    module = torch.nn.Module.__new__(make(torch.nn.Module))
    torch.nn.Module.__dict__["__dict__"].__get__(module).update(
        _parameters={"weight": torch.nn.Parameter(torch.ones(70))}, _buffers={}, _modules={"inner": None}
    )
    objects.append(module)
    errors = make(Exception)
    objects.append(Exception.__new__(errors, "text"))
    return objects
