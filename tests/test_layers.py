"""The imports of every module, held against the tables in nbdist/__init__.py.

`LAYERS` gives each module prefix, relative to nbdist, its layer: a module imports from its own layer
and from lower ones. `THIRD_PARTY` names the modules that may import a confined third-party package.
The longest prefix that fits decides. `nbdist` itself is layer 0, because every import of a
submodule runs it.
"""

import ast
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.suite.python_path import python_path

import nbdist
from nbdist import registry

# What `import nbdist.rpc` must not bring in.
NOTEBOOK_PACKAGES = ("IPython", "ipykernel", "jupyter_client", "ipywidgets", "ray")


# --- the checker ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """A module's source, under the name that it is imported by."""

    name: str
    path: str
    source: str
    is_package: bool = False


def modules_below(package: Path) -> list[Module]:
    """Every module of the package in the folder `package`."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        shown = path.relative_to(package.parent).as_posix()
        found.append(Module(name, shown, path.read_text(encoding="utf-8"), is_package))
    return found


def longest_prefix(name: str, prefixes: Mapping[str, object]) -> str | None:
    """The longest of the dotted `prefixes` that `name` is or lies under."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:n])) in prefixes:
            return prefix
    return None


def is_type_checking(test: ast.expr) -> bool:
    """Whether this is the condition of an `if TYPE_CHECKING:`."""
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below `node` that can run: all but the bodies of `if TYPE_CHECKING:`."""
    if isinstance(node, ast.If) and is_type_checking(node.test):
        children: Iterator[ast.AST] = iter(node.orelse)
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield child
        yield from running_nodes(child)


def absolute(module: Module, level: int, name: str) -> str:
    """The absolute name of a relative import ("" when it leads out of the top)."""
    if level == 0:
        return name
    base = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    base = base[: len(base) - (level - 1)] if level <= len(base) else []
    return ".".join([*base, name] if name else base) if base else ""


def imports(module: Module, known: set[str], *, for_types: bool = False) -> Iterator[tuple[int, str]]:
    """The line and the absolute name of every module that `module` imports when it runs.

    Of `from a import b` that is `a.b` where `a.b` is one of the `known` modules, and else `a`. With `for_types`, the
    imports in the bodies of `if TYPE_CHECKING:` are among them.
    """
    tree = ast.parse(module.source, module.path)
    for node in ast.walk(tree) if for_types else running_nodes(tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    yield node.lineno, alias.name
            case ast.ImportFrom():
                base = absolute(module, node.level, node.module or "")
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    yield node.lineno, full if full in known else base
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(target)), *_],
            ):
                dots = len(target) - len(target.lstrip("."))
                yield node.lineno, absolute(module, dots, target.lstrip("."))


def lines_of_functions(module: Module) -> set[int]:
    """The lines that run only when a function is called."""
    functions = [node for node in ast.walk(ast.parse(module.source)) if isinstance(node, ast.FunctionDef)]
    return {line for node in functions for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def violations(
    modules: list[Module],
    layers: Mapping[str, int],
    third_party: Mapping[str, tuple[str, ...]],
    package: str = "nbdist",
) -> list[str]:
    """What is wrong with the imports of `modules`, one line each, as "file:line: what"."""
    known = {module.name for module in modules} | {f"{package}.{prefix}" for prefix in layers}

    def inside(name: str) -> str:
        return name.removeprefix(package).removeprefix(".")

    def layer_of(name: str) -> int | None:
        prefix = longest_prefix(inside(name), layers)
        return layers[prefix] if prefix is not None else (0 if name == package else None)

    found = []
    for module in modules:
        own = layer_of(module.name)
        if own is None:
            found.append(f"{module.path}:1: {module.name} is in no layer: add it to LAYERS")
        facade = lines_of_functions(module) if module.name == package else set()
        for line, target in imports(module, known):
            if line in facade:
                continue  # the package's front door leads to every layer, but opens only when somebody knocks
            where = f"{module.path}:{line}:"
            top = target.split(".")[0]
            if not target:
                found.append(f"{where} a relative import that leads out of {package}")
            elif top == package:
                theirs = layer_of(target)
                if theirs is None:
                    found.append(f"{where} imports {target}, which is in no layer")
                elif own is not None and theirs > own:
                    found.append(f"{where} {module.name} (layer {own}) imports {target} (layer {theirs}), a higher one")
            elif top in third_party:
                places = third_party[top]
                if longest_prefix(inside(module.name), dict.fromkeys(places)) is None:
                    allowed = ", ".join(places)
                    found.append(f"{where} {module.name} imports {top}, which is confined to: {allowed}")
    return found


# --- the package ----------------------------------------------------------------------------------


def test_every_import_keeps_to_the_layers():
    modules = modules_below(Path(nbdist.__file__).parent)
    assert "nbdist" in {module.name for module in modules}
    found = violations(modules, nbdist.LAYERS, nbdist.THIRD_PARTY)
    assert not found, "\n" + "\n".join(found)


def test_the_registry_lists_what_lower_layers_use():
    """And nothing else: a row that nobody uses, or that leads down, goes."""
    modules = [module for module in modules_below(Path(nbdist.__file__).parent) if module.name != "nbdist.registry"]
    layer_of = {
        module.name: nbdist.LAYERS.get(module.name.partition(".")[2].partition(".")[0], 0) for module in modules
    }
    used = set()
    for module in modules:
        for node in ast.walk(ast.parse(module.source)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "registry":
                used.add(node.attr)
                assert layer_of[registry.MODULES[node.attr]] > layer_of[module.name], f"{module.name}: {node.attr}"
                assert getattr(registry, node.attr).__name__ == node.attr
    assert used == registry.MODULES.keys()
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        registry.Nothing  # noqa: B018


def imports_within(folder: str) -> dict[str, set[str]]:
    """What each module of a folder of the package imports of the same folder, at any depth.

    Imports in functions, imports for annotations and imports by string are among them.
    """
    modules = {module.name: module for module in modules_below(Path(nbdist.__file__).parent)}
    inside = {name for name in modules if name.startswith(f"nbdist.{folder}.")}
    found = {}
    for name in inside:
        targets = {target for _, target in imports(modules[name], inside, for_types=True)}
        found[name] = targets & inside - {name}
    return found


def listed(folder: str) -> list[str]:
    """The rooms of a package or the modules of a room, from the lowest, as the package's own tables list them."""
    if folder in nbdist.ROOMS:
        return nbdist.ROOMS[folder].split()
    head = importlib.import_module(f"nbdist.{folder}").__doc__ or ""
    return re.findall(r"^`(\w+)`", head, re.MULTILINE)


def children(folder: str) -> list[str]:
    """What lies directly in a folder: modules, and folders of modules."""
    path = Path(nbdist.__file__).parent / folder.replace(".", "/")
    modules = [each.stem for each in path.glob("*.py") if each.stem != "__init__"]
    return sorted(modules + [each.parent.name for each in path.glob("*/__init__.py")])


def wrong_rows(folder: str, rows: list[str], there: list[str]) -> list[str]:
    """Where the list of a folder's modules differs from those that are there, as "where: what to do"."""
    if folder in nbdist.ROOMS:
        where, row = f"nbdist/__init__.py, ROOMS[{folder!r}]", "the word {}"
    else:
        where, row = f"nbdist/{folder.replace('.', '/')}/__init__.py, its docstring", "the line: `{}`  WHAT IT HOLDS"
    added = [
        f"{where}: add {row.format(name)}, after the modules that it imports" for name in there if name not in rows
    ]
    return added + [f"{where}: remove {row.format(name)}" for name in (Counter(rows) - Counter(there)).elements()]


def upward(order: list[str], folder: str, imported: Mapping[str, set[str]]) -> list[str]:
    """The imports by which a child of a folder reaches a later one, as "a imports b"."""

    def place(name: str) -> int:
        return order.index(name.removeprefix(f"nbdist.{folder}.").partition(".")[0])

    return [
        f"{name} imports {target}"
        for name, targets in sorted(imported.items())
        for target in sorted(targets)
        if place(target) > place(name)
    ]


FOLDERS = sorted(
    ".".join(path.parent.relative_to(Path(nbdist.__file__).parent).parts)
    for path in Path(nbdist.__file__).parent.glob("*/**/__init__.py")
)


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if len(children(folder)) > 1])
def test_doors_open_one_way(folder):
    """Imports for annotations count."""
    order = listed(folder)
    found = wrong_rows(folder, order, children(folder)) or upward(order, folder, imports_within(folder))
    assert not found, "\n" + "\n".join(found)


def test_a_module_without_a_row_is_found():
    head = "nbdist/rpc/calls/__init__.py, its docstring: "
    assert wrong_rows("rpc.calls", ["a", "b", "b"], ["a", "b", "c"]) == [
        f"{head}add the line: `c`  WHAT IT HOLDS, after the modules that it imports",
        f"{head}remove the line: `b`  WHAT IT HOLDS",
    ]
    assert wrong_rows("rpc", [], ["a"]) == [
        "nbdist/__init__.py, ROOMS['rpc']: add the word a, after the modules that it imports"
    ]


def test_a_door_that_opens_the_other_way_is_found():
    imported = {"nbdist.rpc.calls.sender": {"nbdist.rpc.core.pending", "nbdist.rpc.agent"}, "nbdist.rpc.agent": set()}
    found = upward(["core", "calls", "agent"], "rpc", imported)
    assert found == ["nbdist.rpc.calls.sender imports nbdist.rpc.agent"]


def test_the_parts_of_an_agent_do_not_know_it():
    """Each part is given what it needs; only what stands above an agent, or is one, may import its class."""
    above = {"nbdist.rpc.api", "nbdist.rpc.asking", "nbdist.rpc.hosted", "nbdist.rpc.start"}
    know_it = {name for name, targets in imports_within("rpc").items() if "nbdist.rpc.agent" in targets}
    assert know_it == above


def large_protocols() -> set[str]:
    """The names of the Protocols in rpc/ that ask for more than five methods, inherited ones included."""
    found = set()
    for module in modules_below(Path(nbdist.__file__).parent):
        if not module.name.startswith("nbdist.rpc."):
            continue
        for name, kind in vars(importlib.import_module(module.name)).items():
            if getattr(kind, "_is_protocol", False) and kind.__module__ == module.name:
                asked = {method for each in kind.__mro__ if each is not object for method in vars(each)}
                asked = {method for method in asked if callable(getattr(kind, method)) and method[0] != "_"}
                found |= {name} if len(asked) > 5 else set()
    return found


def test_the_parts_of_an_agent_ask_little_of_each_other():
    """Only what makes and joins all parts may know a Protocol of more than five methods."""
    assert large_protocols() == {"CallRecorder"}
    for module in modules_below(Path(nbdist.__file__).parent):
        for node in ast.walk(ast.parse(module.source)):
            if isinstance(node, ast.ImportFrom) and node.module == "nbdist.rpc.recording":
                names = {alias.name for alias in node.names}
                assert "CallRecorder" not in names or module.name == "nbdist.rpc.agent", module.name


def loaded_by(statement: str, path: Path) -> set[str]:
    """Which of NOTEBOOK_PACKAGES a fresh process has loaded after `statement`.

    The process finds an empty package under each of those names in `path`, so that the answer does not
    depend on what happens to be installed.
    """
    for name in NOTEBOOK_PACKAGES:
        (path / name).mkdir()
        (path / name / "__init__.py").touch()
    code = f"import sys\n{statement}\nprint(*sorted(set(sys.modules) & set({NOTEBOOK_PACKAGES!r})))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, **python_path(path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_rpc_pulls_in_no_notebook_package(tmp_path):
    assert loaded_by("import nbdist.rpc", tmp_path) == set()


def test_a_notebook_package_that_is_pulled_in_is_seen(tmp_path):
    assert loaded_by("import ray, IPython", tmp_path) == {"IPython", "ray"}


# --- the checker itself ---------------------------------------------------------------------------

LAYERS = {"errors": 0, "wire": 1, "channel": 2, "rpc": 3, "cluster": 5, "views": 6, "testing": 8}
THIRD_PARTY = {"zmq": ("channel",), "IPython": ("cluster", "magics"), "ipywidgets": ("views.widgets",)}


def check(name: str, source: str, *, is_package: bool = False) -> list[str]:
    """The violations of one module with this source, beside two others that it may import."""
    others = [Module("nbdist.rpc.agent", "nbdist/rpc/agent.py", ""), Module("nbdist.errors", "errors.py", "")]
    return violations([Module(name, "m.py", source, is_package), *others], LAYERS, THIRD_PARTY)


@pytest.mark.parametrize(
    "source",
    [
        "import nbdist.rpc",
        "import os, nbdist.rpc.agent as a",
        "from nbdist import rpc",
        "from nbdist.rpc import agent",
        "from nbdist.rpc.agent import Agent",
        "from .. import rpc",
        "from ..rpc import agent",
        "from ..rpc.agent import *",
        "from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n    import nbdist.rpc",
        "import typing\nif typing.TYPE_CHECKING:\n    pass\nelse:\n    import nbdist.rpc",
        "def f():\n    class C:\n        def g(self):\n            import nbdist.rpc",
        "import importlib\nimportlib.import_module('nbdist.rpc')",
        "__import__('nbdist.rpc')",
    ],
)
def test_an_import_of_a_higher_layer_is_found(source):
    (found,) = check("nbdist.wire.codec", source)
    assert found.startswith(f"m.py:{len(source.splitlines())}: nbdist.wire.codec (layer 1) imports nbdist.rpc")
    assert found.endswith("(layer 3), a higher one")


@pytest.mark.parametrize(
    "source",
    [
        "import os, struct, torch, collections.abc",
        "from nbdist import errors\nfrom nbdist.errors import WorkerLost\nfrom nbdist import WorkerLost",
        "from . import messages\nfrom .frames import Frame\nfrom .. import errors\nfrom ..errors import X",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nbdist.rpc import RRef",
        "import typing\nif typing.TYPE_CHECKING:\n    if 1:\n        import nbdist.rpc\nelse:\n    import os",
        "'import nbdist.rpc'  # import nbdist.rpc",
    ],
)
def test_what_is_allowed_is_not_found(source):
    assert check("nbdist.wire.codec", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import nbdist.wire.rooms.codec",
        "from nbdist.wire.rooms import codec",
        "from nbdist.wire.rooms.codec import X",
        "from .rooms import codec",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nbdist.wire.rooms.codec import X",
        "def f():\n    from nbdist.wire.rooms import codec",
        "import importlib\nimportlib.import_module('nbdist.wire.rooms.codec')",
    ],
)
def test_every_kind_of_import_counts_in_a_circle(source):
    found = imports(Module("nbdist.wire.peer", "m.py", source), {"nbdist.wire.rooms.codec"}, for_types=True)
    assert "nbdist.wire.rooms.codec" in {target for _, target in found}


def test_relative_imports_of_a_package_count_from_the_package_itself():
    assert check("nbdist.wire", "from . import codec\nfrom .codec import X", is_package=True) == []
    (found,) = check("nbdist.wire", "from ..rpc import X", is_package=True)
    assert "nbdist.rpc (layer 3)" in found


def test_a_relative_import_that_leads_out_is_found():
    assert check("nbdist.errors", "from ... import x") == ["m.py:1: a relative import that leads out of nbdist"]


def test_the_package_itself_is_layer_0():
    assert check("nbdist", "from .errors import X\nfrom . import errors", is_package=True) == []
    (found,) = check("nbdist", "from . import rpc", is_package=True)
    assert found == "m.py:1: nbdist (layer 0) imports nbdist.rpc (layer 3), a higher one"


def test_the_front_door_may_lead_anywhere_when_it_is_asked():
    asked = Module("nbdist", "nbdist/__init__.py", "def __getattr__(name):\n    from nbdist.magics import load\n")
    always = Module("nbdist", "nbdist/__init__.py", "from nbdist.magics import load\n")
    inside = Module("nbdist.rpc.api", "nbdist/rpc/api.py", "def f():\n    from nbdist.magics import load\n")
    layers = {"rpc": 3, "magics": 7}
    assert violations([asked], layers, {}) == []
    assert len(violations([always], layers, {})) == 1
    assert len(violations([inside], layers, {})) == 1


def test_a_module_in_no_layer_is_found():
    assert check("nbdist.wires.codec", "") == ["m.py:1: nbdist.wires.codec is in no layer: add it to LAYERS"]
    assert check("nbdist.rpc.x", "import nbdist.wires") == ["m.py:1: imports nbdist.wires, which is in no layer"]


def test_tools_import_anything_and_nobody_imports_them():
    assert check("nbdist.testing.clock", "import nbdist.views, nbdist.errors") == []
    (found,) = check("nbdist.views.workers.panel", "import nbdist.testing")
    assert "nbdist.testing (layer 8)" in found


def test_a_confined_package_outside_its_place_is_found():
    assert check("nbdist.channel.zeromq", "import zmq\nfrom zmq.utils import z85") == []
    assert check("nbdist.rpc.x", "import os\nfrom zmq.utils import z85") == [
        "m.py:2: nbdist.rpc.x imports zmq, which is confined to: channel"
    ]
    assert check("nbdist.views.widgets", "import ipywidgets") == []
    assert check("nbdist.views.snapshot", "def f():\n    import ipywidgets") == [
        "m.py:2: nbdist.views.snapshot imports ipywidgets, which is confined to: views.widgets"
    ]
    assert len(check("nbdist", "import zmq", is_package=True)) == 1


def test_modules_are_read_from_a_folder(tmp_path):
    package = tmp_path / "nbdist"
    (package / "wire").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "wire" / "__init__.py").write_text("from .codec import X\n")
    (package / "wire" / "codec.py").write_text("import os\n\nfrom nbdist.rpc import call\n")
    found = modules_below(package)
    assert [(m.name, m.is_package) for m in found] == [
        ("nbdist", True),
        ("nbdist.wire", True),
        ("nbdist.wire.codec", False),
    ]
    assert violations(found, LAYERS, THIRD_PARTY) == [
        "nbdist/wire/codec.py:3: nbdist.wire.codec (layer 1) imports nbdist.rpc (layer 3), a higher one"
    ]


def test_no_public_class_name_is_used_twice():
    """One word has one meaning. The classes of compat have the names that torch and ipyparallel gave them."""
    places: dict[str, list[str]] = {}
    package = Path(nbdist.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if "compat" not in path.relative_to(package).parts:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(path.relative_to(package)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
