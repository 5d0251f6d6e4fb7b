"""Several clients' requests as one: their texts below each other, where all else of them is the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Item", "split", "stack"]


class Layout(NamedTuple):
    """Which arguments of a layer have rows for each text; by name, or by place. Of those in neither, what has as many
    rows as there are texts has one for each."""

    shared: frozenset[str | int] = frozenset()
    """These have rows that are no texts', such as one for each head;"""
    several: tuple[tuple[str | int, int], ...] = ()
    """and these so many for each text."""

    def rows(self, tensor: torch.Tensor, batch: int, name: str | int) -> int:
        """How many rows each text has; none if they are not texts'."""
        if tensor.dim() < 2 or name in self.shared:
            return 0
        each = dict(self.several).get(name, 1)
        return each if tensor.shape[0] == each * batch else 0


ANY = Layout()


def compare(one: Any, two: Any) -> Layout:
    """The layout of calls, of how a layer was called for one text, and for two of the same length."""
    shared, several = set[str | int](), list[tuple[str | int, int]]()
    for first, second in ((dict(enumerate(one.args)), dict(enumerate(two.args))), (one.kwargs, two.kwargs)):
        for name, value in first.items():
            pairs = zip(_tensors(value), _tensors(second[name]), strict=True)
            for own, other in pairs:
                if own.dim() < 2 or own.shape[0] == 1:
                    continue
                if other.shape[0] == own.shape[0]:
                    shared.add(name)
                elif other.shape[0] == 2 * own.shape[0]:
                    several.append((name, own.shape[0]))
    return Layout(frozenset(shared), tuple(several))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if type(value) in (tuple, list) else []


class Item(NamedTuple):
    """What goes through some blocks without a cache; with the gradient of what comes out, if that of it is wanted."""

    hidden: torch.Tensor
    calls: tuple[Any, ...]
    prompts: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    layout: Layout = ANY


class _Differs(Exception):
    """They cannot be one."""


def stack(items: Sequence[Item]) -> Item | None:
    """All as one, if they can be."""
    if len(items) == 1:
        return items[0]
    if any(item.gradient is not None and item.gradient.shape != item.hidden.shape for item in items):
        return None  # one is wrong: that could come right by another's
    texts = _Texts([item.hidden.shape[0] for item in items], items[0].layout)
    try:
        calls = tuple(
            type(items[0].calls[number])(
                tuple(texts.join(each, place) for place, each in enumerate(_aligned([call.args for call in called]))),
                texts.join_named([call.kwargs for call in called]),
            )
            for number in range(len(items[0].calls))
            for called in [[item.calls[number] for item in items]]
        )
    except _Differs:
        return None
    gradients = [item.gradient for item in items if item.gradient is not None]
    return Item(torch.cat([item.hidden for item in items]), calls, None, torch.cat(gradients) if gradients else None)


def split(found: Any, items: Sequence[Item]) -> list[Any]:
    """What came out of all, for each of them."""
    sizes = [item.hidden.shape[0] for item in items]
    if isinstance(found, torch.Tensor):
        return list(found.split(sizes))
    gradient, prompts = found
    return [(part, prompts) for part in gradient.split(sizes)]


def _aligned(values: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    if any(len(value) != len(values[0]) for value in values):
        raise _Differs
    return list(zip(*values, strict=True))


class _Texts:
    """Those of several requests, to be put below each other."""

    def __init__(self, batches: Sequence[int], layout: Layout) -> None:
        self._batches = batches
        self._layout = layout

    def join_named(self, values: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if any(value.keys() != values[0].keys() for value in values):
            raise _Differs
        return {name: self.join([value[name] for value in values], name) for name in values[0]}

    def join(self, values: Sequence[Any], name: str | int) -> Any:
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            raise _Differs
        if isinstance(first, torch.Tensor):
            return self._join_tensors(values, name)
        if type(first) in (tuple, list):
            return type(first)(self.join(each, name) for each in _aligned(values))
        if any(value != first for value in values):
            raise _Differs
        return first

    def _join_tensors(self, tensors: Sequence[torch.Tensor], name: str | int) -> torch.Tensor:
        first = tensors[0]
        if any(tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype for tensor in tensors):
            raise _Differs
        rows = [self._layout.rows(tensor, batch, name) for tensor, batch in zip(tensors, self._batches, strict=True)]
        one_for_all = not any(rows) or all(tensor.dim() < 2 or tensor.shape[0] == 1 for tensor in tensors)
        if one_for_all and all(torch.equal(tensor, first) for tensor in tensors):
            return first
        if first.dim() < 2 or name in self._layout.shared:
            raise _Differs
        # One for all texts of a request, or some for each text.
        each = [
            tensor.expand(batch, *tensor.shape[1:]) if not own and tensor.shape[0] == 1 else tensor
            for tensor, batch, own in zip(tensors, self._batches, rows, strict=True)
        ]
        counts = {self._layout.rows(tensor, batch, name) for tensor, batch in zip(each, self._batches, strict=True)}
        if len(counts) > 1 or 0 in counts:
            raise _Differs
        return torch.cat(each)


def parts(item: Item, size: int | None) -> list[Item]:
    """The other way round: some texts each."""
    batch = item.hidden.shape[0]
    if size is None or batch <= size:
        return [item]
    return [_part(item, batch, at, min(at + size, batch)) for at in range(0, batch, size)]


def _part(item: Item, batch: int, begin: int, end: int) -> Item:
    prompts = item.prompts
    if prompts is not None and prompts.shape[1] > 1:
        prompts = prompts[:, begin:end]
    rows = _Rows(batch, begin, end, item.layout)
    calls = tuple(
        type(call)(
            tuple(rows.of(value, place) for place, value in enumerate(call.args)),
            {name: rows.of(value, name) for name, value in call.kwargs.items()},
        )
        for call in item.calls
    )
    return Item(item.hidden[begin:end], calls, prompts, None, item.layout)


class _Rows(NamedTuple):
    """Some of the texts of a request."""

    batch: int
    begin: int
    end: int
    layout: Layout

    def of(self, value: Any, name: str | int) -> Any:
        """What of an argument is theirs."""
        if type(value) in (tuple, list):
            return type(value)(self.of(each, name) for each in value)
        if not isinstance(value, torch.Tensor):
            return value
        each = self.layout.rows(value, self.batch, name)
        return value[self.begin * each : self.end * each] if each else value
