"""Merges several steps of a session into one, and splits a long step into several. Neither needs to know the model.

One step of many tokens fills a cache faster than many steps of one token. How the layers were called in each step is
read from the shapes of their arguments:

============================== =================================================================
shape of an argument           meaning
============================== =================================================================
(..., rows, columns), 4-D      a mask: a row for each new token, a column for each token in the cache
(batch, tokens, ...), 2-D, 3-D such as rotations: a row for each new token
(tokens,), 1-D                 such as positions: an entry for each new token
(..., cache), 2-D, 3-D         such as a padding mask: a column for each token in the cache
not a tensor                   has to be equal in all steps
============================== =================================================================

Anything else raises `Unmergeable`. The reading may still be wrong, so the client compares the output of a merged step
with the known outputs of the single steps (`is_near`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nbdist.swarm.history import History, Operation
from nbdist.swarm.stacking import DEFAULT_LAYOUT, StackLayout

# The relative difference, by dtype, up to which two results count as equal within rounding.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


class Unmergeable(Exception):
    """Raised if steps cannot be merged, or a step cannot be split: the meaning of a layer's argument is not known."""


class Merged(NamedTuple):
    """One step in place of many, with the operations on the cache already applied to its rows and tokens."""

    hidden: torch.Tensor
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]  # for each block: (args, kwargs)
    prompts: torch.Tensor | None  # as in `Step.prompts`
    result: torch.Tensor  # the concatenated outputs of the single steps, which the merged step should have as output


@dataclass
class _Piece:
    """A step after later operations on the cache. ``size`` of its tokens are left, from position ``begin`` on."""

    begin: int
    size: int
    values: Any  # (hidden, result, calls, prompts)

    @property
    def end(self) -> int:
        return self.begin + self.size

    @property
    def given(self) -> int:
        return int(self.values[0].shape[1])  # the step's tokens before later steps cropped some of them


def merge(history: History, layout: StackLayout = DEFAULT_LAYOUT) -> Merged:
    """Merge all steps of a span into one step, which rebuilds its cache; operations on the cache are applied.

    ``layout`` says which arguments of a layer have rows for each sequence. Raises `Unmergeable` if the meaning of an
    argument is not known, or if no tokens are left.
    """
    pieces: list[_Piece] = []
    batch = 0
    for step, result in zip(history.steps, history.results, strict=True):
        for operation in step.before:
            batch = _operate(pieces, operation, batch, layout)
        begin = pieces[-1].end if pieces else 0
        pieces.append(_Piece(begin, step.hidden.shape[1], (step.hidden, result, step.calls, step.prompts)))
        batch = step.hidden.shape[0]
    if not pieces:
        raise Unmergeable("no tokens are left")
    hiddens, results, calls_of, prompts = zip(*(piece.values for piece in pieces), strict=True)
    kept = [prompt[:, :, : piece.size] for prompt, piece in zip(prompts, pieces, strict=True) if prompt is not None]
    return Merged(
        _concatenated(hiddens, pieces, 1),
        [_merge_call([calls[number] for calls in calls_of], pieces) for number in range(len(calls_of[0]))],
        torch.cat([each.expand(-1, max(p.shape[1] for p in kept), -1, -1) for each in kept], 2) if kept else None,
        _concatenated(results, pieces, 1),
    )


def is_near(found: torch.Tensor, expected: torch.Tensor, calls: Sequence[Any] = ()) -> bool:
    """Return whether two results differ by rounding only; padding does not count.

    ``calls`` has the masks, as (args, kwargs) of each block.
    """
    if found.shape != expected.shape:
        return False
    if not expected.numel():
        return True
    for args, kwargs in calls:
        for mask in [*args, *kwargs.values()]:
            if isinstance(mask, torch.Tensor) and mask.dim() == 4:
                opened = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
                # A token from which the mask hides all tokens is padding: its output is never used, and depends on the
                # amount of padding.
                sees = opened.any(-1).any(1)[..., None]
                found, expected = found.where(sees, 0.0), expected.where(sees, 0.0)
    # The largest difference may be `_TOLERANCE` times the largest value: small values are rounded like the large ones
    # beside them.
    most = expected.abs().amax().item()
    return (found - expected).abs().amax().item() <= _TOLERANCE.get(expected.dtype, 0.0) * max(most, 1e-6)


# -- what is done to a cache between steps ------------------------------------------------------------


def _operate(pieces: list[_Piece], operation: Operation, batch: int, layout: StackLayout) -> int:
    """Apply an operation on the cache to the steps before it, ``pieces``; return the number of sequences afterwards."""
    name, args = operation
    if name == "crop":
        left = (pieces[-1].end if pieces else 0) + args[0]  # args[0] is the change in length, negative
        while pieces and pieces[-1].begin >= left:
            pieces.pop()
        if pieces:
            pieces[-1].size = left - pieces[-1].begin
        return batch
    if name == "activate_past_recording":  # makes sliding windows ready to be cropped; changes no tokens
        return batch
    if name in ("reorder_cache", "batch_select_indices"):
        rows = torch.arange(batch)[args[0]] if batch else torch.arange(0)
    elif name == "batch_repeat_interleave":
        rows = torch.arange(batch).repeat_interleave(args[0])
    else:
        raise Unmergeable(f"the cache was changed by an unknown operation {name}")
    for piece in pieces:
        hidden, result, calls, prompts = piece.values
        if prompts is not None and prompts.shape[1] > 1:
            prompts = prompts[:, rows]
        piece.values = hidden[rows], result[rows], [layout.select(call, batch, rows) for call in calls], prompts
    return len(rows)


# -- how layers were called ---------------------------------------------------------------------------


def _merge_call(calls: Sequence[tuple[Any, Any]], pieces: Sequence[_Piece]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (args, kwargs), *others = calls
    if any(len(other[0]) != len(args) or other[1].keys() != kwargs.keys() for other in others):
        raise Unmergeable("a layer has different arguments in different steps")
    return (
        tuple(_merge_values([call[0][place] for call in calls], pieces) for place in range(len(args))),
        {name: _merge_values([call[1][name] for call in calls], pieces) for name in kwargs},
    )


def _merge_values(values: Sequence[Any], pieces: Sequence[_Piece]) -> Any:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if tensors:
        if tensors[0].dim() == 4:
            return _merge_masks(values, pieces)  # some of the values may be None
        if len(tensors) < len(values):
            raise Unmergeable("an argument is a tensor in some steps, but not in all")
        return _merge_tensors(tensors, pieces)
    first = values[0]
    if type(first) in (tuple, list):
        if any(type(value) is not type(first) or len(value) != len(first) for value in values):
            raise Unmergeable("an argument is a list of different lengths in different steps")
        return type(first)(_merge_values(each, pieces) for each in zip(*values, strict=True))
    if any(value is not first and value != first for value in values):
        raise Unmergeable(f"an argument is {first!r} in the first step, but {values[-1]!r} in the last")
    return first


def _merge_tensors(tensors: Sequence[torch.Tensor], pieces: Sequence[_Piece]) -> torch.Tensor:
    """Merge the tensors that an argument has in all steps, by the module's table of shapes."""
    first = tensors[0]
    dim = 0 if first.dim() == 1 else 1  # of the tokens
    if first.dim() <= 3 and all(
        tensor.dim() == first.dim()
        and tensor.shape[dim] == piece.given
        and tensor.shape[dim + 1 :] == first.shape[dim + 1 :]
        for tensor, piece in zip(tensors, pieces, strict=True)
    ):
        return _concatenated(tensors, pieces, dim)
    if all(tensor.shape[-1] == piece.begin + piece.given for tensor, piece in zip(tensors, pieces, strict=True)):
        return tensors[-1][..., : pieces[-1].end]  # a column for each token in the cache: the last step has all
    raise Unmergeable(f"the meaning of an argument of shape {tuple(first.shape)} is not known")


def _concatenated(tensors: Sequence[torch.Tensor], pieces: Sequence[_Piece], dim: int) -> torch.Tensor:
    """Concatenate the tokens of each step's tensor that were not cropped; ``dim`` is the dimension of tokens."""
    kept = [tensor.narrow(dim, 0, piece.size) for tensor, piece in zip(tensors, pieces, strict=True)]
    most = max(tensor.shape[0] for tensor in kept)
    if dim and any(tensor.shape[0] != most for tensor in kept):  # some have one row for all sequences
        kept = [tensor.expand(most, *tensor.shape[1:]) for tensor in kept]
    return torch.cat(kept, dim)


def _merge_masks(masks: Sequence[torch.Tensor | None], pieces: Sequence[_Piece]) -> torch.Tensor:
    """Put the masks of all steps below each other. A step without a mask gets a causal mask."""
    known = next(mask for mask in masks if mask is not None)
    shut: Any = False if known.dtype == torch.bool else torch.finfo(known.dtype).min
    opened: Any = True if known.dtype == torch.bool else 0.0
    total = pieces[-1].end
    # The merged mask has a row and a column for each token. It hides all tokens, until each step's mask is copied in.
    rows = max(mask.shape[0] for mask in masks if mask is not None)
    found = torch.full((rows, known.shape[1], total, total), shut, dtype=known.dtype, device=known.device)
    for mask, piece in zip(masks, pieces, strict=True):
        if mask is None:
            for row in range(piece.begin, piece.end):
                found[:, :, row, : row + 1] = opened
            continue
        if mask.shape[-2] != piece.given:
            raise Unmergeable(f"a mask of shape {tuple(mask.shape)} does not have a row for each token of its step")
        # A mask's columns end at the end of its step, although some of the step's tokens may have been cropped since.
        last = piece.begin + piece.given
        first = last - mask.shape[-1]  # a mask with a sliding window has no columns for tokens before the window
        columns = slice(max(0, -first), mask.shape[-1] - max(0, last - total))
        found[:, :, piece.begin : piece.end, max(0, first) : min(last, total)] = mask[:, :, : piece.size, columns]
    return found


# -- splitting ----------------------------------------------------------------------------------------


def split(
    hidden: torch.Tensor, calls: Sequence[Any], begin: int, size: int, windows: Sequence[int | None], first: int = 0
) -> list[tuple[torch.Tensor, list[Any]]]:
    """Split a step of many tokens into steps of at most ``size`` tokens; return (hidden states, calls) of each.

    If the meaning of an argument is not known, the step is returned whole. ``begin`` is the number of tokens in the
    caches before the step, ``windows`` the sliding window of each layer of the model, ``first`` the number of the first
    layer in ``calls``.
    """
    total = hidden.shape[1]
    # The arguments of all layers are cut in the same way, except for the sliding window of each layer.
    by_layer = list(zip(calls, windows[first : first + len(calls)] or [None] * len(calls), strict=True))

    def part(at: int, to: int) -> tuple[torch.Tensor, list[Any]]:
        cut = [type(call)(*_cut_part(tuple(call), total, begin, at, to, window)) for call, window in by_layer]
        return hidden[:, at:to], cut

    try:
        return [part(at, min(at + size, total)) for at in range(0, total, size)]
    except Unmergeable:
        return [(hidden, list(calls))]


def _cut_part(value: Any, given: int, begin: int, at: int, to: int, window: int | None, name: str = "") -> Any:
    """Return the part of a layer's argument for the tokens from ``at`` to before ``to`` of a step.

    The step has ``given`` tokens, numbered from 0, after ``begin`` tokens in the cache. ``window`` is the layer's
    sliding window in tokens, or None; ``name`` is the argument's, if it is a keyword.
    """
    if type(value) in (tuple, list):
        return type(value)(_cut_part(each, given, begin, at, to, window) for each in value)
    if type(value) is dict:
        return {key: _cut_part(each, given, begin, at, to, window, key) for key, each in value.items()}
    if value is None and name == "attention_mask" and begin + at and to - at > 1:
        # No mask means a causal mask, but only in a step that begins the text. Any other part needs a real one.
        if window is not None and begin + to > window:
            raise Unmergeable("a layer with a sliding window has no mask")
        return torch.ones(to - at, begin + to, dtype=torch.bool).tril(begin + at)[None, None]
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 4 and value.shape[-2] == given:
        # The cache of a layer with a sliding window only returns the tokens within the window.
        columns = to - at + min(begin + at, (window or begin + at + 1) - 1)
        missing = begin + given - value.shape[-1]
        return value[:, :, at:to, begin + to - columns - missing : begin + to - missing]
    if value.dim() in (2, 3) and value.shape[1] == given:
        return value[:, at:to]
    if value.dim() == 1 and value.shape[0] == given:
        return value[at:to]
    if value.dim() in (2, 3) and value.shape[-1] == begin + given:
        return value[..., : begin + to]
    raise Unmergeable(f"the meaning of an argument of shape {tuple(value.shape)} is not known")
