"""Reads the ``params_rref`` of a `DistributedOptimizer`, and chooses the key of each parameter's saved state.

============================================ =====================================================
the parameter                                its key
============================================ =====================================================
came as a pair, ``("decoder.weight", rref)`` that name
belongs to a `nbdist.nn.Pipeline`            its full name in the model, ``"0.weight"``
is anything else: a bare RRef, a parameter   its position among all parameters of the optimizer, an
of a `RemoteModule`, one of two pipelines    int, as in the state of torch's own optimizers
that use the same name
============================================ =====================================================

No key depends on the worker on which the parameter lives, so a saved state fits any placement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from nbdist.errors import UsageError
from nbdist.rpc.references.rref import RRef

Key = str | int


@dataclass(frozen=True, slots=True)
class Group:
    """One parameter group as the user gave it."""

    rrefs: list[RRef[Any]]
    names: list[str | None]  # from the ``(name, reference)`` pair of each reference; None for a bare one
    options: dict[str, Any]  # the entries of the group besides ``params``, such as ``lr``


def read_groups(given: Any) -> list[Group]:
    """Return the parameter groups in ``given``, the ``params_rref`` of an optimizer, without the empty ones."""
    groups = [group for group in _read_all(given) if group.rrefs]
    if not groups:
        raise UsageError("optimizer got an empty parameter list")
    twice = [name for name, count in Counter(n for g in groups for n in g.names if n is not None).items() if count > 1]
    if twice:
        raise UsageError(
            f"two parameters have the name {twice[0]!r}, but a name is the key of one parameter's state: "
            "give each parameter its own name"
        )
    return groups


def read_rrefs(given: Any) -> list[RRef[Any]]:
    """Return the references of ``given``, a list of them or of groups; raise UsageError for another entry."""
    return [rref for group in _read_all(given) for rref in group.rrefs]


def _read_all(given: Any) -> list[Group]:
    if isinstance(given, RRef | Mapping):
        raise UsageError(
            f"params_rref should be a list of RRefs to parameters, or of groups, not {_value_in_words(given)}: "
            "put it in a list"
        )
    entries = _listed(given)
    if entries is None:
        raise UsageError(
            f"params_rref should be a list of RRefs to parameters, or of groups, not {_value_in_words(given)}: "
            "rpc.remote(...) and rpc.RRef(parameter) return such references"
        )
    if entries and all(isinstance(entry, Mapping) for entry in entries):  # `_group` refuses a group beside references
        return [_read_group(index, entry) for index, entry in enumerate(entries)]
    return [_group(entries, "params_rref", {})]  # references and pairs make one group without options


def _read_group(index: int, entry: Mapping[str, Any]) -> Group:
    """Return the group that a dict describes; ``index`` is its place in ``params_rref``, for messages."""
    if "params" not in entry:
        raise UsageError(
            f"group {index} of params_rref has no 'params'; it has {', '.join(map(str, entry)) or 'nothing'}. "
            "Put its references under 'params'"
        )
    params = entry["params"]
    options = {name: value for name, value in entry.items() if name != "params"}
    entries = [params] if isinstance(params, RRef) else _listed(params)
    if entries is None:
        raise UsageError(
            f"'params' of group {index} should be a list of RRefs to parameters, not {_value_in_words(params)}"
        )
    return _group(entries, f"'params' of group {index}", options)


def _listed(given: Any) -> list[Any] | None:
    """Return the entries of a list or another iterable; None for a tensor, a str, a mapping, and what has none."""
    try:
        # Tensors and strings have entries, too, but none that could be a reference.
        return list(given) if not isinstance(given, torch.Tensor | str | Mapping) else None
    except TypeError:
        return None


def _group(entries: Sequence[Any], where: str, options: dict[str, Any]) -> Group:
    """Return a group of these references and pairs; ``where`` names the list in messages."""
    group = Group([], [], options)
    for index, entry in enumerate(entries):
        is_pair = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)
        name, rref = entry if is_pair else (None, entry)
        if not isinstance(rref, RRef):
            instead = (
                "a group beside bare references: make all of them groups"
                if isinstance(rref, Mapping)
                else "not an RRef: wrap a parameter of this worker as rpc.RRef(parameter)"
            )
            raise UsageError(f"entry {index} of {where} is {_value_in_words(rref)}, {instead}")
        group.rrefs.append(rref)
        group.names.append(name)
    return group


def _value_in_words(value: Any) -> str:
    """Return a value as an error message shows it: a tensor by its shape, anything else by the start of its repr."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{text if len(text) < 60 else text[:57] + '...'} (of type {type(value).__name__})"


def keys_of(given: Sequence[str | None], known: Sequence[str | None]) -> list[Key]:
    """Return the key of each parameter, from the names ``given`` by the user and the names ``known`` on the owners.

    A given name goes before a known one. A parameter without a name, or with one that another parameter has too, gets
    its position in these lists.
    """
    names = [own or other for own, other in zip(given, known, strict=True)]
    counts = Counter(names)
    return [name if name is not None and counts[name] == 1 else index for index, name in enumerate(names)]


# --- on the owner ---------------------------------------------------------------------------------

_names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # the full names of parameters that are alive


def name_parameter(parameter: torch.Tensor, name: str) -> None:
    """Remember the full name of a parameter of this process until the parameter dies; a pipeline's stage calls this."""
    _names[parameter] = name


def name_of(parameter: torch.Tensor) -> str | None:
    """Return the full name of a parameter of this process, or None if it was not named."""
    name: str | None = _names.get(parameter)
    return name
