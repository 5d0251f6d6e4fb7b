"""Finds the operation of a forward pass that makes the first NaN: ``context(check="nan")``.

`nbdist.autograd.graph.noting` calls a `NanCheck` around every function of torch that runs in such a context.

============================== ========================= ========================================================
the inputs of an operation     its outputs               what happens
============================== ========================= ========================================================
hold no NaN                    hold a NaN                `ForwardNaN`: this operation made it
hold a NaN                     hold a NaN                `ForwardNaN`: which input holds it, and where that is from
hold a NaN                     hold none                 nothing: `nan_to_num`, `where` and masks do that on purpose
any                            hold an Inf               nothing: attention masks are made of Inf
============================== ========================= ========================================================

A check reads the outputs, and the inputs only if an output holds a NaN. What an operation may overwrite is read before
it: the tensor that an operation changes in place, and all inputs of an operation with ``out=``. Functions that make
tensors from nothing, or pass values on unchanged, are not checked: memory that nobody has written yet may hold
anything.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from nbdist.autograd.graph.edges import RECEIVE
from nbdist.autograd.graph.origins import NodeOrigin
from nbdist.code_places import NBDIST, TORCH, is_nbdists
from nbdist.errors import ForwardNaN
from nbdist.thread_frames import outwards
from nbdist.torch_private import graph_task, is_transforming, no_torch_function, without_dispatch_modes
from nbdist.wire.pickling.scripts import is_tracing

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
# Functions that make no NaN themselves: they pass values on, overwrite old values, or only read.
_UNCHECKED_FUNCTIONS = frozenset(_NAMES.split())

# The files of torch that update parameters or scale gradients: a NaN there comes from a backward pass.
_UPDATE_FILES = tuple(f"{TORCH}{part}" for part in ("optim/", "nn/utils/clip_grad.py", "amp/grad_scaler.py"))

# Functions, mostly of `nbdist.autograd.graph.noting`, between an operation and a check of it. There are several of each
# if a thread is in two contexts of torch functions, as in a callback that runs at once.
_NOTING_FUNCTIONS = ("__torch_function__", "_call_unnoted", "_call_and_note")

Named = tuple[str, Any]  # an argument: its name in a message, and its value


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among some values, and those in lists and tuples among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def holds_nan(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds a NaN; False also for one that cannot be read here, such as a meta tensor."""
    # Autograd must not record the reading, and no mode of torch see it (test_a_mode_of_the_users_sees_nothing_of_it).
    with no_torch_function(), without_dispatch_modes():
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
            return False
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # a fake tensor, say
            return False
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():  # to read a value would break the CUDA graph
            return False
        try:
            return _holds_nan(tensor.detach())
        except Exception:  # of a kind of tensor that has no sum; a check must not fail an operation that torch can run
            return False


def _holds_nan(values: torch.Tensor) -> bool:
    if values.layout is torch.sparse_coo:
        values = values.coalesce()
    if values.is_nested or values.layout is not torch.strided:
        values = values.values()
    if values.is_floating_point() and values.itemsize == 1:
        values = values.float()  # torch has no sum of one-byte floats
    total = values.sum().item()  # NaN if any value is; a tenth of the cost of isnan
    return total != total and bool(values.isnan().any())  # the sum is also NaN for Inf - Inf


class NanCheck:
    """Checks the results of one worker in a context for NaN; each thread that enters the context uses one of these."""

    def __init__(self, worker: str, name_of: Callable[[int], str]) -> None:
        self._worker = worker
        self._name_of = name_of
        # Weakly, what the last operation returned: a module that returns just this is not checked again.
        self._last: list[weakref.ref[torch.Tensor]] = []

    @staticmethod
    def applies(name: str) -> bool:
        """Return whether to check what the function ``name`` returns in the calling thread now."""
        # In a backward pass, only the forward pass that a checkpoint recomputes is checked: gradients are enabled
        # there. In a transform of torch.func, or while a function is traced, the check would become a part of the
        # result. While one is compiled, `nbdist.autograd.graph.noting` does not call this.
        return (
            name not in _UNCHECKED_FUNCTIONS
            and (graph_task() < 0 or torch.is_grad_enabled())
            and not is_transforming()
            and not is_tracing()
        )

    def before(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Named]:
        """Return the arguments, with their names, that hold a NaN and that the operation may overwrite; for `after`."""
        # Empty for all other operations: `after` reads their arguments, and only if an output holds a NaN.
        if "out" in kwargs:
            return [named for named in _named_arguments(args, kwargs) if _has_nan(named[1])]
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
        place: Callable[[], NodeOrigin],
    ) -> None:
        """Check what an operation has returned or changed in place; ``held`` is what `before` returned."""
        in_place = _is_in_place(name)
        outputs = list(tensors_in((result, args[0]) if in_place and args else (result,)))
        self._last = [weakref.ref(tensor) for tensor in outputs]
        if not any(map(holds_nan, outputs)):
            return
        given = list(_named_arguments(args[1:], kwargs, 1) if in_place else _named_arguments(args, kwargs))
        if not in_place and not list(tensors_in(value for _, value in given)):
            return  # made from nothing, so the NaN is wanted
        if not held and "out" not in kwargs:
            held = [named for named in given if _has_nan(named[1])]
        # An optimizer or a pass only hands on the NaN of a gradient: the operation that does so must not be blamed.
        if _is_of_gradients(bool(held), bool(place().module)):
            return
        if held:
            argument, value = held[0]
            raise self._error(f"{argument} of {name} holds NaN already: {self._source(value)}", name, place())
        inputs = [text for argument, value in given for text in _range(argument, value)]
        made_from = f" from {', '.join(inputs)}" if inputs else ""
        raise self._error(f"{name} made {_count_nans(outputs)}{made_from}; no input holds one", name, place())

    def pass_on(self, result: Any) -> None:
        """Remember what an unchecked operation has returned: a module that returns this tensor is not blamed for it."""
        if isinstance(result, torch.Tensor):
            self._last = [weakref.ref(result)]

    def returned(self, args: Any, result: Any, place: Callable[[], NodeOrigin], kind: str) -> None:
        """Check what a module of class ``kind`` has returned, unless the last operation returned it."""
        # Compiled code, whose operations no mode sees, has no other check.
        outputs = [tensor for tensor in tensors_in([result]) if not any(tensor is known() for known in self._last)]
        if not outputs or not self.applies(""):
            return
        self._last = [weakref.ref(tensor) for tensor in outputs]
        if not any(map(holds_nan, outputs)) or any(map(holds_nan, tensors_in([args]))):
            return
        raise self._error(
            f"{kind} returned {_count_nans(outputs)}, and its arguments hold none: compiled code in it, or an autograd "
            f"Function of yours, made it",
            kind,
            place(),
        )

    # -- errors -------------------------------------------------------------------------------

    def _source(self, value: Any) -> str:
        """Return a phrase that says where the NaN of an argument comes from."""
        tensor = next((tensor for tensor in tensors_in([value]) if holds_nan(tensor)), None)
        if tensor is None:
            return "it is a number in your code"
        node: Any = tensor.grad_fn
        if type(node) is RECEIVE:
            sender = self._name_of(node.end.peer)
            return f"it came from {sender}, with a call of {node.end.function}"
        if hasattr(node, "_forward_cls"):
            return f"your Function {node._forward_cls.__name__} made it"
        if tensor.is_leaf and tensor.requires_grad:
            return f"it is a leaf, such as a parameter ({_dtype_and_shape(tensor)})"
        if tensor.requires_grad:
            return "it was made by an operation that is not checked, or outside of this context"
        return "it is data that needs no gradient, or was made by an operation that is not checked"

    def _error(self, what: str, operation: str, place: NodeOrigin) -> ForwardNaN:
        where = f", in {place.module}" if place.module else ""
        line = f", at {place.line}" if place.line else ""
        error = ForwardNaN(f"{what}. That was on {self._worker}{where}{line}")
        error.worker, error.module, error.line, error.operation = self._worker, place.module, place.line, operation
        return error


_OPERATORS = "add sub mul matmul truediv floordiv div mod pow lshift rshift and xor or"
# The methods behind ``+=`` and its like; not all names that begin with ``__i``, such as ``__invert__``.
_IN_PLACE = {f"__i{operator}__" for operator in _OPERATORS.split()}


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


def _named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], first: int = 0) -> Iterator[Named]:
    yield from ((f"argument {number}", value) for number, value in enumerate(args, first))
    yield from ((f"argument {key}", value) for key, value in kwargs.items() if key != "out")


def _has_nan(value: Any) -> bool:
    return (isinstance(value, float) and value != value) or any(map(holds_nan, tensors_in([value])))


def _count_nans(outputs: Sequence[torch.Tensor]) -> str:
    tensor = next(filter(holds_nan, outputs))
    try:
        return f"{int(tensor.detach().isnan().sum())} NaN of {tensor.numel()} values ({_dtype_and_shape(tensor)})"
    except Exception:  # a sparse tensor, say, whatever torch raises for it: the error being made has less text then
        return f"NaN ({_dtype_and_shape(tensor)})"


def _range(argument: str, value: Any) -> Iterator[str]:
    for tensor in tensors_in([value]):
        try:
            low, high = map(float, torch.aminmax(tensor.detach()))
        except Exception:  # an empty, complex or sparse tensor, whatever torch raises for it
            yield f"{argument} ({_dtype_and_shape(tensor)})"
        else:
            yield f"{argument} ({_dtype_and_shape(tensor)}, {low:.4g} to {high:.4g})"


def _dtype_and_shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _is_of_check(code: CodeType) -> bool:
    return code.co_filename == __file__ or code.co_name in _NOTING_FUNCTIONS


def _is_of_gradients(given: bool, in_module: bool) -> bool:
    """Return whether torch or nbdist computes with gradients in the calling thread, outside of any forward pass."""
    if in_module:  # in its forward, no update runs: that of `torch.optim.swa_utils.AveragedModel` has a file of optim/
        return False
    # True below a frame of torch's optimizers, gradient clipping or scaler. Else the innermost frame outside of
    # torch decides: it must be nbdist's.
    for frame in outwards(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file.startswith(_UPDATE_FILES):
            return True
        if not file.startswith(TORCH) and not _is_of_check(frame.f_code):
            # `nbdist.rpc` calls functions of the user. `nbdist.nn` runs the stages of pipelines, too: it counts only
            # if an input held a NaN, which is a gradient's then.
            return file.startswith(NBDIST) and not is_nbdists(file, "rpc") and (given or not is_nbdists(file, "nn"))
    return False
