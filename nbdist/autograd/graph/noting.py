"""Notes which module, and which line of the user's code, made each node of a graph: ``context(lines=True)``.

One mode of torch does two jobs: it notes lines, and it checks every operation for NaN
(`nbdist.autograd.graph.forward_nans`). The errors of the check name the module and the line::

    context(lines=True)   `noted` enters a `_Noting` mode   `_note_nodes` puts a `NodeOrigin` on each new node
    context(check="nan")  `noted` enters a `_Noting` mode   `NanCheck.after` reads what was returned

Noting takes about 50 microseconds for each operation. So it happens only in contexts that ask for it, in the threads
that run in such a context, on all workers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from nbdist.autograd.graph.edges import Node
from nbdist.autograd.graph.forward_nans import NanCheck, tensors_in
from nbdist.autograd.graph.origins import ORIGIN_KEY, NodeOrigin, users_line
from nbdist.autograd.graph.parameters import walk
from nbdist.torch_private import function_modes, pop_function_mode, push_function_mode


class _Running:
    """A module whose forward runs on some thread."""

    __slots__ = ("module", "path")

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.path = ""
        """Its path, once somebody has asked for it: to find the path takes a walk over all modules."""


class _PerThread(threading.local):
    modules: list[_Running] | None = None
    """The modules whose forward runs on this thread, outermost first; None if this thread notes nothing."""
    checking: _Noting | None = None
    """The mode that checks this thread's results for NaN."""


_thread = _PerThread()


class _ModuleHooks:
    """The hooks on all modules of the process, which they have while any `noted` block is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        """The number of `noted` blocks that are open."""
        self._handles: list[Any] = []

    def use(self, more: int) -> None:
        """Count the open `noted` blocks: the first sets the hooks, the last removes them.

        ``more`` is 1 when a `noted` block begins, and -1 when it ends.
        """
        with self._lock:
            self._blocks += more
            if self._blocks and not self._handles:
                self._handles.append(register_module_forward_pre_hook(_enter_module))
                self._handles.append(register_module_forward_hook(_leave_module, always_call=True))
            elif not self._blocks:
                while self._handles:
                    self._handles.pop().remove()


_module_hooks = _ModuleHooks()


@contextlib.contextmanager
def noted(*, lines: bool = True, check: NanCheck | None = None) -> Iterator[None]:
    """Note the origins of the nodes that the calling thread makes in the block, which may end on another thread.

    If the block ends on another thread, the noting stops at once. But the block's torch function mode stays on the
    first thread until that thread's next `noted`, and does nothing.

    Args:
        lines: Whether to note origins on the nodes of the graph.
        check: The check that raises in the block when it finds a NaN, or None. A thread whose outer context checks
            already does not check twice.
    """
    thread = threading.get_ident()
    outer, checking = _thread.modules, _thread.checking
    if checking is not None and not checking.is_over:
        check = None  # the outer context of this thread checks already
    mode: Any = _Noting(lines, check)
    counted = False
    try:  # from here on Ctrl-C must undo what has been done
        _thread.modules = []
        _module_hooks.use(1)
        counted = True
        _leave(None)
        if check is not None:
            _thread.checking = mode
        mode.__enter__()
        yield
    finally:
        mode.is_over = True
        if counted:
            _module_hooks.use(-1)
        if threading.get_ident() == thread:
            _leave(mode)
            _thread.modules, _thread.checking = outer, checking


def _leave(mode: TorchFunctionMode | None) -> None:
    """Take a torch function mode, and all modes of `noted` blocks that have ended, off the calling thread's stack.

    None takes only the latter. The modes may lie below others, which stay in their order.
    """
    kept = []
    while function_modes():
        top = pop_function_mode()
        if top is not mode and not (isinstance(top, _Noting) and top.is_over):
            kept.append(top)
    for other in reversed(kept):
        push_function_mode(other)


def _enter_module(module: torch.nn.Module, _: Any) -> None:
    """Note that a module begins its forward on this thread: a hook that torch calls for all modules.

    Does nothing on a thread outside of `noted`, and while torch compiles.
    """
    if not torch.compiler.is_compiling() and _thread.modules is not None:
        _thread.modules.append(_Running(module))


def _leave_module(module: torch.nn.Module, args: Any, result: Any) -> None:
    """Note that a module ends its forward on this thread, and check what it returned: a hook on all modules.

    Raises ForwardNaN if the check finds a NaN. Modules that began after it and ended without this hook are dropped too.
    """
    __tracebackhide__ = True
    modules = _thread.modules if not torch.compiler.is_compiling() else None
    if modules is None or not any(running.module is module for running in modules):
        return
    while modules[-1].module is not module:
        modules.pop()
    try:
        checking = _thread.checking
        if checking is not None and not checking.is_over and checking.check is not None:
            checking.check.returned(args, result, _place_in_user_code, type(module).__name__)
    finally:
        modules.pop()


def _module_path(index: int) -> str:
    """Return the path of a module whose forward runs on this thread, such as ``Net.fc1``.

    ``index`` is its place among those modules; the outermost module is first. The path begins with the class of the
    outermost module. A module that is not found below that one is named by its own class, as in ``Net.Linear``.
    """
    assert _thread.modules is not None  # else no module could be running
    root, running = _thread.modules[0].module, _thread.modules[index]
    if not running.path:
        module = running.module
        path = next((path for path, other in walk(root) if other is module), (type(module).__name__,))
        running.path = ".".join((type(root).__name__, *path))
    return running.path


class _Noting(TorchFunctionMode):
    """The mode that sees every function of torch that a thread calls: it notes origins, and checks for NaN."""

    is_over = False
    """True once the `noted` block has ended; then the mode does nothing."""

    def __init__(self, lines: bool, check: NanCheck | None) -> None:
        super().__init__()
        self.check = check
        self._lines = lines

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # compile the user's code without ours
            return func(*args, **kwargs)
        run = self._call_and_note if self._lines and not self.is_over else _call_unnoted
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
        check.after(name, args, kwargs, result, held, _place_in_user_code)
        return result

    def _call_and_note(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch, note where in the user's code its new nodes were made, and return its result."""
        __tracebackhide__ = True
        for tensor in tensors_in((*args, *kwargs.values())):
            if tensor.grad_fn is not None:
                # If an input's node has no note, the node was made where nothing is noted: it must not get this
                # operation's note.
                node: Node = tensor.grad_fn
                node.metadata.setdefault(ORIGIN_KEY, None)
        result = func(*args, **kwargs)
        changed = [tensor.grad_fn for tensor in tensors_in((result, *args[:1])) if tensor.grad_fn is not None]
        if changed:
            _note_nodes(changed)
        return result


def _call_unnoted(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function and return its result, without noting anything."""
    __tracebackhide__ = True
    return func(*args, **kwargs)


def _note_nodes(nodes: list[Node]) -> None:
    """Note the line of code that runs now as the origin of these nodes and of the nodes behind them.

    Stops at leaves and at nodes that have a note already: these are older.
    """
    origin = None
    stack = nodes
    while stack:
        node = stack.pop()
        if node is None or not node.next_functions or ORIGIN_KEY in node.metadata:
            continue
        if origin is None:
            origin = _place_in_user_code()
        node.metadata[ORIGIN_KEY] = origin
        stack.extend(behind for behind, _ in node.next_functions)


def _place_in_user_code() -> NodeOrigin:
    """Return the user's line at which the calling thread is, and the innermost module whose forward runs on it."""
    return NodeOrigin(_module_path(-1) if _thread.modules else None, *users_line())
