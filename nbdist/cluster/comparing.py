"""Compares a value across workers without bringing it here: each says what its parts look like, and only the parts of
which that differs are looked at, one by one, where they are.

Pure, but for what asks the workers.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.autograd.api import recorder
from nbdist.rpc import api
from nbdist.rpc.rref import RRef

__all__ = ["Difference", "Print", "compare", "differences", "flatten", "prints"]

_SHOWN = 60
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Print:
    """What a part of a value looks like from afar."""

    path: str
    kind: str
    """Type, and of a tensor its dtype and shape: only what is alike in this is compared by value."""
    digest: str


@dataclass(frozen=True)
class Difference:
    """A part that is not the same on a worker as on the first one."""

    path: str
    worker: str
    told: str


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The parts of a value: of a module its state, of dicts and lists their items, of others themselves."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufc":
        value = torch.from_numpy(value.copy()) if value.ndim else torch.tensor(value.item())
    if isinstance(value, RRef):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            step = f".{key}" if isinstance(key, str) else f"[{key!r}]"
            yield from flatten(item, f"{path}{step}")
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        yield f"{path} (length)", len(value)
        for index, item in enumerate(value):
            yield from flatten(item, f"{path}[{index}]")
    else:
        yield path, value


def prints(rref: RRef[Any]) -> list[Print]:
    """On the value's worker: the prints of its parts."""
    return [_print(path, part) for path, part in flatten(rref.local_value())]


def _print(path: str, part: Any) -> Print:
    if isinstance(part, torch.Tensor):
        with torch.no_grad():
            return Print(path, f"Tensor {_dtype(part)}{tuple(part.shape)}", _tensor_digest(part))
    kind = type(part).__qualname__
    if isinstance(part, set | frozenset):  # whose order is another one in each process
        return Print(path, kind, hashlib.sha256(repr(sorted(map(repr, part))).encode()).hexdigest())
    try:
        return Print(path, kind, hashlib.sha256(pickle.dumps(part)).hexdigest())
    except Exception:  # it has no other value than what it says of itself
        return Print(path, kind, hashlib.sha256(repr(part).encode()).hexdigest())


def _tensor_digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256()
    flat = _flat(tensor)
    for start in range(0, flat.numel(), _CHUNK):
        digest.update(flat[start : start + _CHUNK].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.cpu().resolve_conj().resolve_neg().reshape(-1)


def part_of(rref: RRef[Any], path: str) -> Any:
    """On the value's worker: one of its parts; of what is no tensor, its text."""
    for known, part in flatten(rref.local_value()):
        if known == path:
            return part.detach().cpu() if isinstance(part, torch.Tensor) else _text(part)
    return None


def compare(one: Any, other: Any) -> str:
    """How ``other`` differs from ``one``, both of which are tensors of a shape and type, or texts."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return f"{other} instead of {one}" if one != other else f"it looks alike, {one}, and is pickled otherwise"
    a, b = _flat(one), _flat(other)
    same = (a == b) | (torch.isnan(a) & torch.isnan(b)) if a.is_floating_point() or a.is_complex() else a == b
    where = (~same).nonzero().reshape(-1)
    if not where.numel():
        return "its bits only: a signed zero, or another kind of NaN"
    first = int(where[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), one.shape)] if one.dim() else []
    at = f"first at {index}: " if index else ""
    told = f"{at}{_number(b[first])} instead of {_number(a[first])}"
    if a.numel() > 1:
        told += f"; {where.numel()} of {a.numel()} values"
    if a.dtype is not torch.bool:
        wide = torch.complex128 if a.is_complex() else torch.float64
        apart = (a[where].to(wide) - b[where].to(wide)).abs()
        finite = apart[torch.isfinite(apart)]
        if finite.numel():
            told += f", at most {float(finite.max()):.4g} apart"
    return told


def differences(rrefs: Mapping[str, RRef[Any]], most: int = 20) -> tuple[list[Difference], int, int]:
    """What differs between workers' values, at most so much of it; how many parts differ, and how many there are."""
    with recorder().contexts.outside():
        asked = {name: api.rpc_async(name, prints, (rref,)) for name, rref in rrefs.items()}
        found = {name: {each.path: each for each in answer.wait()} for name, answer in asked.items()}
        first, *others = found
        base = found[first]
        paths = list(dict.fromkeys(path for name in found for path in found[name]))
        told: list[Difference] = []
        count = 0
        for path in paths:
            differing = [name for name in others if found[name].get(path) != base.get(path)]
            count += bool(differing)
            for name in differing:
                if len(told) < most:
                    told.append(Difference(path, name, _tell(rrefs, path, base, first, found[name], name)))
        return told, count, len(paths)


def _tell(
    rrefs: Mapping[str, RRef[Any]],
    path: str,
    base: Mapping[str, Print],
    first: str,
    own: Mapping[str, Print],
    name: str,
) -> str:
    one, other = base.get(path), own.get(path)
    if one is None or other is None:
        return f"only {first if other is None else name} has it"
    if one.kind != other.kind:
        return f"{other.kind} instead of {one.kind}"
    parts = [api.rpc_async(worker, part_of, (rrefs[worker], path)) for worker in (first, name)]
    return compare(*(part.wait() for part in parts))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _number(value: torch.Tensor) -> str:
    found: Sequence[Any] | Any = value.item()
    return f"{found:.9g}" if isinstance(found, float) else str(found)


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
