"""Stacks the requests of several clients into one along the batch, and cuts a request into parts along the batch.

::

    item A, 2 sequences ┐          ┌ result A
    item B, 3 sequences ┴─ stack ─► one call on 5 sequences ─► split ┴ result B        on a server

    item, 8 sequences ─ parts ─► item, 3 │ item, 3 │ item, 2                           on a client

A `StackLayout` says which arguments of a block have rows for each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class StackLayout(NamedTuple):
    """Says which arguments of a layer have rows for each sequence, by keyword or by position.

    An argument that is in neither field has one row for each sequence if it has as many rows as there are sequences,
    else none.
    """

    shared: frozenset[str | int] = frozenset()  # their rows do not belong to sequences, but for example to heads
    several: tuple[tuple[str | int, int], ...] = ()  # and the number of rows for each sequence

    def rows(self, tensor: torch.Tensor, batch: int, name: str | int) -> int:
        """Return how many rows of an argument each of ``batch`` sequences has; 0 if its rows are not for sequences."""
        if tensor.dim() < 2 or name in self.shared:
            return 0
        each = dict(self.several).get(name, 1)
        return each if tensor.shape[0] == each * batch else 0

    def select(self, call: Any, batch: int, which: Any) -> Any:
        """Return a `LayerCall` of ``batch`` sequences for those that ``which``, a slice or an index tensor, selects.

        Arguments without rows for sequences stay as they are.
        """
        args = tuple(self._select(value, place, batch, which) for place, value in enumerate(call.args))
        return type(call)(args, {name: self._select(value, name, batch, which) for name, value in call.kwargs.items()})

    def _select(self, value: Any, name: str | int, batch: int, which: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(self._select(each, name, batch, which) for each in value)
        each = self.rows(value, batch, name) if isinstance(value, torch.Tensor) else 0
        return value.reshape(batch, each, *value.shape[1:])[which].flatten(0, 1) if each else value


DEFAULT_LAYOUT = StackLayout()  # an argument with as many rows as there are sequences has one for each


def compare(one: Any, two: Any) -> StackLayout:
    """Find which arguments of a layer have rows for each sequence.

    ``one`` and ``two`` are the `LayerCall`s of the layer for one sequence, and for two sequences of the same length.
    """
    shared, several = set[str | int](), list[tuple[str | int, int]]()
    for first, second in ((dict(enumerate(one.args)), dict(enumerate(two.args))), (one.kwargs, two.kwargs)):
        for name, value in first.items():
            for own, other in zip(_tensors(value), _tensors(second[name]), strict=True):
                if own.dim() < 2 or own.shape[0] == 1:  # `rows` reads such an argument right by itself
                    continue
                if other.shape[0] == own.shape[0]:
                    shared.add(name)
                elif other.shape[0] == 2 * own.shape[0]:
                    several.append((name, own.shape[0]))
    return StackLayout(frozenset(shared), tuple(several))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if type(value) in (tuple, list) else []


class StackInput(NamedTuple):
    """The input of some blocks without a cache: hidden states, and the `LayerCall` and prompts of each block.

    ``gradient`` is the gradient of the output; None unless the gradient of the input is wanted.
    """

    hidden: torch.Tensor
    calls: tuple[Any, ...]
    prompts: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    layout: StackLayout = DEFAULT_LAYOUT


class _Differs(Exception):
    """Raised if requests differ in something that must be equal, so they cannot be stacked."""


def stack(items: Sequence[StackInput]) -> StackInput | None:
    """Stack items without prompts into one along the batch; return None if they differ in what must be equal."""
    if len(items) == 1:
        return items[0]
    if any(item.gradient is not None and item.gradient.shape != item.hidden.shape for item in items):
        return None  # a gradient has a wrong shape: stacked with others, it might fit by chance
    texts = _Texts([item.hidden.shape[0] for item in items], items[0].layout)
    try:
        calls = tuple(texts.join_calls(called) for called in _values_by_place([item.calls for item in items]))
    except _Differs:
        return None
    # The result has no prompts: `Server` computes a request with prompts alone.
    gradients = [item.gradient for item in items if item.gradient is not None]
    return StackInput(
        torch.cat([item.hidden for item in items]), calls, None, torch.cat(gradients) if gradients else None
    )


def split(found: Any, items: Sequence[StackInput]) -> list[Any]:
    """Split the result of stacked items, hidden states or (gradient, gradient of prompts), into one for each item."""
    sizes = [item.hidden.shape[0] for item in items]
    if isinstance(found, torch.Tensor):
        return list(found.split(sizes))
    gradient, prompts = found
    return [(part, prompts) for part in gradient.split(sizes)]


def _values_by_place(values: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    if any(len(value) != len(values[0]) for value in values):
        raise _Differs
    return list(zip(*values, strict=True))


class _Texts:
    """Joins the values that an argument has in several requests; ``batches`` has the requests' numbers of sequences."""

    def __init__(self, batches: Sequence[int], layout: StackLayout) -> None:
        self._batches = batches
        self._layout = layout

    def join_calls(self, calls: Sequence[Any]) -> Any:
        """Join the `LayerCall`s of one block."""
        first = calls[0]
        if any(call.kwargs.keys() != first.kwargs.keys() for call in calls):
            raise _Differs
        args = [self.join(each, place) for place, each in enumerate(_values_by_place([call.args for call in calls]))]
        kwargs = {name: self.join([call.kwargs[name] for call in calls], name) for name in first.kwargs}
        return type(first)(tuple(args), kwargs)

    def join(self, values: Sequence[Any], name: str | int) -> Any:
        """Join the values of one argument: tensors along the batch; others must be equal."""
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            raise _Differs
        if isinstance(first, torch.Tensor):
            return self._join_tensors(values, name)
        if type(first) in (tuple, list):
            return type(first)(self.join(each, name) for each in _values_by_place(values))
        if any(value != first for value in values):
            raise _Differs
        return first

    def _join_tensors(self, tensors: Sequence[torch.Tensor], name: str | int) -> torch.Tensor:
        """Concatenate tensors with rows for each sequence; tensors without such rows must be equal."""
        first = tensors[0]
        if any(tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype for tensor in tensors):
            raise _Differs
        rows = [self._layout.rows(tensor, batch, name) for tensor, batch in zip(tensors, self._batches, strict=True)]
        one_for_all = not any(rows) or all(tensor.dim() < 2 or tensor.shape[0] == 1 for tensor in tensors)
        if one_for_all and all(torch.equal(tensor, first) for tensor in tensors):
            return first
        if first.dim() < 2 or name in self._layout.shared:  # no rows to concatenate, and not equal
            raise _Differs
        # If a request has one row for all its sequences, repeat the row, so that each sequence has its own.
        each = [
            tensor.expand(batch, *tensor.shape[1:]) if not own and tensor.shape[0] == 1 else tensor
            for tensor, batch, own in zip(tensors, self._batches, rows, strict=True)
        ]
        counts = {self._layout.rows(tensor, batch, name) for tensor, batch in zip(each, self._batches, strict=True)}
        if len(counts) > 1 or 0 in counts:  # uncertain: better computed one by one than wrongly
            raise _Differs
        return torch.cat(each)


def parts(item: StackInput, size: int | None) -> list[StackInput]:
    """Cut an item, the input of some blocks, into parts of at most ``size`` sequences; None for one part."""
    batch = item.hidden.shape[0]
    if size is None or batch <= size:
        return [item]
    return [_part(item, batch, at, min(at + size, batch)) for at in range(0, batch, size)]


def _part(item: StackInput, batch: int, begin: int, end: int) -> StackInput:
    """Return ``item`` for the sequences from ``begin`` to before ``end`` of its ``batch``, without a gradient."""
    prompts = item.prompts
    if prompts is not None and prompts.shape[1] > 1:  # else all sequences share them
        prompts = prompts[:, begin:end]
    calls = tuple(item.layout.select(call, batch, slice(begin, end)) for call in item.calls)
    return StackInput(item.hidden[begin:end], calls, prompts, None, item.layout)
