"""The public names: they exist, say what they do, are annotated, have examples, and those of torch are torch's."""

import ast
import importlib
import inspect
import re
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.autograd
import torch.distributed.rpc

from nbdist.magics.dist_magics import DistMagics
from nbdist.testing import Faults

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own use of torch.jit
    import torch.distributed.nn
    import torch.distributed.optim

ROOT = Path(__file__).parent.parent
PUBLIC = (
    *("nbdist", "nbdist.rpc", "nbdist.autograd", "nbdist.optim", "nbdist.nn", "nbdist.swarm", "nbdist.testing"),
    *("nbdist.trace", "nbdist.compat"),
)
"""The modules that docs/api/index.md lists."""

TORCHS = {
    "nbdist.rpc": torch.distributed.rpc,
    "nbdist.rpc.functions": torch.distributed.rpc.functions,
    "nbdist.autograd": torch.distributed.autograd,
    "nbdist.optim": torch.distributed.optim,
    "nbdist.nn": torch.distributed.nn,
}
"""torch's modules of the same names."""

SHARED = {
    "nbdist.rpc": {
        *("BackendType", "RRef", "RpcBackendOptions", "TensorPipeRpcBackendOptions", "WorkerInfo", "functions"),
        *("get_worker_info", "init_rpc", "is_available", "remote", "rpc_async", "rpc_sync", "shutdown"),
    },
    "nbdist.rpc.functions": {"async_execution"},
    "nbdist.autograd": {"backward", "context", "get_gradients"},
    "nbdist.optim": {"DistributedOptimizer"},
    "nbdist.nn": {"RemoteModule"},
}
"""The public names that torch has, too."""

OTHERWISE = {
    "RpcBackendOptions.__init__": "torch's class has no options but two; nbdist has one class of options, which is "
    "torch's TensorPipeRpcBackendOptions, and there all are given by name"
}
"""The signatures that differ from torch's on purpose, with the reason."""


# --- the checkers ---------------------------------------------------------------------------------


def not_annotated(function: Callable[..., Any], *, bound: bool) -> list[str]:
    """The parameters without an annotation, and "return"; of a `bound` one the first does not count."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if bound else 0 :]
    missing = [p.name for p in parameters if p.annotation is inspect.Parameter.empty]
    if signature.return_annotation is inspect.Signature.empty:
        missing.append("return")
    return missing


def not_described(function: Callable[..., Any], text: str, *, bound: bool = False) -> list[str]:
    """The parameters that `text` has neither in a section ``Args:`` nor in double backticks.

    Ruff sees to it that a section has all of them. Names that begin with an underscore need no words. Nor does any if
    the text says whose the arguments are, or what makes the object.
    """
    if re.search(r"^ *Args:$|[Aa]rguments[^.]* those of `|`[\w.]+` makes one|Make one with `", text, re.MULTILINE):
        return []
    parameters = list(inspect.signature(function).parameters)[1 if bound else 0 :]
    return [name for name in parameters if name[0] != "_" and not re.search(rf"``[^`\n]*\b{name}\b", text)]


def described_fields(cls: type) -> str:
    """The fields of a class that have a docstring of their own, in double backticks."""
    (node,) = ast.parse(inspect.getsource(cls)).body
    found = []
    for field, text in zip(node.body, node.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str())):
                found.append(f"``{name}``")
    return " ".join(found)


def has_example(name: str, text: str) -> bool:
    """Whether a docstring has an example of `name`, or says which page, notebook or public name has one."""
    files = re.findall(r"(?:docs|examples|notebooks)/[\w/]+\.\w+|README\.md", text)
    if ">>> " in text or re.search(r"`\w+` has an example", text):
        return True
    return any(name in (ROOT / file).read_text() for file in files)


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


def problems_of_function(full: str, function: Callable[..., Any], text: str, *, bound: bool) -> list[str]:
    """What is wrong with a function that has the docstring `text`, one line each."""
    found = [] if text.strip() else [f"{full} has no docstring"]
    found += [f"{full}: no annotation: {name}" for name in not_annotated(function, bound=bound)]
    return found + [f"{full} does not describe {name}" for name in not_described(function, text, bound=bound) if text]


def problems_of_class(full: str, cls: type) -> list[str]:
    """What is wrong with a class and its public methods, one line each."""
    text = inspect.cleandoc(cls.__doc__ or "")
    found = [] if text else [f"{full} has no docstring"]
    if is_record := hasattr(cls, "__dataclass_fields__") or hasattr(cls, "_fields"):
        found += [f"{full} does not describe {name}" for name in not_described(cls, text + described_fields(cls))]
    for name, function, bound in methods(cls):
        said = inspect.cleandoc(function.__doc__ or "")
        if name == "__init__":
            said = f"{text}\n{said}".strip()
        if not (is_record and name == "__init__"):
            found += problems_of_function(f"{full}.{name}", function, said, bound=bound)
    return found


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
        if is_class:
            found += problems_of_class(full, value)
        else:
            found += problems_of_function(full, value, inspect.cleandoc(value.__doc__ or ""), bound=False)
        if value.__doc__ and not has_example(name, value.__doc__):
            found.append(f"{full} has no example")
    return found


def problems_of_magic(name: str, magic: Callable[..., Any], text: str) -> list[str]:
    """What is wrong with a magic, such as ``%sync``, one line each. Its docstring `text` must show how it is called."""
    found = [] if text else [f"{name} has no docstring"]
    found += [f"{name}: no annotation: {each}" for each in not_annotated(magic, bound=True)]
    if text and not re.search(rf"^Example:\n(?:.*\n)*? +{re.escape(name)}(?:$|[ \[])", text, re.MULTILINE):
        found.append(f"{name} has no example")
    return found


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function of torch, which for those in C++ is the first line of its docstring."""
    match = re.match(r"\s*\w+(\(.*\)) -> ", function.__doc__ or "")
    if match is None:
        return inspect.signature(function)
    (node,) = ast.parse(f"def function{match[1]}: ...").body
    for each in node.args.args:
        each.annotation = None
    found: dict[str, Any] = {}
    exec(ast.unparse(node), found)
    return inspect.signature(found["function"])


def differences(ours: inspect.Signature, theirs: inspect.Signature) -> list[str]:
    """How `ours` cannot stand in for `theirs`: parameter names, order, kinds and defaults.

    `ours` may have more parameters, after all of theirs, that can be left out, and a default where torch has none.
    Parameters of torch's that begin with an underscore do not count.
    """
    mine = list(ours.parameters.values())
    wanted = [parameter for parameter in theirs.parameters.values() if not parameter.name.startswith("_")]
    found = []
    for i, parameter in enumerate(wanted):
        if i < len(mine) and mine[i].kind is inspect.Parameter.VAR_POSITIONAL:
            break  # it takes all others
        if i >= len(mine):
            found.append(f"parameter {parameter.name} is missing")
        elif (mine[i].name, mine[i].kind) != (parameter.name, parameter.kind):
            found.append(f"parameter {i} is {mine[i]}, torch's is {parameter}")
        elif parameter.default not in (mine[i].default, inspect.Parameter.empty):
            found.append(f"default of {parameter.name} is {mine[i].default}, torch's is {parameter.default}")
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in mine[len(wanted) :]:
        if parameter.default is inspect.Parameter.empty and parameter.kind not in optional:
            found.append(f"parameter {parameter.name} is not torch's and cannot be left out")
    return found


def functions_of(theirs: Any) -> dict[str, Callable[..., Any]]:
    """A function of torch under the name ""; of a class, the public methods that torch's own classes define."""
    if not inspect.isclass(theirs):
        return {"": theirs}
    found: dict[str, Callable[..., Any]] = {}
    for cls in reversed(theirs.__mro__):
        if cls.__module__.startswith("torch.") and cls is not torch.nn.Module:
            found |= {
                name: getattr(theirs, name)
                for name, value in vars(cls).items()
                if (name == "__init__" or name[0] != "_") and callable(value)
            }
    return found


# --- the package ----------------------------------------------------------------------------------

MAGICS = {
    f"{sign}{name}": (function := getattr(DistMagics, method), inspect.getdoc(function) or "")
    for kind, sign in (("line", "%"), ("cell", "%%"))
    for name, method in DistMagics.magics[kind].items()
}
"""The magics, each with its docstring as it was written: for a shell, that of ``%dist`` becomes the list of all."""


def test_the_modules_looked_into_are_those_of_the_api_pages():
    listed = re.findall(r"^\| \[`([\w.]+)`\]", (ROOT / "docs/api/index.md").read_text(), re.MULTILINE)
    assert tuple(listed) == PUBLIC


@pytest.mark.parametrize("name", [*PUBLIC, "nbdist.rpc.functions"])
def test_public_names_exist_and_are_documented_and_annotated(name):
    found = problems(importlib.import_module(name))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("name", MAGICS)
def test_magics_are_documented_and_annotated(name):
    found = problems_of_magic(name, *MAGICS[name])
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("name", SHARED)
def test_names_of_torch_are_there(name):
    ours, theirs = importlib.import_module(name), TORCHS[name]
    assert {each for each in ours.__all__ if hasattr(theirs, each)} == SHARED[name]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (module, name)
        for module in SHARED
        for name in sorted(SHARED[module])
        if name not in {"BackendType", "functions"}
    ],
)
def test_signatures_are_torchs(module, name):
    ours, theirs = getattr(importlib.import_module(module), name), getattr(TORCHS[module], name)
    if name == "RRef":
        theirs = torch.distributed.rpc.PyRRef  # the methods of torch's RRef are made from its methods
    assert theirs.__module__.startswith("torch."), "torch's module has been replaced in this process"
    found = []
    for method, function in functions_of(theirs).items():
        full = f"{name}.{method}".rstrip(".")
        if full not in OTHERWISE:
            mine = inspect.signature(getattr(ours, method) if method else ours)
            found += [f"{full}: {each}" for each in differences(mine, signature_of(function))]
    assert not found, "\n" + "\n".join(found)


# --- the checkers themselves ----------------------------------------------------------------------


def module_of(source: str) -> types.ModuleType:
    """A module `nbdist.sample` with this source."""
    module = types.ModuleType("nbdist.sample")
    exec(source, vars(module))
    return module


def test_problems_are_found():
    module = module_of(
        """
__all__ = ["gone", "bare", "half", "whole", "Bare", "Half", "constant", "passed_on"]
from textwrap import dedent as passed_on
constant = 1
def bare(a: int) -> None: ...
def half(a, *b: int, c: int = 0):
    "Documented: ``a`` and ``*b``."
def whole(a: int) -> None:
    '''Documented.

    Args:
        a: a number.

    Example:
        >>> whole(1)
    '''
class Bare: ...
class Half:
    "Documented, as in README.md."
    def __init__(self, x) -> None: ...
    def method(self, y: int):
        "Take ``y``."
    @classmethod
    def made(cls, z) -> None:
        "Do what `method` does; the arguments are those of `method`."
    @staticmethod
    def fixed(w) -> None:
        "Take `w`."
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
        "nbdist.sample.half does not describe c",
        "nbdist.sample.half has no example",
        "nbdist.sample.Bare has no docstring",
        "nbdist.sample.Half.__init__: no annotation: x",
        "nbdist.sample.Half.__init__ does not describe x",
        "nbdist.sample.Half.method: no annotation: return",
        "nbdist.sample.Half.made: no annotation: z",
        "nbdist.sample.Half.fixed: no annotation: w",
        "nbdist.sample.Half.fixed does not describe w",
        "nbdist.sample.Half.size has no docstring",
        "nbdist.sample.Half.size: no annotation: return",
        "nbdist.sample.Half has no example",
    ]
    assert problems(module_of("")) == ["nbdist.sample has no __all__"]


def test_fields_with_their_own_docstrings_are_described():
    assert described_fields(Faults).split()[:2] == ["``fail``", "``drop``"]


def test_a_magic_must_show_how_it_is_called():
    def bare(self, line: str) -> None: ...

    def without(self, line: str) -> None:
        """Do something.

        %some [NAME]
        """

    def half(self, line) -> None:
        """Do something.

        Example:
            %some one
        """

    assert problems_of_magic("%some", bare, "") == ["%some has no docstring"]
    assert problems_of_magic("%some", without, inspect.getdoc(without)) == ["%some has no example"]
    assert problems_of_magic("%some", half, inspect.getdoc(half)) == ["%some: no annotation: line"]
    assert problems_of_magic("%%some", half, inspect.getdoc(half))[1:] == ["%%some has no example"]


def test_signatures_of_torchs_functions_in_c_are_read():
    def own(context_id, roots, retain_graph=False): ...

    read = signature_of(torch.distributed.autograd.backward)
    assert [(p.name, p.kind, p.default) for p in read.parameters.values()] == [
        (p.name, p.kind, p.default) for p in inspect.signature(own).parameters.values()
    ]


def test_differences_are_found():
    def theirs(to, func, args=None, timeout=-1.0, _hidden=None): ...

    def same(to, func, args=None, timeout=-1, *, device=None, **options): ...

    def generous(to=None, func=None, args=None, timeout=-1): ...

    def all_of_them(to, *args, **kwargs): ...

    def short(to, func): ...

    def swapped(func, to, args=None, timeout=-1.0): ...

    def late(to, func, args=(), timeout=-1.0, *, device): ...

    def found(ours):
        return differences(inspect.signature(ours), inspect.signature(theirs))

    assert found(same) == found(generous) == found(all_of_them) == []
    assert len(found(short)) == 2
    assert len(found(swapped)) == 2
    assert found(late) == [
        "default of args is (), torch's is None",
        "parameter device is not torch's and cannot be left out",
    ]
