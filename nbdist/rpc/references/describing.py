"""Describes a value to the workers that refer to it: its type, shape and size, or the error in its place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from nbdist.rpc.failures import text_of_error
from nbdist.rpc.references import inert
from nbdist.torch_private import no_torch_function
from nbdist.wire.messages import State


def describe_error(error: BaseException) -> State:
    """Return the description of a value that could not be made, because of ``error``."""
    cls = type(error)
    return State(cls.__module__, cls.__qualname__, error=text_of_error(error))


def error_line(name: str, text: str) -> str:
    """Return an error as one line: ``name``, the name of its type, and the first line of its text, if there is one."""
    first = text.strip().partition("\n")[0]
    return f"{name}: {first}" if first else name


def describe_value(value: Any) -> State:
    """Return the description of ``value``: its class, and its bytes if it is a tensor, module, array, text or number.

    The description of a tensor also has its shape, dtype, device and autograd node. No code of the value's class runs,
    see `nbdist.rpc.references.inert`. For a class of ``__main__`` the description lists the public names, so that
    another process can complete them although it lacks the class.
    """
    cls = type(value)
    if cls is torch.Tensor or cls is torch.nn.Parameter:
        return _describe_tensor(value, getattr)
    if issubclass(cls, torch.Tensor):
        with no_torch_function():
            return _describe_tensor(value, inert.tensor_fact)
    module, qualname = inert.module_of(cls), inert.qualname_of(cls)
    nbytes = inert.nbytes_of(value)
    if issubclass(cls, torch.nn.Module):
        with no_torch_function():
            nbytes = sum(inert.tensor_fact(parameter, "nbytes") for parameter in inert.parameters_of(value))
    return State(module, qualname, nbytes=nbytes, names=inert.public_names(cls) if module == "__main__" else None)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def _describe_tensor(value: torch.Tensor, fact: Callable[[torch.Tensor, str], Any]) -> State:
    """Return the description of a tensor. ``fact(tensor, name)`` reads an attribute."""
    cls = type(value)
    module, qualname = inert.module_of(cls), inert.qualname_of(cls)
    if inert.user_dispatches(cls):  # to ask for its shape would run the user's code
        return State(module, qualname)
    try:
        function = fact(value, "grad_fn")
        return State(
            module,
            qualname,
            shape=list(fact(value, "shape")),
            dtype=dtype_name(fact(value, "dtype")),
            device="cpu" if fact(value, "is_cpu") else str(fact(value, "device")),
            requires_grad=fact(value, "requires_grad"),
            grad_fn=type(function).__name__ if function is not None else None,
            nbytes=fact(value, "nbytes") if fact(value, "layout") is torch.strided else None,
        )
    except RuntimeError:  # from a kind of tensor that has no shape, such as a nested one
        return State(module, qualname)
