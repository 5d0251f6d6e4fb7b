"""Finds the operation of a forward pass that makes the first NaN: ``context(check="nan")``.

`nbdist.autograd.origins` calls a `Check` around every function of torch that runs in such a context.

============================== ========================= ========================================================
the inputs of an operation     its outputs               what happens
============================== ========================= ========================================================
hold no NaN                    hold a NaN                `ForwardNaN`: this operation made it
hold a NaN                     hold a NaN                `ForwardNaN`: which input holds it, and where that is from
hold a NaN                     hold none                 nothing: `nan_to_num`, `where` and masks do that on purpose
any                            hold an Inf               nothing: attention masks are made of Inf
============================== ========================= ========================================================

Only outputs are looked at, and inputs once an output holds a NaN; an operation that changes a tensor in place has that
tensor looked at before, too. Functions that make tensors from none, or pass values on as they are, are not looked at:
memory that nobody has written yet may hold anything.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import nbdist
from nbdist.autograd.edges import RECEIVE
from nbdist.errors import ForwardNaN
from nbdist.torch_private import (
    graph_task,
    is_transforming,
    no_torch_function,
    without_dispatch_modes,
)

if TYPE_CHECKING:
    from nbdist.autograd.origins import Origin

__all__ = ["Check", "holds_nan", "tensors_in"]

_NAMES = """
    __get__ __set__ __getitem__ __setitem__ backward grad is_complex item numpy tolist requires_grad_ retain_grad
    empty_like empty_permuted new_empty new_empty_strided new_full new_ones new_tensor new_zeros full_like ones_like
    zeros_like rand_like randn_like randint_like resize_ resize_as_ set_ zero_ uniform_ normal_ random_ bernoulli_
    alias as_strided atleast_1d atleast_2d atleast_3d as_subclass bfloat16 broadcast_tensors broadcast_to cat chunk
    clone column_stack concat concatenate contiguous copy_ cpu cuda detach detach_ diag diag_embed diagonal double
    dsplit dstack expand expand_as flatten flip fliplr flipud float gather half hsplit hstack imag index_copy
    index_copy_ index_put index_put_ index_select masked_scatter masked_scatter_ masked_select meshgrid moveaxis movedim
    narrow narrow_copy pad permute pin_memory ravel real repeat repeat_interleave reshape reshape_as roll rot90
    row_stack scatter scatter_ select select_scatter share_memory_ slice_scatter split split_with_sizes squeeze squeeze_
    stack swapaxes swapdims t t_ take take_along_dim tensor_split tile to transpose transpose_ tril triu type type_as
    unbind unflatten unfold unsqueeze unsqueeze_ view view_as view_as_complex view_as_real vsplit vstack where
"""
_PASSES_ON = frozenset(_NAMES.split())
"""Functions that make no NaN themselves: they hand values on, write over what was there, or look at something."""

_jit: Any = torch.jit  # whose is_tracing has no annotations
_TORCH = str(Path(torch.__file__).parent)
_OF_UPDATES = tuple(
    str(Path(torch.__file__).parent / part) for part in ("optim", "nn/utils/clip_grad.py", "amp/grad_scaler.py")
)
_OURS = str(Path(nbdist.__file__).parent)
_CALLS, _STAGES = (str(Path(nbdist.__file__).parent / part) for part in ("rpc", "nn"))

Named = tuple[str, Any]
"""An argument: how it is called in a message, and its value."""


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among some values, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def holds_nan(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds a NaN; False also for a tensor that cannot be looked at here.

    So it is for tensors without values (meta and fake ones), for subclasses that dispatch on their own, and while a
    CUDA graph is captured. No graph and no mode sees it.
    """
    with no_torch_function(), without_dispatch_modes():
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
            return False
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return False
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        try:
            return _holds_nan(tensor.detach())
        except Exception:  # of a kind of tensor that has no sum
            return False


def _holds_nan(values: torch.Tensor) -> bool:
    if values.is_nested:
        values = values.values()
    elif values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    elif values.layout is not torch.strided:
        values = values.values()
    if values.is_floating_point() and values.itemsize == 1:
        values = values.float()  # of which torch knows how to make a sum
    total = values.sum().item()  # which is a NaN if any of them is, and costs a tenth of isnan
    return total != total and bool(values.isnan().any())  # Inf - Inf is one, too


class Check:
    """Looks for NaN in what one worker computes in a context."""

    def __init__(self, worker: str, name_of: Callable[[int], str]) -> None:
        """Name the worker in errors ``worker``, and other workers as ``name_of(incarnation)`` does."""
        self._worker = worker
        self._name_of = name_of
        self._last: list[weakref.ref[torch.Tensor]] = []
        """What the last operation returned: known to hold no NaN that is news."""

    @staticmethod
    def applies(name: str) -> bool:
        """Return whether to look at what the function ``name`` returns in the calling thread now.

        Not in torch.func's transforms, nor where a function is compiled or traced, as the looking would be a part of
        it; and not in a backward pass, except in what a checkpoint recomputes there, which is a forward pass again.
        """
        return (
            name not in _PASSES_ON
            and (graph_task() < 0 or torch.is_grad_enabled())
            and not is_transforming()
            and not _jit.is_tracing()
        )

    def before(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Named]:
        """Return the arguments that hold a NaN already and that an operation is about to write over."""
        if "out" in kwargs:
            return [named for named in _named(args, kwargs) if _has_nan(named[1])]
        if _is_in_place(name) and args and _has_nan(args[0]):
            return [("argument 0", args[0])]
        return []

    def after(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        held: Sequence[Named],
        place: Callable[[], Origin],
    ) -> None:
        """Look at what an operation has returned, or has changed in place; ``held`` is what `before` has returned.

        Raises:
            ForwardNaN: it holds a NaN, made by this operation or given to it.
        """
        in_place = _is_in_place(name)
        outputs = list(tensors_in((result, args[0]) if in_place and args else (result,)))
        self._last = [weakref.ref(tensor) for tensor in outputs]
        if not any(map(holds_nan, outputs)):
            return
        given = list(_named(args[1:], kwargs, 1) if in_place else _named(args, kwargs))
        if not in_place and not list(tensors_in(value for _, value in given)):
            return  # made from nothing: whoever made it wanted it so
        if not held and "out" not in kwargs:
            held = [named for named in given if _has_nan(named[1])]
        if _is_of_gradients(bool(held), bool(place().module)):
            return
        if held:
            raise self._given(name, held[0], place())
        raise self._made(name, given, outputs, place())

    def pass_on(self, result: Any) -> None:
        """Take note of what an operation has returned that is not looked at."""
        if isinstance(result, torch.Tensor):
            self._last = [weakref.ref(result)]

    def returned(self, args: Any, result: Any, place: Callable[[], Origin], kind: str) -> None:
        """Look at what a module has returned, unless the last operation did: compiled code is seen in no other way.

        Raises:
            ForwardNaN: it holds a NaN, and what the module was given does not.
        """
        outputs = [tensor for tensor in tensors_in([result]) if not any(tensor is known() for known in self._last)]
        if not outputs or not self.applies(""):
            return
        self._last = [weakref.ref(tensor) for tensor in outputs]
        if not any(map(holds_nan, outputs)) or any(map(holds_nan, tensors_in([args]))):
            return
        raise self._error(
            f"{kind} returned {_count(outputs)}, and what it was given holds none: compiled code in it, or a Function "
            f"of yours, made it",
            kind,
            place(),
        )

    # -- what is said -------------------------------------------------------------------------

    def _made(self, name: str, given: Sequence[Named], outputs: Sequence[torch.Tensor], place: Origin) -> ForwardNaN:
        inputs = [text for argument, value in given for text in _range(argument, value)]
        made_from = f" from {', '.join(inputs)}" if inputs else ""
        return self._error(f"{name} made {_count(outputs)}{made_from}; no input holds one", name, place)

    def _given(self, name: str, held: Named, place: Origin) -> ForwardNaN:
        argument, value = held
        return self._error(f"{argument} of {name} holds NaN already: {self._source(value)}", name, place)

    def _source(self, value: Any) -> str:
        tensor = next((tensor for tensor in tensors_in([value]) if holds_nan(tensor)), None)
        if tensor is None:
            return "it is a number in your code"
        node: Any = tensor.grad_fn
        kind: Any = type(node)
        if kind is RECEIVE:
            sender = self._name_of(node.end.peer)
            return f"it came with message {node.end.message} from {sender} (call of {node.end.function})"
        if hasattr(node, "_forward_cls"):
            return f"your Function {node._forward_cls.__name__} made it"
        if tensor.is_leaf and tensor.requires_grad:
            return f"it is a leaf, such as a parameter ({_like(tensor)})"
        if tensor.requires_grad:
            return "it was made where no operation is checked"
        return "it is data, or was made where no operation is checked, and needs no gradient"

    def _error(self, what: str, operation: str, place: Origin) -> ForwardNaN:
        where = f", in {place.module}" if place.module else ""
        line = f", at {place.line}" if place.line else ""
        error = ForwardNaN(f"{what}. That was on {self._worker}{where}{line}")
        error.worker, error.module, error.line, error.operation = self._worker, place.module, place.line, operation
        return error


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name.startswith("_foreach_")


def _named(args: Sequence[Any], kwargs: Mapping[str, Any], first: int = 0) -> Iterator[Named]:
    yield from ((f"argument {number}", value) for number, value in enumerate(args, first))
    yield from ((f"argument {key}", value) for key, value in kwargs.items() if key != "out")


def _has_nan(value: Any) -> bool:
    return (isinstance(value, float) and value != value) or any(map(holds_nan, tensors_in([value])))


def _count(outputs: Sequence[torch.Tensor]) -> str:
    """Return how many NaN there are, of how many values."""
    tensor = next(filter(holds_nan, outputs))
    try:
        return f"{int(tensor.detach().isnan().sum())} NaN of {tensor.numel()} values ({_like(tensor)})"
    except Exception:  # of a sparse tensor, say
        return f"NaN ({_like(tensor)})"


def _range(argument: str, value: Any) -> Iterator[str]:
    """Yield what the values of an argument's tensors are, in a few words."""
    for tensor in tensors_in([value]):
        try:
            low, high = map(float, torch.aminmax(tensor.detach()))
        except Exception:  # of no values, complex or sparse ones
            yield f"{argument} ({_like(tensor)})"
        else:
            yield f"{argument} ({_like(tensor)}, {low:.4g} to {high:.4g})"


def _like(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _is_of_gradients(given: bool, in_module: bool) -> bool:
    """Return whether the calling thread computes with gradients on torch's or our behalf, not in a forward pass.

    The innermost frame outside of torch tells: the engine and optimizers hand on the NaN of a backward pass.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or frame.f_code.co_name == "__torch_function__":
        if frame.f_back is None:
            return False
        frame = frame.f_back
    while frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_filename.startswith(_OF_UPDATES):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    file = frame.f_code.co_filename
    if in_module or not file.startswith(_OURS) or file.startswith(_CALLS):
        return False
    return given or not file.startswith(_STAGES)
