"""A batch and its micro-batches: splitting what goes into a pipeline, joining what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nbdist.errors import UsageError

__all__ = ["as_tuple", "join", "portions", "rows_of", "split"]

Values = tuple[Any, ...]


def as_tuple(value: Any) -> Values:
    """What a stage is called with, from what the one before returned."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def rows_of(values: Values) -> int:
    """How many rows a batch has; all of its tensors have the same."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        raise UsageError("a pipeline needs a tensor whose rows it can split into micro-batches")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise UsageError("a tensor without dimensions has no rows to split into micro-batches")
    rows = {tensor.shape[0] for tensor in tensors}
    if len(rows) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise UsageError(f"the tensors of a batch have the same number of rows; these have the shapes {shapes}")
    count = rows.pop()
    if count == 0:
        raise UsageError("the batch is empty")
    return count


def portions(rows: int, micro_batches: int) -> list[int]:
    """The rows of each micro-batch: as many to each as can be, some one more; none where there are not enough rows.

    >>> portions(10, 4)
    [3, 3, 2, 2]
    >>> portions(2, 4)
    [1, 1]
    """
    count = min(rows, micro_batches)
    return [rows // count + (number < rows % count) for number in range(count)]


def split(values: Values, sizes: Sequence[int]) -> list[Values]:
    """The micro-batches of a batch; what is no tensor goes to each, and nothing has none."""
    if not values:
        return []
    parts = [value.split(list(sizes)) if isinstance(value, torch.Tensor) else [value] * len(sizes) for value in values]
    return list(zip(*parts, strict=True))


def join(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """One output from those of the micro-batches: their rows below each other, scalars as rows."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if not first.dim():
            return torch.stack(list(outputs))
        for output, size in zip(outputs, sizes, strict=True):
            if output.shape[0] != size:
                raise UsageError(
                    f"the output of a micro-batch of {size} rows has the shape {tuple(output.shape)}: the rows of the "
                    "outputs are put below each other, so the first dimension has to be that of the batch"
                )
        return torch.cat(list(outputs))
    if isinstance(first, tuple | list):
        parts = [join(part, sizes) for part in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, dict):
        return {key: join([output[key] for output in outputs], sizes) for key in first}
    return list(outputs)
