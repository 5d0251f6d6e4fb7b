"""Notes where the nodes of a graph come from: the module, and the line of the user's code, that made them.

And has what the user's code computes looked at for NaN (`nbdist.autograd.nans`), which are to be told by the same.

Functions of the user's own (`torch.autograd.Function`) are not seen by what sees torch's, and have no note; but it is
known where their backward is. It is for looking only, and costs some 50 microseconds for each operation; so it is done
where it was asked for, on the threads that run in such a context, on all workers. The note lies with the node, in the
dictionary in which torch keeps what its anomaly mode notes; so it lives as long as the node does.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

import nbdist
from nbdist.autograd.edges import Node
from nbdist.autograd.nans import Check, tensors_in
from nbdist.autograd.parameters import walk
from nbdist.torch_private import function_modes, pop_function_mode, push_function_mode

__all__ = ["Origin", "noted", "origin_of"]

_KEY = "nbdist.origin"
_INNER = (
    *(f"{Path(package.__file__ or '').parent}{os.sep}" for package in (torch, nbdist)),
    threading.__file__,  # where the thread begins that runs a function of torch's for a call
)


class Origin(NamedTuple):
    """Where a node comes from."""

    module: str | None = None
    file: str = ""
    number: int = 0
    text: str = ""
    """The line, where its source is known on that worker."""

    @property
    def line(self) -> str | None:
        """Where in the user's code that is, and what stands there if that is known there or here."""
        if not self.file:
            return None
        where = f"{'cell' if 'ipykernel' in self.file else Path(self.file).name}:{self.number}"
        text = self.text or linecache.getline(self.file, self.number).strip()
        return f"{where}: {text}" if text else where


class _Running:
    """A module whose forward runs on some thread."""

    __slots__ = ("module", "path")

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.path = ""
        """Its path, once somebody has asked for it: to find it takes a walk over all modules."""


class _PerThread(threading.local):
    modules: list[_Running] | None = None
    """Those whose forward runs on this thread, the outermost first; None where nothing is noted."""
    checking: _Noting | None = None
    """The mode that looks for NaN in what this thread computes."""


_thread = _PerThread()
_lock = threading.Lock()
_users = 0
_hooks: list[Any] = []


def origin_of(node: Node) -> Origin:
    """What has been noted of a node; of a function of the user's own, where its backward is written."""
    found: Origin | None = node.metadata.get(_KEY)
    if found is None:
        backward: Any = getattr(getattr(node, "_forward_cls", None), "backward", None)
        code = getattr(inspect.unwrap(backward) if backward is not None else None, "__code__", None)
        if code is not None and not code.co_filename.startswith(_INNER):
            file, number = code.co_filename, code.co_firstlineno
            while (text := linecache.getline(file, number).strip()).startswith("@"):  # what decorates it
                number += 1
            return Origin(None, file, number, text)
    return found or Origin()


@contextlib.contextmanager
def noted(*, lines: bool = True, check: Check | None = None) -> Iterator[None]:
    """Note the origins of what the calling thread computes in the block, which may end on another thread.

    Args:
        lines: Whether to note them with the nodes of the graph.
        check: What looks for NaN, and raises in the block where it finds one; None looks for none.
    """
    thread = threading.get_ident()
    outer, _thread.modules = _thread.modules, []
    checking = _thread.checking
    if checking is not None and not checking.is_over:
        check = None  # it is looked for already, by the context that the thread is in
    _use_hooks(1)
    _leave(None)
    mode: Any = _Noting(lines, check)
    if check is not None:
        _thread.checking = mode
    mode.__enter__()
    try:
        yield
    finally:
        mode.is_over = True
        _use_hooks(-1)
        if threading.get_ident() == thread:
            _leave(mode)
            _thread.modules, _thread.checking = outer, checking


def _leave(mode: TorchFunctionMode | None) -> None:
    """End a mode, also where others were entered since, and those that other threads have ended."""
    kept = []
    while function_modes():
        top = pop_function_mode()
        if top is not mode and not (isinstance(top, _Noting) and top.is_over):
            kept.append(top)
    for other in reversed(kept):
        push_function_mode(other)


def _use_hooks(more: int) -> None:
    """Hooks on all modules of the process are there only while somebody wants them."""
    global _users
    with _lock:
        _users += more
        if _users and not _hooks:
            _hooks.append(register_module_forward_pre_hook(_enter_module))
            _hooks.append(register_module_forward_hook(_leave_module, always_call=True))
        elif not _users:
            while _hooks:
                _hooks.pop().remove()


def _enter_module(module: torch.nn.Module, _: Any) -> None:
    if not torch.compiler.is_compiling() and _thread.modules is not None:
        _thread.modules.append(_Running(module))


def _leave_module(module: torch.nn.Module, args: Any, result: Any) -> None:
    __tracebackhide__ = True
    modules = _thread.modules if not torch.compiler.is_compiling() else None
    if modules is None or not any(running.module is module for running in modules):
        return
    while modules[-1].module is not module:
        modules.pop()
    try:
        checking = _thread.checking
        if checking is not None and not checking.is_over and checking.check is not None:
            checking.check.returned(args, result, _here, type(module).__name__)
    finally:
        modules.pop()


def _path(index: int) -> str:
    """Return the path of one of the modules whose forward runs on this thread, from the outermost one."""
    assert _thread.modules is not None  # or there would be none
    root, running = _thread.modules[0].module, _thread.modules[index]
    if not running.path:
        module = running.module
        path = next((path for path, other in walk(root) if other is module), (type(module).__name__,))
        running.path = ".".join((type(root).__name__, *path))
    return running.path


class _Noting(TorchFunctionMode):
    """Sees every function of torch that this thread calls."""

    is_over = False

    def __init__(self, lines: bool, check: Check | None) -> None:
        super().__init__()
        self.check = check
        self._lines = lines

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # what is compiled is the user's code alone
            return func(*args, **kwargs)
        run = self._noted if self._lines and not self.is_over else _call
        check = self.check if not self.is_over else None
        if check is None:
            return run(func, args, kwargs)
        name = getattr(func, "__name__", "").partition(".")[0]  # compiled code calls ``view.default``, say
        if not check.applies(name):
            result = run(func, args, kwargs)
            check.pass_on(result)
            return result
        held = check.before(name, args, kwargs)
        result = run(func, args, kwargs)
        check.after(name, args, kwargs, result, held, _here)
        return result

    def _noted(self, func: Any, args: Any, kwargs: Any) -> Any:
        __tracebackhide__ = True
        for tensor in tensors_in((*args, *kwargs.values())):
            if tensor.grad_fn is not None:
                # Made where nothing was noted: what comes after must not be taken for its origin.
                node: Node = tensor.grad_fn
                node.metadata.setdefault(_KEY, None)
        result = func(*args, **kwargs)
        changed = [tensor.grad_fn for tensor in tensors_in((result, *args[:1])) if tensor.grad_fn is not None]
        if changed:
            _note(changed)
        return result


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    __tracebackhide__ = True
    return func(*args, **kwargs)


def _note(nodes: list[Node]) -> None:
    origin = None
    stack = nodes
    while stack:
        node = stack.pop()
        if node is None or not node.next_functions or _KEY in node.metadata:
            continue
        if origin is None:
            origin = _here()
        node.metadata[_KEY] = origin
        stack.extend(behind for behind, _ in node.next_functions)


def _here() -> Origin:
    """Return where in the user's code the calling thread is."""
    return Origin(_path(-1) if _thread.modules else None, *_line())


def _line() -> tuple[str, int, str]:
    """Where in the user's code the calling thread is."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_INNER):
        if frame.f_back is None:
            return "", 0, ""
        frame = frame.f_back
    file, number = frame.f_code.co_filename, frame.f_lineno
    return file, number, linecache.getline(file, number, frame.f_globals).strip()
