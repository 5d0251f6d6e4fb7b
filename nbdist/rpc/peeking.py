"""What a value looks like, told by its owner: numbers about it instead of the value itself.

Pure, and run where the value is: a look at ten gigabytes sends one kilobyte.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import msgspec
import torch

__all__ = ["Histogram", "Numbers", "Parameter", "Peek", "look"]

_BINS = 24
_FIRST = 8
_SHOWN = 400
_BARS = " ▁▂▃▄▅▆▇█"
_ROWS = 40


class Histogram(msgspec.Struct, frozen=True):
    """How many of the finite values lie in each of some equal parts of their range."""

    low: float
    high: float
    counts: list[int]

    def __str__(self) -> str:
        most = max(self.counts)
        bars = "".join(_BARS[math.ceil(count / most * (len(_BARS) - 1))] for count in self.counts)
        return f"{self.low:.4g} {bars} {self.high:.4g}"


class Numbers(msgspec.Struct, frozen=True):
    """About a tensor."""

    shape: list[int]
    dtype: str
    device: str
    min: float | None
    max: float | None
    mean: float | None
    norm: float | None
    """Of the finite values, as are those before; None where there are none."""
    nans: int
    infs: int
    first: list[str]
    histogram: Histogram | None


class Parameter(msgspec.Struct, frozen=True):
    """A row of a module's table."""

    name: str
    shape: list[int]
    dtype: str
    device: str
    requires_grad: bool
    norm: float | None
    nans: int


class Peek(msgspec.Struct, frozen=True):
    """What was seen of a value: of a tensor its numbers, of a module its parameters, of others their text."""

    type: str
    owner: str
    text: str = ""
    length: int | None = None
    numbers: Numbers | None = None
    parameters: list[Parameter] = []

    def __repr__(self) -> str:
        lines = [f"{self.type} on {self.owner}" + (f", {self.length} items" if self.length is not None else "")]
        if self.numbers is not None:
            lines += _told(self.numbers)
        if self.parameters:
            lines += _table(self.parameters[:_ROWS])
            if len(self.parameters) > _ROWS:
                lines.append(f"  … and {len(self.parameters) - _ROWS} more")
        if self.text:
            lines.append(f"  {self.text}")
        return "\n".join(lines)


def look(value: Any, owner: str) -> Peek:
    """Look at a value."""
    kind = type(value).__qualname__
    if isinstance(value, torch.Tensor):
        return Peek(kind, owner, numbers=_numbers(value))
    if isinstance(value, torch.nn.Module):
        found = [_parameter(name, parameter) for name, parameter in value.named_parameters()]
        return Peek(kind, owner, parameters=found, text="" if found else "no parameters")
    length = len(value) if isinstance(value, Sized) and isinstance(value, Mapping | Sequence | set) else None
    try:
        text = repr(value)
    except Exception as error:  # of the user's class
        text = f"its repr() raises {type(error).__name__}: {error}"
    return Peek(kind, owner, text=text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…", length=length)


def _numbers(tensor: torch.Tensor) -> Numbers:
    about = list(tensor.shape), _name_of(tensor.dtype), str(tensor.device)
    if tensor.is_meta:  # which has no values
        return Numbers(*about, None, None, None, None, 0, 0, [], None)
    with torch.no_grad():
        flat = _values(tensor)
        first = [_text(each) for each in flat[:_FIRST].tolist()]
        if flat.is_complex() or not flat.numel():
            return Numbers(*about, None, None, None, _norm(flat), *_odd(flat), first, None)
        # Half precision overflows in sums, and integers have no mean.
        real = flat.double() if flat.device.type != "mps" else flat.float()
        finite = real[torch.isfinite(real)]
        if not finite.numel():
            return Numbers(*about, None, None, None, None, *_odd(flat), first, None)
        low, high = float(finite.min()), float(finite.max())
        counts = torch.histc(finite.cpu(), _BINS, low, high).long().tolist() if low < high else [finite.numel()]
        mean, norm = float(finite.mean()), float(torch.linalg.vector_norm(finite))
        return Numbers(*about, low, high, mean, norm, *_odd(flat), first, Histogram(low, high, counts))


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """All that are stored, in a row."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    elif tensor.is_quantized:
        tensor = tensor.dequantize()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.reshape(-1)


def _norm(flat: torch.Tensor) -> float | None:
    return float(torch.linalg.vector_norm(flat)) if flat.numel() and bool(torch.isfinite(flat).all()) else None


def _odd(flat: torch.Tensor) -> tuple[int, int]:
    """How many values are not numbers, and how many are infinite."""
    return int(torch.isnan(flat).sum()), int(torch.isinf(flat).sum())


def _parameter(name: str, parameter: torch.Tensor) -> Parameter:
    with torch.no_grad():
        flat = _values(parameter if not parameter.is_meta else torch.empty(0))
        wide = flat if flat.is_complex() else flat.double() if flat.device.type != "mps" else flat.float()
        return Parameter(
            name,
            list(parameter.shape),
            _name_of(parameter.dtype),
            str(parameter.device),
            parameter.requires_grad,
            _norm(wide),
            int(torch.isnan(flat).sum()),
        )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _told(numbers: Numbers) -> list[str]:
    lines = [f"  {numbers.dtype}{tuple(numbers.shape)} on {numbers.device}"]
    known = [("min", numbers.min), ("max", numbers.max), ("mean", numbers.mean), ("norm", numbers.norm)]
    if told := ", ".join(f"{name} {value:.5g}" for name, value in known if value is not None):
        lines.append(f"  {told}")
    if numbers.nans or numbers.infs:
        lines.append(f"  {numbers.nans} NaN, {numbers.infs} infinite")
    if numbers.histogram is not None:
        lines.append(f"  {numbers.histogram}")
    if numbers.first:
        left = math.prod(numbers.shape) > len(numbers.first)
        lines.append(f"  first {', '.join(numbers.first)}{', …' if left else ''}")
    return lines


def _table(rows: Sequence[Parameter]) -> list[str]:
    cells = [
        (
            row.name,
            f"{row.dtype}{tuple(row.shape)}",
            row.device,
            "" if row.requires_grad else "frozen",
            f"norm {row.norm:.4g}" if row.norm is not None else "",
            f"{row.nans} NaN" if row.nans else "",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  " + "  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
