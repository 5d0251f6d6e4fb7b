"""Splits a batch into micro-batches, and joins the outputs of the micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nbdist.errors import UsageError

Values = tuple[Any, ...]  # the positional arguments of a stage, or the targets of a loss function


def as_tuple(value: Any) -> Values:
    """Return the items of a tuple or list as a tuple, such as a stage's output; any other value becomes one item."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def wants_grad(value: Any) -> bool:
    """Return whether a value is a tensor that requires grad."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def rows_of(values: Values) -> int:
    """Return the number of rows of a batch: the first dimension of its tensors, which must be the same in all."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        raise UsageError(
            "the batch has no tensor: a pipeline needs a tensor whose rows it can split into micro-batches"
        )
    if any(tensor.dim() == 0 for tensor in tensors):
        raise UsageError(
            "a tensor without dimensions has no rows to split into micro-batches: give a number instead (x.item())"
        )
    rows = {tensor.shape[0] for tensor in tensors}
    if len(rows) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise UsageError(
            f"the tensors of a batch must have the same number of rows (their first dimension); these have the shapes "
            f"{shapes}"
        )
    count = rows.pop()
    if count == 0:
        raise UsageError("the batch is empty: its tensors have 0 rows")
    return count


def training_rows(inputs: Values, targets: Values) -> int:
    """Return the number of rows of a batch to train on; raises `UsageError` for inputs and targets that do not fit."""
    if any(map(wants_grad, (*inputs, *targets))):
        raise UsageError(
            "an input or target of train_step requires grad, but train_step gives its inputs and targets no "
            "gradient: detach() them, or use forward and dist_autograd.backward"
        )
    return rows_of_both(inputs, targets)


def rows_of_both(inputs: Values, targets: Values) -> int:
    """Return the number of rows of inputs and of targets; raises `UsageError` unless both have the same number."""
    rows = rows_of(inputs)
    if not any(isinstance(target, torch.Tensor) for target in targets):
        raise UsageError("the targets of train_step have no tensor whose rows could go to the micro-batches")
    if rows_of(targets) != rows:
        raise UsageError(
            f"the batch has {rows} rows of inputs, and {rows_of(targets)} of targets: give the same number of both"
        )
    return rows


def portions(rows: int, micro_batches: int) -> list[int]:
    """Return the number of rows of each micro-batch: all alike, or the first ones have one more.

    With fewer rows than micro-batches, there is one micro-batch for each row.

    >>> portions(10, 4)
    [3, 3, 2, 2]
    >>> portions(2, 4)
    [1, 1]
    """
    count = min(rows, micro_batches)
    return [rows // count + (number < rows % count) for number in range(count)]


def check_micro_batches(micro_batches: int) -> int:
    """Return the number of micro-batches of a batch. Raises UsageError if it is no whole number or less than 1."""
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise UsageError(
            f"a batch has at least one micro-batch: micro_batches is a whole number, not {micro_batches!r}"
        )
    return micro_batches


def split(values: Values, sizes: Sequence[int]) -> list[Values]:
    """Return the micro-batches of a batch: tensors are split by rows, every micro-batch gets all other values."""
    if not values:
        return []
    parts = [value.split(list(sizes)) if isinstance(value, torch.Tensor) else [value] * len(sizes) for value in values]
    return list(zip(*parts, strict=True))


def join(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the output of a batch, made of the outputs of the micro-batches as `Pipeline.forward` describes."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if not first.dim():
            return torch.stack(list(outputs))
        for output, size in zip(outputs, sizes, strict=True):
            if output.shape[0] != size:
                raise UsageError(
                    f"the output of a micro-batch of {size} rows has the shape {tuple(output.shape)}. Outputs are "
                    "concatenated by rows, so the first dimension of a tensor that the last stage returns must be the "
                    "rows, unless it is a scalar"
                )
        return torch.cat(list(outputs))
    if isinstance(first, tuple | list):
        parts = [join(part, sizes) for part in zip(*outputs, strict=True)]
        # A namedtuple takes its items one by one.
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, dict):
        return {key: join([output[key] for output in outputs], sizes) for key in first}
    return list(outputs)
