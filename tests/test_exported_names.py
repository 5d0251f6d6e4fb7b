"""The public names: they exist, say what they do, are annotated, and those of torch are torch's."""

import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed.rpc as torch_rpc

import nbdist.rpc

PUBLIC = ("nbdist", "nbdist.rpc", "nbdist.testing")

# torch.distributed.rpc's names that nbdist.rpc has, too; of the functions also the signatures.
TORCH_FUNCTIONS = ("rpc_sync", "rpc_async", "remote", "init_rpc", "shutdown", "get_worker_info")
TORCH_NAMES = (*TORCH_FUNCTIONS, "RRef", "WorkerInfo", "RpcBackendOptions", "TensorPipeRpcBackendOptions")


# --- the checkers ---------------------------------------------------------------------------------


def not_annotated(function: Callable[..., Any], *, bound: bool) -> list[str]:
    """The parameters without an annotation, and "return"; of a `bound` one the first does not count."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if bound else 0 :]
    missing = [p.name for p in parameters if p.annotation is inspect.Parameter.empty]
    if signature.return_annotation is inspect.Signature.empty:
        missing.append("return")
    return missing


def methods(cls: type) -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """The constructor and the public methods that `cls` itself defines: name, function, whether bound."""
    for name, value in vars(cls).items():
        if name.startswith("_") and name != "__init__":
            continue
        match value:
            case types.FunctionType():
                yield name, value, True
            case classmethod():
                yield name, value.__func__, True
            case staticmethod():
                yield name, value.__func__, False
            case property() if value.fget is not None:
                yield name, value.fget, True


def problems(module: types.ModuleType) -> list[str]:
    """What is wrong with the public names of `module`, one line each.

    Looked into are the functions and classes which are nbdist's own, not values and modules, and not what
    is passed on from elsewhere.
    """
    if not hasattr(module, "__all__"):
        return [f"{module.__name__} has no __all__"]
    found = []
    for name in module.__all__:
        full = f"{module.__name__}.{name}"
        if not hasattr(module, name):
            found.append(f"{full} is in __all__ and does not exist")
            continue
        value = getattr(module, name)
        is_class = inspect.isclass(value)
        if not (is_class or inspect.isroutine(value)):
            continue
        if str(value.__module__).split(".")[0] != module.__name__.split(".")[0]:
            continue
        if not (value.__doc__ or "").strip():
            found.append(f"{full} has no docstring")
        if is_class:
            for method, function, bound in methods(value):
                found += [f"{full}.{method}: no annotation: {p}" for p in not_annotated(function, bound=bound)]
        else:
            found += [f"{full}: no annotation: {p}" for p in not_annotated(value, bound=False)]
    return found


def differences(ours: Callable[..., Any], theirs: Callable[..., Any]) -> list[str]:
    """How `ours` cannot stand in for `theirs`: parameter names, order, kinds and defaults.

    `ours` may have more parameters, after all of theirs, that can be left out.
    """
    mine = list(inspect.signature(ours).parameters.values())
    wanted = list(inspect.signature(theirs).parameters.values())
    found = []
    for i, parameter in enumerate(wanted):
        if i >= len(mine):
            found.append(f"parameter {parameter.name} is missing")
        elif (mine[i].name, mine[i].kind) != (parameter.name, parameter.kind):
            found.append(f"parameter {i} is {mine[i]}, torch's is {parameter}")
        elif mine[i].default != parameter.default:
            found.append(f"default of {parameter.name} is {mine[i].default}, torch's is {parameter.default}")
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in mine[len(wanted) :]:
        if parameter.default is inspect.Parameter.empty and parameter.kind not in optional:
            found.append(f"parameter {parameter.name} is not torch's and cannot be left out")
    return found


# --- the package ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_exist_and_are_documented_and_annotated(name):
    found = problems(importlib.import_module(name))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_names_of_torch_are_there(name):
    assert hasattr(torch_rpc, name)
    assert name in nbdist.rpc.__all__
    assert hasattr(nbdist.rpc, name)


def test_async_execution_is_where_torch_has_it():
    assert callable(nbdist.rpc.functions.async_execution)
    assert not differences(nbdist.rpc.functions.async_execution, torch_rpc.functions.async_execution)


@pytest.mark.parametrize("name", TORCH_FUNCTIONS)
def test_signatures_are_torchs(name):
    theirs = getattr(torch_rpc, name)
    assert theirs.__module__.startswith("torch."), "torch's module has been replaced in this process"
    assert not differences(getattr(nbdist.rpc, name), theirs)


# --- the checkers themselves ----------------------------------------------------------------------


def module_of(source: str) -> types.ModuleType:
    """A module `nbdist.sample` with this source."""
    module = types.ModuleType("nbdist.sample")
    exec(source, vars(module))
    return module


def test_problems_are_found():
    module = module_of(
        """
__all__ = ["gone", "bare", "half", "Bare", "Half", "constant", "passed_on"]
from textwrap import dedent as passed_on
constant = 1
def bare(a: int) -> None: ...
def half(a, *b: int, c: int = 0):
    "Documented."
class Bare: ...
class Half:
    "Documented."
    def __init__(self, x) -> None: ...
    def method(self, y: int): ...
    @classmethod
    def made(cls, z) -> None: ...
    @staticmethod
    def fixed(w) -> None: ...
    @property
    def size(self): ...
    def _own(self, v): ...
"""
    )
    assert problems(module) == [
        "nbdist.sample.gone is in __all__ and does not exist",
        "nbdist.sample.bare has no docstring",
        "nbdist.sample.half: no annotation: a",
        "nbdist.sample.half: no annotation: return",
        "nbdist.sample.Bare has no docstring",
        "nbdist.sample.Half.__init__: no annotation: x",
        "nbdist.sample.Half.method: no annotation: return",
        "nbdist.sample.Half.made: no annotation: z",
        "nbdist.sample.Half.fixed: no annotation: w",
        "nbdist.sample.Half.size: no annotation: return",
    ]
    assert problems(module_of("")) == ["nbdist.sample has no __all__"]


def test_differences_are_found():
    def theirs(to, func, args=None, timeout=-1.0): ...

    def same(to, func, args=None, timeout=-1, *, device=None, **options): ...

    def short(to, func): ...

    def swapped(func, to, args=None, timeout=-1.0): ...

    def late(to, func, args=(), timeout=-1.0, *, device): ...

    assert differences(same, theirs) == []
    assert len(differences(short, theirs)) == 2
    assert len(differences(swapped, theirs)) == 2
    assert differences(late, theirs) == [
        "default of args is (), torch's is None",
        "parameter device is not torch's and cannot be left out",
    ]
