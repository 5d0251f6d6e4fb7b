"""Notes which module, and which line of the user's code, made each node of a graph: ``context(lines=True)``.

One mode of torch does two jobs: it notes lines, and it checks every operation for NaN
(`nbdist.autograd.graph.forward_nans`). The errors of the check name the module and the line::

    context(lines=True)   `noted` enters a `_Noting` mode   `_note_nodes` puts a `NodeOrigin` on each new node
    context(check="nan")  `noted` enters a `_Noting` mode   `NanCheck.after` reads what was returned

Noting takes about 50 microseconds for each operation. So it happens only in contexts that ask for it, in the threads
that run in such a context, on all workers, in watched cells for watched passes, and in the threads that these start.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from nbdist.autograd.graph.edges import Node
from nbdist.autograd.graph.forward_nans import NanCheck, tensors_in
from nbdist.autograd.graph.hooks import HOOKS_KEY
from nbdist.autograd.graph.origins import ORIGIN_KEY, NodeOrigin, users_line
from nbdist.autograd.graph.parameters import walk
from nbdist.code_places import NBDIST
from nbdist.torch_private import function_modes, no_torch_function, pop_function_mode, push_function_mode


class _Running(msgspec.Struct, eq=False):
    """A module whose forward runs on some thread."""

    module: torch.nn.Module
    path: str = ""  # its path, once somebody has asked: to find the path takes a walk over all modules

    __repr__ = object.__repr__  # a struct's own would print the module


class _PerThread(threading.local):
    # The modules whose forward runs on this thread, outermost first; None if this thread notes nothing.
    modules: list[_Running] | None = None
    checking: _Noting | None = None  # the mode that checks this thread's results for NaN
    noting: _Noting | None = None  # the innermost mode that notes this thread's lines


_thread = _PerThread()


class _ProcessHooks:
    """The hooks on all modules of the process, and on ``Function.apply``, while any `noted` block is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        # True once somebody has asked for a tensor's node while lines were noted, and so may have set hooks on it.
        self.nodes_were_seen = False
        self._handles: list[Any] = []

    def use(self, more: int) -> None:
        """Count the open `noted` blocks, by 1 or -1: the first one sets the hooks, the last one removes them."""
        with self._lock:
            self._blocks += more
            if self._blocks and not self._handles:
                self._handles.append(register_module_forward_pre_hook(_enter_module))
                # Always, also after an error: a module that has ended must not seem to run.
                self._handles.append(register_module_forward_hook(_leave_module, always_call=True))
                Function.apply = classmethod(_apply_and_note)  # torch's modes do not see it
            elif not self._blocks:
                while self._handles:
                    self._handles.pop().remove()
                Function.apply = _plain_apply


_grad_fn = torch.Tensor.grad_fn
_register_hook = torch.Tensor.register_hook  # torch tells nobody which hooks a tensor has that somebody let go of
_plain_start = threading.Thread.start
_plain_apply: Any = vars(torch.autograd.Function)["apply"]
Function: Any = torch.autograd.Function
Thread: Any = threading.Thread
_process_hooks = _ProcessHooks()


@contextlib.contextmanager
def noted(
    *, lines: bool = True, check: NanCheck | None = None, wanted: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Note the origins of the nodes that the calling thread makes in the block, which may end on another thread.

    If another thread ends the block, the noting stops at once. But the block's torch function mode stays on the first
    thread until that thread's next `noted`, and does nothing. ``check`` raises in the block when it finds a NaN.
    ``wanted()`` is asked at each operation: whether to note the lines of what is computed now.
    """
    thread = threading.get_ident()
    outer, checking, noting = _thread.modules, _thread.checking, _thread.noting
    if checking is not None and not checking.is_over:
        check = None  # the outer context of this thread checks already
    mode: Any = _Noting(lines, check, wanted)
    counted = False
    try:  # from here on Ctrl-C must undo what has been done
        _thread.modules = []
        _process_hooks.use(1)
        counted = True
        _leave(None)  # the modes of blocks that other threads have ended are still on this thread's stack
        if check is not None:
            _thread.checking = mode
        if lines:
            _thread.noting = mode
            # For good, as others may replace it after us: it does nothing in a thread that notes no lines.
            if Thread.start is _plain_start:
                Thread.start = _start_and_note
        mode.__enter__()
        yield
    finally:
        mode.is_over = True
        for block in mode.started:
            block.close()
        if counted and not mode.is_resting:
            _process_hooks.use(-1)
        if threading.get_ident() == thread:  # another thread cannot take the mode off the first one's stack
            _leave(mode)
            _thread.modules, _thread.checking, _thread.noting = outer, checking, noting


@functools.wraps(_plain_start)
def _start_and_note(thread: Any) -> None:
    noting = _thread.noting
    if noting is not None and not noting.is_over and not sys._getframe(1).f_code.co_filename.startswith(NBDIST):
        run, block = thread.run, contextlib.ExitStack()

        def run_noted() -> None:
            vars(thread).pop("run", None)  # which makes the thread a cycle
            with block:
                block.enter_context(noted(wanted=noting.is_wanted))
                if noting.is_over:  # and may have closed the block before it was entered
                    block.close()
                run()

        noting.started.append(block)
        thread.run = run_noted
    _plain_start(thread)


def _rest() -> bool:
    """Take this thread's mode off its stack, and the hooks away, if no lines are wanted now; say whether it did."""
    # They cost each operation and each module some microseconds. Not to be called inside of an operation: there the
    # mode is off the stack, and comes back.
    mode = _thread.noting
    if mode is None or mode.is_over or mode.check is not None or mode.is_wanted() or function_modes() != 1:
        return False  # with no mode on the stack it rests already; a second one is the user's
    pop_function_mode()
    mode.is_resting = mode.has_gaps = True
    _process_hooks.use(-1)
    return True


def wake() -> None:
    """Note lines in this thread again, if they are wanted for what is computed now and a mode rests."""
    mode = _thread.noting
    if mode is not None and not mode.is_over and mode.is_resting and mode.is_wanted() and not function_modes():
        mode.is_resting = False
        _process_hooks.use(1)
        push_function_mode(mode)


def may_have_hooks(node: Node) -> bool:
    """Return whether hooks may be set on a node itself: not if it was noted, and nobody has asked for nodes since."""
    return _process_hooks.nodes_were_seen or not node.metadata.get(ORIGIN_KEY)


def why_no_line() -> str:
    """Return why a node may have no line here: "" in a thread that notes none."""
    mode = _thread.noting
    if mode is None or mode.is_over:
        return ""
    return "its line was not noted" if mode.has_gaps else "made before this cell"


def _leave(mode: TorchFunctionMode | None) -> None:
    """Take ``mode``, if any, and all modes of `noted` blocks that have ended, off the calling thread's stack."""
    kept = []
    while function_modes():
        top = pop_function_mode()
        if top is not mode and not (isinstance(top, _Noting) and top.is_over):
            kept.append(top)
    for other in reversed(kept):
        push_function_mode(other)


def _enter_module(module: torch.nn.Module, _: Any) -> None:
    # torch calls this for all modules of the process: on a thread outside of `noted`, it must do nothing.
    if not torch.compiler.is_compiling() and _thread.modules is not None:
        if not _thread.modules and _rest():
            return  # the hook at the module's end may be gone
        _thread.modules.append(_Running(module))


def _leave_module(module: torch.nn.Module, args: Any, result: Any) -> None:
    """Note that a module ends its forward on this thread, and check what it returned; raises ForwardNaN for a NaN."""
    __tracebackhide__ = True
    modules = _thread.modules if not torch.compiler.is_compiling() else None
    if modules is None or not any(running.module is module for running in modules):
        return
    while modules[-1].module is not module:  # they began after it, and ended without this hook
        modules.pop()
    try:
        checking = _thread.checking
        if checking is not None and not checking.is_over and checking.check is not None:
            checking.check.returned(args, result, _place_in_user_code, type(module).__name__)
    finally:
        modules.pop()


def _module_path() -> str:
    """Return the path of the innermost module whose forward runs on this thread: ``Net.fc1``."""
    assert _thread.modules is not None  # else no module could be running
    root, running = _thread.modules[0].module, _thread.modules[-1]
    if not running.path:
        module = running.module
        # By its own class, as in ``Net.Linear``, if it is not found below the outermost one.
        path = next((path for path, other in walk(root) if other is module), (type(module).__name__,))
        running.path = ".".join((type(root).__name__, *path))
    return running.path


class _Noting(TorchFunctionMode):
    """The mode that sees every function of torch that a thread calls: it notes origins, and checks for NaN."""

    is_over = False  # True once the `noted` block has ended; then the mode does nothing
    has_gaps = False  # True once something has run while no lines were wanted
    is_resting = False  # True while it is not on the thread's stack: see `wake`

    def __init__(self, lines: bool, check: NanCheck | None, wanted: Callable[[], bool]) -> None:
        super().__init__()
        self.started: list[contextlib.ExitStack] = []  # the blocks of threads that this one has started
        self.check = check
        self._lines = lines
        self.is_wanted = wanted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or self.is_over:  # compile the user's code without ours
            return func(*args, **kwargs)
        is_innermost = _thread.noting is self  # the outer block would take the inner one's look at nodes for a user's
        notes = self._lines and is_innermost and self.is_wanted()
        self.has_gaps |= is_innermost and not notes
        run, check = _call_and_note if notes else _call_unnoted, self.check
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


def _call_and_note(func: Any, args: Any, kwargs: Any) -> Any:
    __tracebackhide__ = True
    _note_older(args, kwargs)
    result = func(*args, **kwargs)
    _note_made((result, *args[:1]))
    if getattr(func, "__self__", None) is _grad_fn:
        _process_hooks.nodes_were_seen = True
    elif func is _register_hook and args[0].grad_fn is not None:
        args[0].grad_fn.metadata.setdefault(HOOKS_KEY, []).append(result)
    return result


def _note_older(args: Any, kwargs: Any) -> None:
    """Note that the nodes of an operation's inputs are older: those that were made where nothing is noted."""
    for tensor in tensors_in((*args, *kwargs.values())):
        if tensor.grad_fn is not None:
            node: Node = tensor.grad_fn
            node.metadata.setdefault(ORIGIN_KEY, None)


def _note_made(results: Any) -> None:
    if changed := [tensor.grad_fn for tensor in tensors_in(results) if tensor.grad_fn is not None]:
        _note_nodes(changed)


def _apply_and_note(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Apply a user's Function as torch does, and note the line of the call on its node if this thread notes lines."""
    __tracebackhide__ = True
    apply, noting = _plain_apply.__get__(None, function), _thread.noting
    if noting is None or noting.is_over or torch.compiler.is_compiling() or not noting.is_wanted():
        return apply(*args, **kwargs)
    with no_torch_function():  # else the mode takes each look at a tensor for an operation
        _note_older(args, kwargs)
    result = apply(*args, **kwargs)
    with no_torch_function():
        _note_made((result, *args[:1]))
    return result


_apply_and_note.__name__ = "apply"  # torch.compile asks for the name


def _call_unnoted(func: Any, args: Any, kwargs: Any) -> Any:
    __tracebackhide__ = True
    return func(*args, **kwargs)


def _note_nodes(nodes: list[Node]) -> None:
    """Note the line of code that runs now as the origin of these nodes and of the nodes behind them."""
    origin = None
    stack = nodes
    while stack:
        node = stack.pop()
        # A node that has a note is older than this operation, and so is all behind it.
        if node is None or not node.next_functions or ORIGIN_KEY in node.metadata:
            continue
        if origin is None:
            origin = _place_in_user_code()
        node.metadata[ORIGIN_KEY] = origin
        stack.extend(behind for behind, _ in node.next_functions)


def _place_in_user_code() -> NodeOrigin:
    return NodeOrigin(_module_path() if _thread.modules else None, *users_line())
