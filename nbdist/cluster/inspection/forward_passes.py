"""Observes models: their parameters and buffers, and what goes in and comes out in a forward pass.

Modules have the names that they have in the model that nothing wraps, so DDP, FSDP2 and `torch.compile` change none.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nbdist.cluster.inspection.rounding import kind_of
from nbdist.nn.randomness import random_state, restore_random_state, seeded

STEPS = ("kinds", "values", "inputs", "outputs")
"""The values to observe, in the order in which they are compared."""


class _Enough(BaseException):
    """Ends an expression. It is no Exception, which the user's code may catch."""


def observe(models: Mapping[str, Any], run: Callable[[], Any], step: str, note: Callable[[str, Any, Any], Any]) -> None:
    """Call ``note(what, module, value)`` for each value of one of `STEPS`, in an order that all processes share.

    "kinds" and "values" are the dtypes and shapes, and the values, of parameters and buffers. For the others, ``run``
    runs the models. "inputs" is the input of the first module that is called, and ends ``run``: collectives in a module
    may end the process if workers give it different inputs. "outputs" are the inputs of the models, the outputs of all
    modules, and the value of ``run``.

    ``run`` draws torch's random numbers from one seed on, and its compiled code runs eagerly. Nothing else is changed
    for it, such as the modes of modules. Afterwards, there are no hooks, and gradients, buffers and random states are
    as before. FSDP2's parameters are sharded, which may have been whole since a forward pass, for a backward pass.
    """
    modules, counts = _named_modules(models), Counter[str]()

    def hook(what: str, module: Any, args: Any, value: Any) -> None:
        counts[what] += 1
        value = {**dict(enumerate(args)), **value} if what.startswith("the input") else value
        with torch.inference_mode(False), torch.no_grad():  # a tensor of inference mode cannot be sent
            note(what if counts[what] == 1 else f"{what} (call {counts[what]})", module, value)
        if step == "inputs":
            raise _Enough

    with suppress(_Enough), ExitStack() as stack:
        for module in modules.values():
            if hasattr(module, "set_reshard_after_forward"):  # a module of FSDP2, whose class takes seconds to import
                module.reshard()  # whole parameters have a dtype of FSDP2's policy
                stack.callback(module.reshard)
        tensors: dict[str, Any] = {
            f"{kind} {name}.{own}": tensor
            for name, module in modules.items()
            for kind in ("parameter", "buffer")
            for own, tensor in getattr(module, f"named_{kind}s")(recurse=False)
        }
        if step in ("kinds", "values"):
            for name, tensor in tensors.items():
                note(name, None, tensor if step == "values" else kind_of(tensor))
            return
        for name, tensor in tensors.items():
            if name.startswith("parameter"):
                stack.callback(setattr, tensor, "grad", tensor.grad)
                tensor.grad = None  # a backward pass of `run` would add to it in place
            else:
                part = getattr(tensor, "to_local", tensor.detach)().data  # so that graphs do not see the next copy
                stack.callback(part.copy_, part.clone())
        for module in modules.values():  # a forward pass may put another tensor in a buffer's place
            for own, tensor in module.named_buffers(recurse=False):
                stack.callback(setattr, module, own, tensor)
        device = next((each.device for each in tensors.values()), torch.device("cpu"))
        stack.callback(restore_random_state, random_state(device), device)
        stack.enter_context(seeded(0, device))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code calls no hooks
        for name, module in modules.items():
            if step == "outputs":
                stack.callback(module.register_forward_hook(partial(hook, f"the output of {name}")).remove)
            if step == "inputs" or name in models:
                # Before the hooks with which FSDP2 and tensor parallelism change the input.
                before = partial(hook, f"the input of {name}")
                stack.callback(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
        note("the value of the expression", None, run())


def _named_modules(models: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for model, root in models.items():
        while isinstance(root, DataParallel | DistributedDataParallel) or hasattr(root, "_orig_mod"):
            root = getattr(root, "_orig_mod", None) or root.module
        for path, module in root.named_modules():
            clean = f".{path}".replace("._orig_mod", "").replace("._checkpoint_wrapped_module", "")
            found[model + clean.rstrip(".")] = module
    return found
