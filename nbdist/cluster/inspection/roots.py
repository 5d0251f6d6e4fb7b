"""Finds the objects that the user of this process knows: variables, results of cells, errors, remote references."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from nbdist.cluster.inspection import pins
from nbdist.cluster.inspection.pins import Pin, Roots
from nbdist.cluster.worker.debugger import DEBUGGER
from nbdist.code_places import is_users
from nbdist.rpc.agent import Agent
from nbdist.rpc.references import inert
from nbdist.rpc.references.rref import RRef

_IN_TRACEBACK = Pin("traceback", "a traceback")
"""The pin of objects that the shell's traceback formatter keeps."""
_IN_OWNED_VALUE = Pin("other", "a value that lives there")
"""The pin of objects inside a value that this agent owns."""
LAST_RESULT = Pin("out", "the last result")
"""The pin of objects that the shell's record of its last cell keeps."""
_SHELL = Pin("other", "the shell")
"""The pin of objects that the shell keeps in other ways."""


def shell() -> Any:
    """Return the IPython shell of this process; None if IPython is not loaded or runs no shell."""
    interactive = sys.modules.get("IPython")
    return interactive.get_ipython() if interactive is not None else None


def results(of: Any) -> list[Any]:
    """Return the records that a shell keeps of the last cells: `ExecutionResult` objects, with values and errors."""
    if of is None:
        return []
    # Among all objects, as IPython keeps them in several private places.
    kind = getattr(sys.modules.get("IPython.core.interactiveshell"), "ExecutionResult", None)
    return [each for each in gc.get_objects() if type(each) is kind]


def references(agent: Agent) -> list[RRef[Any]]:
    """Return the references of an agent that exist in this process and have not been released."""
    # Among all objects, so that no list of them has to be kept.
    return [each for each in gc.get_objects() if type(each) is RRef and each.is_held_for(agent.references)]


def roots_of(agent: Agent) -> Roots:
    """Return the places where this process keeps objects that its user knows: namespaces, `Out`, the last errors."""
    of = shell()
    finished = results(of)
    errors = [getattr(sys, "last_value", None), getattr(sys, "last_exc", None)]
    errors.append(DEBUGGER.last_error)
    errors += [error for result in finished for error in (result.error_in_exec, result.error_before_exec)]
    named = {id(promise): _IN_OWNED_VALUE for _, promise, _ in agent.owned()}
    if of is None:
        return Roots([vars(sys.modules["__main__"])], named=named, tracebacks=pins.frames_of(errors))
    named |= {id(of.InteractiveTB): _IN_TRACEBACK, id(vars(of.InteractiveTB)): _IN_TRACEBACK}
    named |= {id(of): _SHELL, id(vars(of)): _SHELL}
    for result in finished:
        named |= {id(result): LAST_RESULT, id(vars(result)): LAST_RESULT}
    # The result of a cell has a name in each of these.
    variables = [of.user_ns, of.user_ns_hidden, vars(of.displayhook)]
    return Roots(variables, of.user_ns.get("_oh", {}), named, pins.frames_of(errors))


def names_by_value(roots: Roots) -> dict[int, set[str]]:
    """Return the names of the user's variables by the ``id`` of their values, without numbers and texts."""
    found: dict[int, set[str]] = {}
    for namespace in roots.variables:
        for name, value in list(dict.items(namespace)):
            # Equal numbers and texts may be one object by chance.
            if type(name) is str and value is not None and not inert.is_a(value, int, float, str, bytes):
                found.setdefault(id(value), set()).add(name)
    return found


class NamedValue(NamedTuple):
    """A value, with all names by which the user knows it."""

    names: list[str]
    kind: str
    """The kind of the names, as in `Pin`: ``variable``, ``out`` or ``traceback``."""
    value: Any


def named_values(roots: Roots) -> list[NamedValue]:
    """Return the values of the user's variables and modules, and those of cells and tracebacks, each once."""
    found: dict[int, NamedValue] = {}
    for name, value in _variables(roots):
        if inert.is_a(value, int, float, str, bytes) or value is None:
            # Variables with equal values may share one object by chance: keep them apart.
            found[id(name)] = NamedValue([name], "variable", value)
        else:
            found.setdefault(id(value), NamedValue([], "variable", value)).names.append(name)
    for number, value in list(dict.items(roots.out)):
        found.setdefault(id(value), NamedValue([f"Out[{number}]"], "out", value))
    held = [each for frame in roots.tracebacks.values() for each in gc.get_referents(frame)]
    return [*found.values(), *([NamedValue(["a traceback"], "traceback", held)] if held else [])]


def _variables(roots: Roots) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each variable of the user's, in the namespace and in the user's own modules."""
    of = shell()
    hidden = of.user_ns_hidden if of is not None else {}
    for name, value in list(dict.items(roots.variables[0])):
        if type(name) is str and pins.variable(name).kind == "variable" and not _is_own(name, value, hidden):
            yield name, value
    for module in list(sys.modules.values()):
        namespace = pins.namespace_of(module)
        file = namespace.get("__file__")
        if namespace is not roots.variables[0] and type(file) is str and is_users(file):
            for name, value in list(namespace.items()):
                if type(name) is str and name[:2] != "__":
                    yield f"{pins.name_of(namespace)}.{name}", value


def _is_own(name: str, value: object, hidden: dict[str, Any]) -> bool:
    # One of the shell's own variables to which the user has given another value is the user's.
    return name[:2] == "__" or hidden.get(name) is value or name in ("In", "Out", "exit", "quit", "get_ipython")
