"""No module of nbdist uses a private name of another one: it asks by a public name.

Private are the names that begin with one underscore. A module may use the private names of its own classes, on an
object that it can be seen to have made or been given: see `Reading`. The private names of torch and other packages are
the matter of `test_torch_private`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import nbdist
from nbdist.torch_private import ATTRIBUTES

PACKAGE = Path(nbdist.__file__).parent

NAMEDTUPLE = {"_asdict", "_fields", "_make", "_replace"}
"""The public methods of `collections.namedtuple`, which begin with an underscore lest a field have their name."""

TORCHS = {
    "_delete_all_user_and_unforked_owner_rrefs",
    "_deserialize",
    "_get_current_rpc_agent",
    "_ignore_rref_leak",
    "_internal_rpc_pickler",
    "_is_current_rpc_agent_set",
    "_register_reducer",
    "_serialize",
    "_set_and_start_rpc_agent",
    "_wait_all",
}
"""Private names of torch's RPC that `nbdist.compat` has, too, because torch's programs use them."""


# --- the checker ----------------------------------------------------------------------------------


class Use(NamedTuple):
    """A use of a private name, such as ``rref._id``."""

    line: int
    expression: str
    name: str


def is_private(name: str) -> bool:
    """Whether a name is private; IPython's hooks, such as ``_repr_html_``, are not."""
    return name.startswith("_") and not name.endswith("_") and name not in NAMEDTUPLE


def own_names(node: ast.AST) -> set[str]:
    """The private names that this code defines: functions, classes, variables, attributes of `self`."""
    found = set()
    for each in ast.walk(node):
        match each:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return {name for name in found if is_private(name)}


class Reading:
    """The uses of private names in one module that are not of the module's own objects.

    Of its own are ``self``, ``cls``, ``super()``, a class of the module, and names that have such a class as their
    annotation or are assigned a call of it, ``cls(…)`` or ``copy.copy(self)``.
    """

    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        classes = [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]
        self.classes = {node.name: own_names(node) for node in classes}
        for node in classes:  # a class has the names of its base classes
            for base in node.bases:
                self.classes[node.name] |= self.classes.get(ast.unparse(base).partition("[")[0], set())
        imported = [alias for node in ast.walk(self.tree) if isinstance(node, ast.Import) for alias in node.names]
        self.others = {alias.asname or alias.name.partition(".")[0] for alias in imported} - {"nbdist"}
        """The modules of other packages."""
        self.uses = list(self._scan(self.tree, "", self._bindings(self.tree.body, "")))

    def _scan(self, node: ast.AST, cls: str, bound: dict[str, set[str]]) -> Iterator[Use]:
        """Yield the uses below a node in the class `cls`, where the names in `bound` have these private names."""
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.ClassDef(name=name):
                    yield from self._scan(child, name, bound)
                    continue
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield from self._scan(child, cls, bound | self._bindings([*ast.walk(child)], cls))
                    continue
                case ast.Attribute(value=value, attr=name) if is_private(name):
                    if not self._is_own(value, name, bound):
                        yield Use(child.lineno, ast.unparse(child), name)
                case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr")):
                    match child.args:
                        case [value, ast.Constant(value=str(name)), *_] if is_private(name):
                            if not self._is_own(value, name, bound):
                                yield Use(child.lineno, ast.unparse(child), name)
                case ast.ImportFrom(module=str(module)) if module.startswith("nbdist"):
                    for alias in child.names:
                        if is_private(alias.name):
                            yield Use(child.lineno, f"{module}.{alias.name}", alias.name)
            yield from self._scan(child, cls, bound)

    def _is_own(self, value: ast.expr, name: str, bound: dict[str, set[str]]) -> bool:
        """Whether the private `name` of `value` is the module's own, or that of a package which is not nbdist."""
        match value:
            case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
                return True
            case ast.Name(id=owner) if name in (bound | self.classes).get(owner, ()):
                return True
        return ast.unparse(value).partition(".")[0] in self.others

    def _bindings(self, nodes: list[ast.AST], cls: str) -> dict[str, set[str]]:
        """The names that these nodes of the class `cls` bind to objects of the module, with their private names."""
        found = {}
        for node in nodes:
            match node:
                case ast.arg(arg=name, annotation=ast.expr() as kind):
                    found[name] = self._of_annotation(kind)
                case ast.AnnAssign(target=ast.Name(id=name), annotation=kind):
                    found[name] = self._of_annotation(kind)
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                    match ast.unparse(call).partition("(")[0]:
                        case "cls" | "cls.__new__":
                            found[name] = self.classes.get(cls, set())
                        case "copy.copy" if ast.unparse(call) == "copy.copy(self)":
                            found[name] = self.classes.get(cls, set())
                        case made:
                            found[name] = self.classes.get(made, set())
        return {name: names for name, names in found.items() if names}

    def _of_annotation(self, kind: ast.expr) -> set[str]:
        """The private names of the module's classes in an annotation, such as ``RRef[Any] | None``."""
        return set().union(*(self.classes.get(word, set()) for word in re.findall(r"\w+", ast.unparse(kind))))


def foreign_uses(sources: dict[str, str]) -> list[str]:
    """The uses of private names across these modules, one line each."""
    own = set().union(*(own_names(ast.parse(source)) for source in sources.values())) - set(ATTRIBUTES)
    return [
        f"{path}:{use.line}: {use.expression}"
        for path, source in sources.items()
        for use in Reading(source).uses
        if use.name in own and not (path.startswith("compat/") and use.name in TORCHS)
    ]


# --- the package ----------------------------------------------------------------------------------


def test_no_module_uses_a_private_name_of_another():
    found = foreign_uses({str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))})
    assert not found, "give it a public name, or move the code into the class:\n" + "\n".join(found)


# --- the checker itself ---------------------------------------------------------------------------

THEIRS = """
class Theirs:
    def __init__(self):
        self._id = 1
    def _look(self): ...
def _function(): ...
"""

OWN = """
import copy
import os as system

class Own:
    def __init__(self, other: "Own | None"):
        self._id = other._id if other is not None else getattr(self, "_id")

    @classmethod
    def made(cls):
        found = cls(None)
        return found._id

    def copied(self):
        found = copy.copy(self)
        return found._id

class Derived(Own):
    def look(self):
        return super()._look()

def of(one: Derived, two: list[Own] | None = None):
    made = Own(one)
    known: Own = two[0]
    return one._id, made._id, known._id, Own._id, THE_ONE._id, system._exit, one._replace(), one._repr_html_()

THE_ONE: Own | None = None
"""


def uses_in(source: str) -> list[str]:
    """What is found in a module with this source beside one that has `Theirs`."""
    return [found.partition(": ")[2] for found in foreign_uses({"theirs.py": THEIRS, "own.py": source})]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(x):\n    return x._id", "x._id"),
        ("def f(x: Theirs):\n    x._look()", "x._look"),
        ("def f(x: Theirs):\n    return getattr(x, '_id', None)", "getattr(x, '_id', None)"),
        ("class Own:\n    def f(self):\n        return self.x._id", "self.x._id"),
        ("class Own:\n    _id = 0\n    def f(self, x):\n        return x._id", "x._id"),
        ("class Own:\n    _id = 0\ndef f(x: Own): ...\ndef g(x):\n    return x._id", "x._id"),
        ("from nbdist import theirs\ntheirs._function()", "theirs._function"),
        ("from nbdist.theirs import _function", "nbdist.theirs._function"),
    ],
)
def test_a_use_of_a_private_name_of_another_module_is_found(source, found):
    assert uses_in(source) == [found]


def test_uses_of_a_modules_own_private_names_are_not_found():
    assert uses_in(OWN) == []


def test_private_names_of_torchs_rpc_may_be_used_in_compat_alone():
    theirs = "def _set_and_start_rpc_agent(): ..."
    use = "from nbdist.compat.rpc.api import _set_and_start_rpc_agent"
    assert foreign_uses({"compat/rpc/api.py": theirs, "compat/rpc/__init__.py": use}) == []
    found = foreign_uses({"compat/rpc/api.py": theirs, "rpc/api.py": use})
    assert found == ["rpc/api.py:1: nbdist.compat.rpc.api._set_and_start_rpc_agent"]
