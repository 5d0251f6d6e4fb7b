"""Describes a value by numbers that its owner computes: a peek at ten gigabytes sends one kilobyte. Pure."""

from __future__ import annotations

import contextlib
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.nn.parameter import is_lazy

from nbdist.columns import aligned
from nbdist.rpc.references.describing import dtype_name

_BINS = 24  # the bars of a histogram
_FIRST_ELEMENTS = 8  # the number of a tensor's first elements that are shown
_REPR_LENGTH = 400  # the most characters of a value's repr
_BARS = " ▁▂▃▄▅▆▇█"
_ROWS_SHOWN = 40  # the most parameters of a module that are printed
_ELEMENTS_A_PART = 1 << 20  # the number of elements that are converted to float64 at a time


class Histogram(msgspec.Struct, frozen=True):
    """The counts of finite elements in equal parts of the range from ``low`` to ``high``."""

    low: float
    high: float
    counts: list[int]

    def __str__(self) -> str:
        most = max(1, *self.counts)
        bars = "".join(_BARS[math.ceil(count / most * (len(_BARS) - 1))] for count in self.counts)
        return f"{self.low:.4g} {bars} {self.high:.4g}"


class Numbers(msgspec.Struct, frozen=True):
    """The numbers that describe a tensor. ``min`` to ``norm`` are those of its finite elements; None if it has none.

    For complex elements, ``min``, ``max`` and ``mean`` are None. ``first`` has the first elements as texts.
    """

    shape: list[int]
    dtype: str
    device: str
    min: float | None
    max: float | None
    mean: float | None
    norm: float | None
    nans: int
    infs: int
    first: list[str]
    histogram: Histogram | None


class Parameter(msgspec.Struct, frozen=True):
    """A row of a module's table: one parameter."""

    name: str
    shape: list[int]
    dtype: str
    device: str
    requires_grad: bool
    norm: float | None
    nans: int


class Peek(msgspec.Struct, frozen=True):
    """The description of a value: ``numbers`` for a tensor, ``parameters`` for a module, ``text`` for anything else.

    ``type`` is the name of the value's class, ``owner`` the name of the worker that has the value, ``length`` the
    number of items of a collection. The repr is a table for people.
    """

    type: str
    owner: str
    text: str = ""
    length: int | None = None
    numbers: Numbers | None = None
    parameters: list[Parameter] = []

    def __repr__(self) -> str:
        lines = [f"{self.type} on {self.owner}" + (f", {self.length} items" if self.length is not None else "")]
        if self.numbers is not None:
            lines += _lines_of_numbers(self.numbers)
        if self.parameters:
            lines += _table(self.parameters[:_ROWS_SHOWN])
            if len(self.parameters) > _ROWS_SHOWN:
                lines.append(f"  … and {len(self.parameters) - _ROWS_SHOWN} more")
        if self.text:
            lines.append(f"  {self.text}")
        return "\n".join(lines)


def look(value: Any, owner: str) -> Peek:
    """Return the description of a value that the worker named ``owner`` has, even if torch cannot compute with it."""
    kind = type(value).__qualname__
    if isinstance(value, torch.Tensor):
        return Peek(kind, owner, numbers=_numbers(value))
    if isinstance(value, torch.nn.Module):
        try:
            found = [_parameter(name, parameter) for name, parameter in value.named_parameters()]
        except Exception as error:  # from the user's class; a proxy for a module on another worker refuses
            return Peek(kind, owner, text=f"{type(error).__name__}: {error}")
        return Peek(kind, owner, parameters=found, text="" if found else "no parameters")
    length = None
    if isinstance(value, Mapping | Sequence | set):
        with contextlib.suppress(Exception):  # from the user's class
            length = len(value)
    return Peek(kind, owner, text=_short_repr(value), length=length)


def _short_repr(value: Any) -> str:
    """Return the repr of a value, shortened to `_REPR_LENGTH` characters; if it raises an error, say so in the text."""
    try:
        text = _short.repr(value) if isinstance(value, _LONG) else repr(value)
    except Exception as error:  # from the user's class
        return f"its repr() raises {type(error).__name__}: {error}"
    return text if len(text) <= _REPR_LENGTH else f"{text[:_REPR_LENGTH]}…"


_LONG = (str, bytes, list, tuple, set, frozenset, dict)
_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 30
_short.maxstring = _short.maxother = _short.maxlong = _REPR_LENGTH


def _numbers(tensor: torch.Tensor) -> Numbers:
    # A lazy parameter has no shape yet.
    shape = [] if is_lazy(tensor) or tensor.is_nested else list(tensor.shape)
    about = shape, dtype_name(tensor.dtype), str(tensor.device)
    try:
        with torch.no_grad():
            return _summary(about, _values(tensor))
    except Exception:  # from a kind of tensor that has no values, or that torch cannot compute with
        return Numbers(*about, None, None, None, None, 0, 0, [], None)


def _summary(about: tuple[list[int], str, str], flat: torch.Tensor) -> Numbers:
    first = [f"{each:.5g}" if isinstance(each, float) else str(each) for each in flat[:_FIRST_ELEMENTS].tolist()]
    low, high, total, squares, count, nans, infs = math.inf, -math.inf, 0.0, 0.0, 0, 0, 0
    for part in _in_parts(flat):
        finite = part[torch.isfinite(part)]
        nans += int(torch.isnan(part).sum())
        infs += int(torch.isinf(part).sum())
        if finite.numel():
            squares += float(torch.linalg.vector_norm(finite)) ** 2
            if not part.is_complex():
                low, high = min(low, float(finite.min())), max(high, float(finite.max()))
                total += float(finite.sum())
            count += finite.numel()
    norm = math.sqrt(squares) if count else None
    if low > high:
        return Numbers(*about, None, None, None, norm, nans, infs, first, None)
    return Numbers(*about, low, high, total / count, norm, nans, infs, first, _histogram(flat, low, high, count))


def _histogram(flat: torch.Tensor, low: float, high: float, count: int) -> Histogram:
    """Count the ``count`` finite elements in `_BINS` equal parts of the range; in one part if all are equal."""
    if low == high:
        return Histogram(low, high, [count])
    counts = torch.zeros(_BINS, dtype=torch.int64)
    for part in _in_parts(flat):
        finite = part[torch.isfinite(part)]
        # Halves are subtracted, because the whole range may be too wide for a number.
        place = (finite / 2 - low / 2) / (high / 2 - low / 2) * _BINS
        counts += torch.bincount(place.long().clamp(0, _BINS - 1).cpu(), minlength=_BINS)
    return Histogram(low, high, counts.tolist())


def _in_parts(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements in parts of `_ELEMENTS_A_PART`, as float64, whose sums do not overflow."""
    # In parts, because the owner may have no room for a copy of the whole tensor.
    for start in range(0, flat.numel(), _ELEMENTS_A_PART):
        part = flat[start : start + _ELEMENTS_A_PART]
        if part.is_complex():
            yield part.to(torch.complex128)
        else:
            yield part.double() if part.device.type != "mps" else part.float()  # Apple's GPU has no float64


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements as a vector; for a sparse COO tensor, only the elements that it stores."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    elif tensor.is_quantized:
        tensor = tensor.dequantize()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.reshape(-1)


def _parameter(name: str, parameter: torch.Tensor) -> Parameter:
    found = _numbers(parameter)
    return Parameter(name, found.shape, found.dtype, found.device, parameter.requires_grad, found.norm, found.nans)


def _lines_of_numbers(numbers: Numbers) -> list[str]:
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
    return [f"  {line}" for line in aligned(cells)]
