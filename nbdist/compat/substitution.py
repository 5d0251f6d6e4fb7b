"""Puts modules of nbdist in the place of torch's.

A module can be reached by three ways: its entry in ``sys.modules``, the attribute of its parent package, and
the globals of modules that imported it, or a name out of it, before. All three are changed; torch itself does
the third when it is imported (``torch.nn.parallel.distributed`` looks for RRefs in what it is given).
"""

from __future__ import annotations

import importlib
import io
import pkgutil
import sys
import threading
import types
from typing import Any

from nbdist.autograd import edges, recorder
from nbdist.compat import autograd, echo, optimizer, references, rpc, words
from nbdist.errors import UsageError
from nbdist.rpc import failures
from nbdist.torch_private import torch_rpc
from nbdist.wire.registered import register_reducer

__all__ = ["install", "installed"]

_HOMES = (
    *("torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.optim.optimizer"),
    "torch._C._distributed_",
)

_lock = threading.Lock()
installed = False
"""Whether it has been done in this process."""


def install() -> None:
    """See `nbdist.compat.install`."""
    global installed
    with _lock:
        if installed:
            return
        if _torch_rpc_runs():
            raise UsageError("torch's own RPC is running in this process; call nbdist.compat.install() before init_rpc")
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
    """Keep what the program, or torch for its RemoteModule, has told torch's modules before they are replaced."""
    internal, api = (sys.modules.get(f"torch.distributed.rpc.{name}") for name in ("internal", "api"))
    if internal is not None:
        for cls, reducer in internal._internal_rpc_pickler._class_reducer_dict.items():
            rpc.internal._internal_rpc_pickler._register_reducer(cls, reducer)
    if api is not None:
        rpc.api._ignore_rref_leak = api._ignore_rref_leak


def _replace(name: str, module: types.ModuleType) -> None:
    """Have ``module`` and its submodules go by ``name``, and no other module."""
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
    """Return what takes the place of which module, function, class or pickler, by the id of the old one."""
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
    defined = value if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) else type(value)
    return str(defined.__module__).startswith(_HOMES)


def _rebind(successors: dict[int, tuple[Any, Any]]) -> None:
    """Change the globals of the modules that hold an old object."""
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if not isinstance(namespace, dict):
            continue
        for name, value in list(namespace.items()):
            known = successors.get(id(value))
            if known is not None and known[0] is value:
                namespace[name] = known[1]
