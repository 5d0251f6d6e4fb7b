"""Several clients' requests as one: their texts below each other, where all else of them is the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Item", "split", "stack"]


class Item(NamedTuple):
    """What goes through some blocks without a cache; with the gradient of what comes out, if that of it is wanted."""

    hidden: torch.Tensor
    calls: tuple[Any, ...]
    prompts: torch.Tensor | None = None
    gradient: torch.Tensor | None = None


class _Differs(Exception):
    """They cannot be one."""


def stack(items: Sequence[Item]) -> Item | None:
    """All as one, if they can be."""
    if len(items) == 1:
        return items[0]
    batches = [item.hidden.shape[0] for item in items]
    try:
        calls = tuple(
            type(items[0].calls[number])(
                *(
                    _joined([getattr(item.calls[number], part) for item in items], batches)
                    for part in ("args", "kwargs")
                )
            )
            for number in range(len(items[0].calls))
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


def _joined(values: Sequence[Any], batches: Sequence[int]) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise _Differs
    if isinstance(first, torch.Tensor):
        return _joined_tensors(values, batches)
    if type(first) in (tuple, list):
        if any(len(value) != len(first) for value in values):
            raise _Differs
        return type(first)(_joined(each, batches) for each in zip(*values, strict=True))
    if type(first) is dict:
        if any(value.keys() != first.keys() for value in values):
            raise _Differs
        return {name: _joined([value[name] for value in values], batches) for name in first}
    if any(value != first for value in values):
        raise _Differs
    return first


def _joined_tensors(tensors: Sequence[torch.Tensor], batches: Sequence[int]) -> torch.Tensor:
    first = tensors[0]
    if any(tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype for tensor in tensors):
        raise _Differs
    alike = all(torch.equal(tensor, first) for tensor in tensors)
    if alike and (first.dim() < 2 or first.shape[0] == 1):
        return first  # one for all
    if first.dim() < 2:
        raise _Differs
    # One for all texts of a request, one for each text, or one for each head of each.
    each = [
        tensor.expand(batch, *tensor.shape[1:]) if tensor.shape[0] == 1 else tensor
        for tensor, batch in zip(tensors, batches, strict=True)
    ]
    if any(tensor.shape[0] % batch for tensor, batch in zip(each, batches, strict=True)):
        raise _Differs
    if len({tensor.shape[0] // batch for tensor, batch in zip(each, batches, strict=True)}) > 1:
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
    calls = tuple(type(call)(*(_rows(value, batch, begin, end) for value in call)) for call in item.calls)
    return Item(item.hidden[begin:end], calls, prompts)


def _rows(value: Any, batch: int, begin: int, end: int) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_rows(each, batch, begin, end) for each in value)
    if type(value) is dict:
        return {name: _rows(each, batch, begin, end) for name, each in value.items()}
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[0] % batch:
        return value
    each = value.shape[0] // batch
    return value[begin * each : end * each]
