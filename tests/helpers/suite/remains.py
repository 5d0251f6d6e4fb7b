"""What tests may leave in a process: variables of cells, process groups, hooks, modes, references, threads.

A look at a process is a dict of what is there, by a name for the reader, with how it is. What is there at the beginning
of a test stands in an earlier look: a process has hooks and threads of its own.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator, MutableMapping
from types import ModuleType
from typing import Any

import torch
from torch import distributed
from torch.nn.modules import module
from torch.optim import optimizer

import nbdist.autograd.passes.ddp  # noqa: F401 - has a hook of torch's as soon as it is imported
from nbdist import trace
from nbdist.rpc.api import current_agent, is_initialized
from nbdist.torch_private import groups_by_name

COUNTERS = ("owned values", "used references", "pending references", "pending calls")
"""What a counter of an agent counts."""
CONTEXTS = "contexts of distributed autograd"
_THREAD = "the thread of "


def look(collect: bool = False) -> dict[str, str]:
    """Return what is in this process, the variables of a worker's cells included, with how it is.

    References end a moment after the last object that holds them; ``collect`` frees what only a collection can free.
    """
    if collect:
        gc.collect()
    return dict((*_variables(), *_groups(), *_tables(), *_hooks(), *_modes(), *_references(), *_threads()))


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return in words what was not there before, is gone, or has changed."""
    new = [f"{name} ({how})" for name, how in after.items() if name not in before]
    gone = [f"{name} is gone" for name in before if name not in after]
    return new + gone + [f"{n} was {before[n]}, is {how}" for n, how in after.items() if before.get(n, how) != how]


def may_end(change: str) -> bool:
    """Return whether a change may pass by itself, a moment after the test."""
    return change.startswith((_THREAD, CONTEXTS, *COUNTERS))


def python_hooks() -> list[tuple[ModuleType, str, Any]]:
    """Return the hooks of Python's own in this process: the module, the name there, and the hook."""
    names = [(sys, name) for name in ("excepthook", "unraisablehook", "displayhook", "breakpointhook")]
    return [(place, name, getattr(place, name)) for place, name in (*names, (threading, "excepthook"))]


def put_right(known: dict[str, str], hooks: list[tuple[ModuleType, str, Any]]) -> None:
    """Take hooks and groups that are not in an earlier look out of this process; set modes and Python's hooks back."""
    for title, table in _hook_tables():
        for key in [key for key, hook in table.items() if f"the hook {_name_of(hook)} in {title}" not in known]:
            del table[key]
    for place, name, hook in hooks:
        setattr(place, name, hook)
    for place in (sys, threading):
        place.settrace(None)
        place.setprofile(None)
    torch.set_default_dtype(getattr(torch, known["torch's default dtype"].removeprefix("torch.")))
    torch.set_grad_enabled(known["torch's gradient mode"] == "True")
    for name, group in groups_by_name().items():
        if f"the process group {name}" not in known:
            distributed.destroy_process_group(group)


def remove_variables(known: dict[str, str]) -> None:
    """Delete the variables of this worker's cells that are not in an earlier look."""
    for name, _ in list(_variables()):
        if name not in known:
            del _namespace()[name.removeprefix("the variable ")]


def _namespace() -> MutableMapping[str, Any]:
    """Return the variables of this worker's cells; none in the process of the tests."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return {} if shell is None else shell.user_ns


def _variables() -> Iterator[tuple[str, str]]:
    for name, value in list(_namespace().items()):
        if not name.startswith("_"):  # IPython's history
            yield f"the variable {name}", repr(value) if isinstance(value, int | str) else type(value).__qualname__


def _groups() -> Iterator[tuple[str, str]]:
    default = distributed.group.WORLD
    collectives = current_agent().named.find("collectives") if is_initialized() else None
    is_broken = collectives is not None and collectives.was_broken_off(0.0)
    yield "the default process group", "broken off" if is_broken else "none" if default is None else "whole"
    for name, group in groups_by_name().items():
        if group is not default:
            yield f"the process group {name}", f"of {group.size()}"


def _hook_tables() -> Iterator[tuple[str, MutableMapping[Any, Any]]]:
    for place in (module, optimizer):
        for name, hooks in vars(place).items():
            if name.startswith("_global_") and isinstance(hooks, MutableMapping):
                yield f"torch's {name[1:]}", hooks


def _tables() -> Iterator[tuple[str, str]]:
    for title, table in _hook_tables():
        for name, count in Counter(map(_name_of, table.values())).items():
            yield f"the hook {name} in {title}", str(count)
    yield "listeners of nbdist.trace", str(len(trace.listeners))


def _hooks() -> Iterator[tuple[str, str]]:
    for place, name, hook in python_hooks():
        yield f"{place.__name__}.{name}", _name_of(hook)
    for place in (sys, threading):
        for name in ("trace", "profile"):
            yield f"{place.__name__}.set{name}", _name_of(getattr(place, f"get{name}")())


def _modes() -> Iterator[tuple[str, str]]:
    yield "torch's default dtype", str(torch.get_default_dtype())
    yield "torch's gradient mode", str(torch.is_grad_enabled())
    yield "torch's anomaly mode", str(torch.is_anomaly_enabled())
    yield "hooks of saved tensors", _name_of(torch._C._autograd._top_saved_tensors_default_hooks(True))
    yield "torch's function modes", str(torch._C._len_torch_function_stack())


def _references() -> Iterator[tuple[str, str]]:
    if is_initialized():
        agent = current_agent()
        yield CONTEXTS, str(len(agent.recorder.contexts.all()) if agent.recorder else 0)
        for counter in COUNTERS:
            yield counter, str(agent.statistics()[counter.replace(" ", "_")])


def _threads() -> Iterator[tuple[str, str]]:
    """Yield the threads that nobody has named: those of libraries have names of their own."""
    found = (re.fullmatch(r"Thread-\d+ \((.+)\)", each.name) for each in threading.enumerate())
    for name, count in Counter(match[1] for match in found if match).items():
        yield f"{_THREAD}{name}()", str(count)


def _name_of(hook: object) -> str:
    return "none" if hook is None else getattr(hook, "__qualname__", type(hook).__qualname__)
