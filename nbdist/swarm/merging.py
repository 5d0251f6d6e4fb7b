"""Several steps of a session as one: what is in a cache comes back faster in one piece than token by token.

No family of models is known here either, so that how layers were called in each step has to be read from the shapes:
masks have a row for each token that goes in and a column for each that is in the cache, rotations a row for each that
goes in. Whatever cannot be read so is not merged. And what was merged is checked: what came out behind the span in each
step is known, and has to come out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nbdist.swarm.history import History, Operation
from nbdist.swarm.stacking import ANY, Layout

__all__ = ["Merged", "Unmergeable", "is_near", "merge"]

_NEAR = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


class Unmergeable(Exception):
    """These steps have to be taken one by one."""


class Merged(NamedTuple):
    """One step instead of many; what was done to the cache before is done to it."""

    hidden: torch.Tensor
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    """Of each block: arguments by place, and by name."""
    prompts: torch.Tensor | None
    result: torch.Tensor
    """What is to come out."""


class _Piece:
    """What is left of one step, by the rows that there are now."""

    def __init__(self, begin: int, rows: int, values: Any) -> None:
        self.begin = begin
        self.size = rows
        self.values = values
        """(hidden, result, calls, prompts)"""

    @property
    def end(self) -> int:
        return self.begin + self.size


def merge(history: History, layout: Layout = ANY) -> Merged:
    """All steps of a span as one."""
    pieces: list[_Piece] = []
    batch = 0
    for step, result in zip(history.steps, history.results, strict=True):
        for operation in step.before:
            batch = _operate(pieces, operation, batch, layout)
        begin = pieces[-1].end if pieces else 0
        calls = [(tuple(args), dict(kwargs)) for args, kwargs in step.calls]
        pieces.append(_Piece(begin, step.hidden.shape[1], (step.hidden, result, calls, step.prompts)))
        batch = step.hidden.shape[0]
    if not pieces:
        raise Unmergeable("there is nothing")
    # A mask's columns end where its step did, of which some may have been cropped since.
    ends = [piece.begin + piece.values[0].shape[1] for piece in pieces]
    hiddens, results, calls_of, prompts = zip(*(piece.values for piece in pieces), strict=True)
    spots = [_Spot(piece.begin, piece.size, end, pieces[-1].end) for piece, end in zip(pieces, ends, strict=True)]
    kept = [prompt[:, :, : spot.size] for prompt, spot in zip(prompts, spots, strict=True) if prompt is not None]
    return Merged(
        _joined(hiddens, spots, 1),
        [_merge_call([calls[number] for calls in calls_of], spots) for number in range(len(calls_of[0]))],
        torch.cat([each.expand(-1, max(p.shape[1] for p in kept), -1, -1) for each in kept], 2) if kept else None,
        _joined(results, spots, 1),
    )


def is_near(found: torch.Tensor, expected: torch.Tensor, calls: Sequence[Any] = ()) -> bool:
    """Whether two results differ by rounding only, for those tokens that see anything: what comes out for padding is
    nobody's business, and depends on how much of it there is."""
    if found.shape != expected.shape:
        return False
    for args, kwargs in calls:
        for mask in [*args, *kwargs.values()]:
            if isinstance(mask, torch.Tensor) and mask.dim() == 4:
                opened = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
                sees = opened.any(-1).any(1)[..., None]
                found, expected = found.where(sees, 0.0), expected.where(sees, 0.0)
    most = expected.abs().amax().item()
    return (found - expected).abs().amax().item() <= _NEAR.get(expected.dtype, 0.0) * max(most, 1e-6)


# -- what is done to a cache between steps ------------------------------------------------------------


def _operate(pieces: list[_Piece], operation: Operation, batch: int, layout: Layout) -> int:
    name, args = operation
    if name == "crop":
        left = (pieces[-1].end if pieces else 0) + args[0]
        while pieces and pieces[-1].begin >= left:
            pieces.pop()
        if pieces:
            pieces[-1].size = left - pieces[-1].begin
        return batch
    change: Callable[[torch.Tensor], torch.Tensor]
    if name in ("reorder_cache", "batch_select_indices"):
        (rows,) = args
        change = lambda tensor: tensor[rows]  # noqa: E731
        after = len(torch.arange(batch)[rows]) if batch else 0
    elif name == "batch_repeat_interleave":
        change = lambda tensor: tensor.repeat_interleave(args[0], 0)  # noqa: E731
        after = batch * args[0]
    elif name == "activate_past_recording":  # of windows that are going to be cropped
        return batch
    else:
        raise Unmergeable(f"{name} is not known")
    for piece in pieces:
        hidden, result, calls, prompts = piece.values
        if prompts is not None and prompts.shape[1] > 1:
            prompts = change(prompts.transpose(0, 1)).transpose(0, 1)
        calls = [
            (
                tuple(_by_rows(value, place, batch, change, layout) for place, value in enumerate(args)),
                {name: _by_rows(value, name, batch, change, layout) for name, value in kwargs.items()},
            )
            for args, kwargs in calls
        ]
        piece.values = change(hidden), change(result), calls, prompts
    return after


def _by_rows(
    value: Any, name: str | int, batch: int, change: Callable[[torch.Tensor], torch.Tensor], layout: Layout
) -> Any:
    """Change the rows of what has some for each text."""
    if type(value) in (tuple, list):
        return type(value)(_by_rows(each, name, batch, change, layout) for each in value)
    each = layout.rows(value, batch, name) if isinstance(value, torch.Tensor) else 0
    if not each:
        return value
    shape = value.shape
    return change(value.reshape(batch, each, *shape[1:])).reshape(-1, *shape[1:])


# -- how layers were called ---------------------------------------------------------------------------


class _Spot(NamedTuple):
    """Where a step is in the text."""

    begin: int
    size: int
    """So many of its tokens are left;"""
    end: int
    """and so many were in the cache behind it, with those that are not."""
    total: int

    @property
    def given(self) -> int:
        """So many it had."""
        return self.end - self.begin


def _merge_call(calls: Sequence[tuple[Any, Any]], spots: Sequence[_Spot]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (args, kwargs), *others = calls
    if any(len(other[0]) != len(args) or other[1].keys() != kwargs.keys() for other in others):
        raise Unmergeable("the steps are called in different ways")
    return (
        tuple(_merge_values([call[0][place] for call in calls], spots) for place in range(len(args))),
        {name: _merge_values([call[1][name] for call in calls], spots) for name in kwargs},
    )


def _merge_values(values: Sequence[Any], spots: Sequence[_Spot]) -> Any:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if tensors:
        if tensors[0].dim() == 4:
            return _merge_masks(values, spots)
        if len(tensors) < len(values):
            raise Unmergeable("an argument is a tensor in some steps only")
        return _merge_tensors(tensors, spots)
    first = values[0]
    if type(first) in (tuple, list):
        if any(type(value) is not type(first) or len(value) != len(first) for value in values):
            raise Unmergeable("an argument has several lengths")
        return type(first)(_merge_values(each, spots) for each in zip(*values, strict=True))
    if any(value is not first and value != first for value in values):
        raise Unmergeable(f"an argument is {first!r} in one step, and {values[-1]!r} in the last")
    return first


def _merge_tensors(tensors: Sequence[torch.Tensor], spots: Sequence[_Spot]) -> torch.Tensor:
    first = tensors[0]
    for dim in (0,) if first.dim() == 1 else (1,):
        if first.dim() <= 3 and all(
            tensor.dim() == first.dim()
            and tensor.shape[dim] == spot.given
            and tensor.shape[dim + 1 :] == first.shape[dim + 1 :]
            for tensor, spot in zip(tensors, spots, strict=True)
        ):
            return _joined(tensors, spots, dim)
    if all(tensor.shape[-1] == spot.end for tensor, spot in zip(tensors, spots, strict=True)):
        return tensors[-1][..., : spots[-1].total]  # a column for each token of the cache: the last has them all
    raise Unmergeable(f"an argument of shape {tuple(first.shape)} is not understood")


def _joined(tensors: Sequence[torch.Tensor], spots: Sequence[_Spot], dim: int) -> torch.Tensor:
    kept = [tensor.narrow(dim, 0, spot.size) for tensor, spot in zip(tensors, spots, strict=True)]
    most = max(tensor.shape[0] for tensor in kept)
    if dim and any(tensor.shape[0] != most for tensor in kept):  # one for all texts, or one for each
        kept = [tensor.expand(most, *tensor.shape[1:]) for tensor in kept]
    return torch.cat(kept, dim)


def _merge_masks(masks: Sequence[torch.Tensor | None], spots: Sequence[_Spot]) -> torch.Tensor:
    """Masks one below the other; where there was none in a step, each token saw all until itself."""
    known = next(mask for mask in masks if mask is not None)
    shut: Any = False if known.dtype == torch.bool else torch.finfo(known.dtype).min
    opened: Any = True if known.dtype == torch.bool else 0.0
    total = spots[-1].total
    rows = max(mask.shape[0] for mask in masks if mask is not None)
    found = torch.full((rows, known.shape[1], total, total), shut, dtype=known.dtype, device=known.device)
    for mask, spot in zip(masks, spots, strict=True):
        if mask is None:
            for row in range(spot.begin, spot.begin + spot.size):
                found[:, :, row, : row + 1] = opened
            continue
        if mask.shape[-2] != spot.given:
            raise Unmergeable(f"a mask of shape {tuple(mask.shape)} is not understood")
        first = spot.end - mask.shape[-1]  # with a window, what lies before has no column
        columns = slice(max(0, -first), mask.shape[-1] - max(0, spot.end - total))
        found[:, :, spot.begin : spot.begin + spot.size, max(0, first) : min(spot.end, total)] = mask[
            :, :, : spot.size, columns
        ]
    return found


# -- the other way round ------------------------------------------------------------------------------


def split(
    hidden: torch.Tensor,
    calls: Sequence[Any],
    begin: int,
    size: int,
    windows: Sequence[int | None],
    first: int = 0,
) -> list[tuple[torch.Tensor, list[Any]]]:
    """A step of many tokens as several of at most ``size``; one where that cannot be read from the shapes.

    ``begin`` tokens are in the caches before; ``windows`` says how far each layer looks back, ``first`` which is first.
    """
    total = hidden.shape[1]
    cuts = [(at, min(at + size, total)) for at in range(0, total, size)]
    try:
        return [
            (
                hidden[:, at:to],
                [
                    type(call)(
                        *(
                            _cut(part, total, begin, at, to, windows[first + number] if windows else None)
                            for part in call
                        )
                    )
                    for number, call in enumerate(calls)
                ],
            )
            for at, to in cuts
        ]
    except Unmergeable:
        return [(hidden, list(calls))]


def _cut(value: Any, given: int, begin: int, at: int, to: int, window: int | None, name: str = "") -> Any:
    """What of an argument belongs to some of the tokens of its step."""
    if type(value) in (tuple, list):
        return type(value)(_cut(each, given, begin, at, to, window) for each in value)
    if type(value) is dict:
        return {key: _cut(each, given, begin, at, to, window, key) for key, each in value.items()}
    if value is None and name == "attention_mask" and begin + at and to - at > 1:
        # None means that each sees all before; that is only known of a step that has the whole text.
        if window is not None and begin + to > window:
            raise Unmergeable("a window without a mask")
        return torch.ones(to - at, begin + to, dtype=torch.bool).tril(begin + at)[None, None]
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 4 and value.shape[-2] == given:
        # Of a window, the cache hands out what lies before as far as it reaches.
        columns = to - at + min(begin + at, (window or begin + at + 1) - 1)
        missing = begin + given - value.shape[-1]
        return value[:, :, at:to, begin + to - columns - missing : begin + to - missing]
    if value.dim() in (2, 3) and value.shape[1] == given:
        return value[:, at:to]
    if value.dim() == 1 and value.shape[0] == given:
        return value[at:to]
    if value.dim() in (2, 3) and value.shape[-1] == begin + given:
        return value[..., : begin + to]
    raise Unmergeable(f"an argument of shape {tuple(value.shape)} is not understood")
