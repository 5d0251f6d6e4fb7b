"""Finds what else runs with a node: hooks of the user's, and forward code that a checkpoint runs again."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Iterator
from typing import Any

from torch.utils.hooks import BackwardHook

from nbdist.autograd.graph.edges import Node
from nbdist.autograd.graph.saved import packed_by
from nbdist.autograd.graph.walk import ACCUMULATE
from nbdist.code_places import is_users, shown_name

Note = tuple[str, str]  # a word for a small field in a picture, and a sentence without its subject, the node
HOOKS_KEY = (
    "nbdist.hooks"  # in ``node.metadata``: the handles of hooks that were set on its tensors while lines were noted
)


def notes_on(node: Node, *, own: bool) -> tuple[Note, ...]:
    """Return notes on what else runs with a node. Hooks on nodes are seen only of the thread's ``own`` next pass."""
    # For a node without hooks 2 us, and 6 if it is its own: hooks are set then, to see others.
    saved = packed_by(node)
    hooks = [each.unpack for each in saved]
    for handle in node.metadata.get(HOOKS_KEY, ()):
        hooks += (handle.hooks_dict_ref() or {}).values()
    if type(node) is ACCUMULATE:
        leaf = node.variable
        hooks += [*(leaf._backward_hooks or {}).values(), *(leaf._post_accumulate_grad_hooks or {}).values()]
    if own:
        kind = type(node)
        for handle in (kind.register_hook(node, _nothing), kind.register_prehook(node, _nothing)):
            set_on_node = handle.hooks_dict_ref()
            del set_on_node[handle.id]  # torch shows hooks only to who sets one
            if set_on_node:
                hooks += itertools.chain.from_iterable(map(_behind, set_on_node.values()))
    if not hooks:
        return ()
    places = dict.fromkeys(filter(None, map(_place, hooks)))
    notes = [("hook", f"calls a hook of yours, {place}") for place in places]
    if any(type(each.data).__module__ == "torch.utils.checkpoint" for each in saved):
        notes.append(("again", "needs values that a checkpoint computes again"))
    return tuple(notes)


def _nothing(*_: object) -> None: ...


def _behind(hook: Any) -> Iterator[Any]:
    """Yield a hook; for one that torch sets at an end of a module, the module's full backward hooks that it calls."""
    if getattr(hook, "__module__", None) != BackwardHook.__module__:
        yield hook
        return
    for module in [cell.cell_contents for cell in hook.__closure__ or ()]:
        if isinstance(module, BackwardHook):
            at_outputs = BackwardHook.setup_output_hook.__name__ in hook.__qualname__
            yield from module.user_pre_hooks if at_outputs else ()
            yield from module.user_hooks if not at_outputs or module.input_tensors_index is None else ()


def _place(hook: Any) -> str:
    # As ``In[3]:7``; an empty string if the hook is not the user's.
    while isinstance(hook, functools.partial | types.MethodType):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    call: Any = inspect.unwrap(hook) if isinstance(hook, types.FunctionType) else vars(type(hook)).get("__call__")
    code = getattr(call, "__code__", None)
    if code is None or not is_users(code.co_filename):
        return ""
    return f"{shown_name(code.co_filename)}:{code.co_firstlineno}"
