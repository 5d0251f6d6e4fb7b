"""Compares a value across workers without sending it: each worker hashes the parts of its value.

::

    on each worker     value ── flatten ──> parts ── prints ──> path, kind and digest of each part
    `differences`      digests of all workers ──> paths that differ ── part_of ──> two parts ── compare ──> words

Only parts whose digests differ are fetched, one by one. `differences` and `_difference_in_words` call workers; the
other functions work on the values of their own process.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.autograd.api import recorder
from nbdist.cluster.output.arranger import grouped, say_names
from nbdist.rpc import api
from nbdist.rpc.asking import ask_each
from nbdist.rpc.references.rref import RRef

_TEXT_SHOWN = 60
"""Characters of a value's text that are shown: of its beginning, and of its end."""
_NUMBERS_AT_A_TIME = 1 << 22
"""Numbers of a tensor that are hashed at a time."""


@dataclass(frozen=True)
class Print:
    """The fingerprint of one part of a value."""

    path: str
    """The way to the part from the value, such as ``.layers[0].bias`` in nested containers; "" for the value itself."""
    kind: str
    """The type, a tensor's dtype and shape, a DTensor's placements and mesh. Parts of other kinds are not compared."""
    digest: str
    """A SHA-256 of the part's value."""
    shard: str = ""
    """Which shard of a DTensor this worker holds. Only workers with the same shard should have equal numbers."""


@dataclass(frozen=True)
class Difference:
    """One part whose value on some workers differs from its value on others."""

    path: str
    workers: tuple[str, ...]
    """Some workers, whose values are equal to each other."""
    is_odd: bool
    """True if most of three workers or more agree on another value, so that `workers` are the odd ones out."""
    told: str
    """The difference in words, such as ``first at [1]: 2 instead of 1``; empty beyond the first differences."""


def flatten(value: Any, path: str = "", inside: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value with their paths: a module's state, the items of dicts, lists and tuples.

    A path is text such as ``.layers[0].bias``, appended to ``path``; "" stands for the value itself. Any other value is
    one part, and so is an RRef. A numpy array of numbers becomes a tensor. A list or tuple also yields its length.
    ``inside`` has the ids of the containers around the value: one that contains itself ends there.
    """
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufc":
        value = torch.from_numpy(value.copy()) if value.ndim else torch.tensor(value.item())
    if isinstance(value, RRef):
        yield path, value
    elif id(value) in inside:
        yield path, "a container that this is part of"
    elif isinstance(value, Mapping):
        inside |= {id(value)}
        for key, item in value.items():
            step = f".{key}" if isinstance(key, str) else f"[{key!r}]"
            yield from flatten(item, f"{path}{step}", inside)
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        yield f"{path} (length)", len(value)
        inside |= {id(value)}
        for index, item in enumerate(value):
            yield from flatten(item, f"{path}[{index}]", inside)
    else:
        yield path, value


def prints(rref: RRef[Any]) -> list[Print]:
    """Return a fingerprint of each part of a value: its path, its kind and a SHA-256. Called on the owner."""
    return [_fingerprint(path, part) for path, part in flatten(rref.local_value())]


def _fingerprint(path: str, part: Any) -> Print:
    """Return the fingerprint of one part: ``path``, the kind (type, dtype, shape), and a SHA-256 of its pickle."""
    if isinstance(part, torch.Tensor):
        kind = f"{str(part.dtype).removeprefix('torch.')}{tuple(part.shape)}"
        with torch.no_grad():
            digest, mesh = _tensor_digest(part), _mesh_of(part)
        if mesh is None:
            return Print(path, f"Tensor {kind}", digest)
        ways: Any = getattr(part, "placements")  # noqa: B009 - mypy knows no DTensor here
        shard = [at for at, way in zip(mesh.get_coordinate() or (), ways, strict=False) if not way.is_replicate()]
        # Without the mesh's ranks: if each replica has a mesh of its own, they differ in healthy programs.
        kind = f"DTensor {kind} {list(ways)} on a {mesh.device_type} mesh {tuple(mesh.shape)}"
        return Print(path, kind, digest, str(shard or ""))
    kind = type(part).__qualname__
    if isinstance(part, set | frozenset):  # the order of its items differs between processes
        return Print(path, kind, hashlib.sha256(repr(sorted(map(repr, part))).encode()).hexdigest())
    try:
        return Print(path, kind, hashlib.sha256(pickle.dumps(part)).hexdigest())
    except Exception:  # a class of the user that does not pickle, for whatever reason
        return Print(path, kind, hashlib.sha256(repr(part).encode()).hexdigest())


def _tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's numbers, without its dtype and shape."""
    digest = hashlib.sha256()
    flat = _flattened(tensor)
    for start in range(0, flat.numel(), _NUMBERS_AT_A_TIME):
        digest.update(flat[start : start + _NUMBERS_AT_A_TIME].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _mesh_of(tensor: torch.Tensor) -> Any:
    """Return a DTensor's mesh; None for other tensors. Does not import DTensor's module, which takes a second."""
    return getattr(tensor, "device_mesh", None)


def _local(tensor: Any) -> torch.Tensor:
    """Return the part of a DTensor that this worker holds, or another tensor as it is, without gradient."""
    local: torch.Tensor = tensor.detach() if _mesh_of(tensor) is None else tensor.detach().to_local()
    return local


def _flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a DTensor's local part, as one dense dimension on the CPU, without gradient."""
    tensor = _local(tensor)
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.cpu().resolve_conj().resolve_neg().reshape(-1)


def part_of(rref: RRef[Any], path: str) -> Any:
    """Return one part of a value, or None, on its owner: a tensor on the CPU, an integer, anything else as text."""
    for known, part in flatten(rref.local_value()):
        if known == path:
            return _local(part).cpu() if isinstance(part, torch.Tensor) else part if type(part) is int else _shown(part)
    return None


def compare(one: Any, other: Any) -> str:
    """Return in words how ``other`` differs from ``one``: two tensors of one shape and dtype, integers, or texts."""
    if isinstance(one, int) and isinstance(other, int):
        # Beyond 2**53, where floats are no longer exact, a reader no longer sees the distance.
        distance = f", {_shown(abs(one - other))} apart" if max(abs(one), abs(other)) > 2**53 else ""
        return f"{_shown(other)} instead of {_shown(one)}{distance}"
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return f"{other} instead of {one}" if one != other else f"it prints the same, {one}, but its pickle differs"
    a, b = _flattened(one), _flattened(other)
    same = (a == b) | (torch.isnan(a) & torch.isnan(b)) if a.is_floating_point() or a.is_complex() else a == b
    where = (~same).nonzero().reshape(-1)
    if not where.numel():
        return "only the bits differ: a signed zero, or another kind of NaN"
    first = int(where[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), one.shape)] if one.dim() else []
    at = f"first at {index}: " if index else ""
    told = f"{at}{_number_text(b[first])} instead of {_number_text(a[first])}"
    if a.numel() > 1:
        told += f"; {where.numel()} of {a.numel()} values"
    if a.is_floating_point() or a.is_complex():
        wide = torch.complex128 if a.is_complex() else torch.float64
        apart = (a[where].to(wide) - b[where].to(wide)).abs()
        finite = apart[torch.isfinite(apart)]
        if finite.numel():
            told += f", at most {float(finite.max()):.4g} apart"
    elif a.dtype is not torch.bool:
        told += f", at most {_widest_gap(a[where], b[where])} apart"
    return told


def _widest_gap(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the largest distance of two integers at the same place of two tensors."""
    # float64 cannot tell 2**60 from 2**60 + 1. A distance may be too large for int64: it is computed modulo 2**64.
    least = torch.iinfo(torch.int64).min
    # The sign bit flipped, a uint64 keeps its order as an int64, and so does a distance.
    one, other = (
        each.view(torch.int64) ^ least if each.dtype is torch.uint64 else each.to(torch.int64) for each in (a, b)
    )
    gaps = torch.maximum(one, other) - torch.minimum(one, other)
    return int((gaps ^ least).max()) - least


def differences(rrefs: Mapping[str, RRef[Any]], most: int = 20) -> tuple[list[Difference], int, int, int]:
    """Compare the values behind ``rrefs``, given by worker, part by part.

    The kinds of a part are compared first, and its numbers among the workers where it is of one kind; of a DTensor,
    among those that hold the same shard. Each group of workers with equal values is compared with the largest one.
    Returns all differences, of which ``most`` are told in words, the number of parts that differ, the number of all
    parts, and the number of parts that are sharded. Raises the error of a worker that cannot answer. The calls are not
    recorded in any context.
    """
    with recorder().contexts.outside():
        asked = ask_each(api.current_agent(), prints, {name: (rref,) for name, rref in rrefs.items()})
        found = {name: {each.path: each for each in answer} for name, answer in asked.or_raise().items()}
        paths = list(dict.fromkeys(path for name in found for path in found[name]))
        told: list[Difference] = []
        count = sharded = 0
        for path in paths:
            held = {name: each.get(path) for name, each in found.items()}
            groupings = [groups for groups in _groupings(held) if len(groups) > 1]
            count += bool(groupings)
            sharded += any(each is not None and each.shard for each in held.values())
            for others, *odd in groupings:
                is_odd = len(others) * 2 > len(others) + sum(map(len, odd)) > 2
                for workers in odd:
                    words = _difference_in_words(rrefs, path, held, others, workers) if len(told) < most else ""
                    if words and not is_odd and len(rrefs) > 2 and held[others[0]] and held[workers[0]]:
                        words += f", from {say_names(others)}'s"
                    told.append(Difference(path, tuple(workers), is_odd, words))
        return told, count, len(paths), sharded


def _groupings(held: Mapping[str, Print | None]) -> Iterator[list[list[str]]]:
    """Yield groups of workers, the largest first: by the kind of their part, then by value where it should be equal."""
    yield sorted(grouped(held, lambda name: (found := held[name]) and found.kind).values(), key=len, reverse=True)
    for workers in grouped(held, lambda name: (found := held[name]) and (found.kind, found.shard)).values():
        values = grouped(workers, lambda name: (found := held[name]) and found.digest)
        yield sorted(values.values(), key=len, reverse=True)


def _difference_in_words(
    rrefs: Mapping[str, RRef[Any]], path: str, held: Mapping[str, Print | None], others: list[str], workers: list[str]
) -> str:
    """Return in words how the part at ``path`` on ``workers`` differs from the same part on the workers ``others``."""
    one, other = held[others[0]], held[workers[0]]
    if one is None or other is None:
        return "it is missing" if other is None else f"it is missing on {say_names(others)}"
    if one.kind != other.kind:
        return f"{other.kind} instead of {one.kind}"
    asked = {worker: (rrefs[worker], path) for worker in (others[0], workers[0])}
    return compare(*ask_each(api.current_agent(), part_of, asked).or_raise().values())


def _number_text(value: torch.Tensor) -> str:
    """Return a tensor's single number as text."""
    found: Sequence[Any] | Any = value.item()
    # Nine digits tell any two float32 apart.
    return f"{found:.9g}" if isinstance(found, float) and value.dtype is not torch.float64 else str(found)


def _shown(value: Any) -> str:
    """Return a value's ``repr``, without its middle if it is long."""
    # Python refuses to write more than 4,300 decimal digits, which are 14,284 bits.
    text = hex(value) if type(value) is int and value.bit_length() > 14_000 else repr(value)
    return text if len(text) <= 2 * _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}…{text[-_TEXT_SHOWN:]}"
