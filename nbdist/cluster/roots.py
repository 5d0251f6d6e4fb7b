"""Where a process keeps what its user knows: variables, what cells gave, errors; and the references that are here."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from nbdist.cluster import pins
from nbdist.cluster.pins import Pin, Roots
from nbdist.cluster.status import is_users
from nbdist.rpc import inert
from nbdist.rpc.agent import Agent
from nbdist.rpc.rref import RRef

__all__ = ["LAST_RESULT", "Named", "named_values", "names_by_value", "references", "results", "roots_of", "shell"]

_RAISED = Pin("traceback", "a traceback")
_HERE = Pin("other", "a value that lives there")
LAST_RESULT = Pin("out", "the last result")
_SHELL = Pin("other", "the shell")


def shell() -> Any:
    """Return the IPython shell of this process; None without one."""
    interactive = sys.modules.get("IPython")
    return interactive.get_ipython() if interactive is not None else None


def results(of: Any) -> list[Any]:
    """Return what a shell keeps of the cells that ran last."""
    if of is None:
        return []
    kind = getattr(sys.modules.get("IPython.core.interactiveshell"), "ExecutionResult", None)
    return [each for each in gc.get_objects() if type(each) is kind]


def references(agent: Agent) -> list[RRef[Any]]:
    """Return all references of an agent that are here and have not been released."""
    return [each for each in gc.get_objects() if type(each) is RRef and each.is_held_for(agent.references)]


def roots_of(agent: Agent) -> Roots:
    """Return where this process keeps what its user knows."""
    of = shell()
    finished = results(of)
    errors = [getattr(sys, "last_value", None), getattr(sys, "last_exc", None)]
    errors += [error for result in finished for error in (result.error_in_exec, result.error_before_exec)]
    named = {id(promise): _HERE for _, promise, _ in agent.owned()}
    if of is None:
        return Roots([vars(sys.modules["__main__"])], named=named, tracebacks=pins.frames_of(errors))
    named |= {id(of.InteractiveTB): _RAISED, id(vars(of.InteractiveTB)): _RAISED}
    named |= {id(of): _SHELL, id(vars(of)): _SHELL}
    for result in finished:
        named |= {id(result): LAST_RESULT, id(vars(result)): LAST_RESULT}
    # What a cell gave has a name in each of these.
    variables = [of.user_ns, of.user_ns_hidden, vars(of.displayhook)]
    return Roots(variables, of.user_ns.get("_oh", {}), named, pins.frames_of(errors))


def names_by_value(roots: Roots) -> dict[int, set[str]]:
    """Return the names of the user's variables by the ``id`` of their values; without numbers and texts.

    Numbers and texts may be one object by chance.
    """
    found: dict[int, set[str]] = {}
    for namespace in roots.variables:
        for name, value in list(dict.items(namespace)):
            if type(name) is str and value is not None and not inert.is_a(value, int, float, str, bytes):
                found.setdefault(id(value), set()).add(name)
    return found


class Named(NamedTuple):
    """A value under the names by which the user knows it."""

    names: list[str]
    kind: str
    """Of a `Pin`: ``variable``, ``out`` or ``traceback``."""
    value: Any


def named_values(roots: Roots) -> list[Named]:
    """Return the user's variables, those of the user's own modules, what cells gave, and what tracebacks hold.

    What the shell and nbdist put into the namespace is left out. A value with several names comes once.
    """
    found: dict[int, Named] = {}
    for name, value in _variables(roots):
        if inert.is_a(value, int, float, str, bytes) or value is None:
            found[id(name)] = Named([name], "variable", value)  # equal by chance
        else:
            found.setdefault(id(value), Named([], "variable", value)).names.append(name)
    for number, value in list(dict.items(roots.out)):
        found.setdefault(id(value), Named([f"Out[{number}]"], "out", value))
    held = [each for frame in roots.tracebacks.values() for each in gc.get_referents(frame)]
    return [*found.values(), *([Named(["a traceback"], "traceback", held)] if held else [])]


def _variables(roots: Roots) -> Iterator[tuple[str, Any]]:
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
    return name[:2] == "__" or hidden.get(name) is value or name in ("In", "Out", "exit", "quit", "get_ipython")
