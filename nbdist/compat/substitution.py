"""Replaces modules of torch by modules of nbdist.

A program can reach a module in three ways. Each of them is changed:

======================================================================  ===========================
a way to a module                                                       changed by
======================================================================  ===========================
its entry in ``sys.modules``                                            `_replace`
the attribute of its parent package                                     `_replace`
globals of modules that have imported it before, or a name from it      `_successors` and `_rebind`
======================================================================  ===========================

torch itself has such globals as soon as it is imported: ``torch.nn.parallel.distributed`` looks for RRefs in its
inputs.
"""

from __future__ import annotations

import importlib
import io
import pkgutil
import sys
import threading
import types
from typing import Any

from nbdist.autograd import recorder
from nbdist.autograd.graph import edges
from nbdist.compat import autograd, echo, optimizer, references, rpc, words
from nbdist.errors import UsageError
from nbdist.rpc import failures
from nbdist.torch_private import torch_rpc
from nbdist.wire.pickling.registered import register_reducer

_REPLACED_MODULES = (
    *("torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.optim.optimizer"),
    "torch._C._distributed_",
)

_lock = threading.Lock()
installed = False
"""True once `install` has replaced the modules in this process."""


def install() -> None:
    """Replace torch's modules by nbdist's, as `nbdist.compat.install` describes. Any thread may call this.

    A second call does nothing. Raises UsageError if torch's own RPC runs in this process.
    """
    global installed
    with _lock:
        if installed:
            return
        if _torch_rpc_runs():  # its calls, references and contexts could not go on under nbdist
            raise UsageError(
                "torch's own RPC is running in this process, so nbdist cannot replace it; "
                "call nbdist.compat.install() before init_rpc"
            )
        references.extend()
        edges.one_node_a_message = True
        recorder.failure_words = words.of_backward
        failures.on_error(words.of_lacking)
        register_reducer(io.TextIOWrapper, words.refuse_file)
        echo.start()
        _take_over_settings()
        _replace("torch.distributed.rpc", rpc)
        _replace("torch.distributed.autograd", autograd)
        _replace("torch.distributed.optim.optimizer", optimizer)
        installed = True


def _torch_rpc_runs() -> bool:
    extension = torch_rpc()
    return extension is not None and bool(extension._is_current_rpc_agent_set())


def _take_over_settings() -> None:
    """Copy the registered reducers and the flag ``_ignore_rref_leak`` from torch's modules to nbdist's."""
    # Not imported for this: who has not imported them has set nothing there.
    internal, api = (sys.modules.get(f"torch.distributed.rpc.{name}") for name in ("internal", "api"))
    if internal is not None:
        for cls, reducer in internal._internal_rpc_pickler._class_reducer_dict.items():
            rpc.internal._internal_rpc_pickler._register_reducer(cls, reducer)
    if api is not None:
        rpc.api._ignore_rref_leak = api._ignore_rref_leak


def _replace(name: str, module: types.ModuleType) -> None:
    """Replace the module ``name`` and its submodules by ``module`` and its submodules, wherever programs find them."""
    new = {name: module}
    for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"{module.__name__}."):
        new[name + info.name.removeprefix(module.__name__)] = importlib.import_module(info.name)
    old = {known: sys.modules.pop(known) for known in list(sys.modules) if f"{known}.".startswith(f"{name}.")}
    sys.modules.update(new)
    parent, _, attribute = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], attribute, module)
    _rebind(_successors(old, new))


def _successors(old: dict[str, types.ModuleType], new: dict[str, types.ModuleType]) -> dict[int, tuple[Any, Any]]:
    """Return pairs of an old object (module, function, class, pickler) and its replacement, by the old object's id."""
    found: dict[int, tuple[Any, Any]] = {}
    for name, module in old.items():
        if name not in new:
            continue
        found[id(module)] = module, new[name]
        for attribute, value in vars(module).items():
            successor = getattr(new[name], attribute, None)
            if successor is not None and not attribute.startswith("__") and _is_torch_rpcs(value):
                found[id(value)] = value, successor
    return found


def _is_torch_rpcs(value: Any) -> bool:
    # Others must stay: `torch.futures.Future`, too, is a global of torch's modules, and nbdist's have another `Future`.
    defined = value if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) else type(value)
    return str(defined.__module__).startswith(_REPLACED_MODULES)


def _rebind(successors: dict[int, tuple[Any, Any]]) -> None:
    """Replace the old objects in the globals of all modules, which may have imported them before."""
    for module in list(sys.modules.values()):  # a copy: another thread may import
        namespace = getattr(module, "__dict__", None)
        if not isinstance(namespace, dict):
            continue
        for name, value in list(namespace.items()):
            known = successors.get(id(value))  # by id, because a value may be unhashable
            if known is not None and known[0] is value:
                namespace[name] = known[1]
