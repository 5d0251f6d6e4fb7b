"""Cuts a model into the stages of a pipeline: by name, by count, or so that the stages weigh about the same."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from nbdist.errors import UsageError

__all__ = ["Maker", "balanced", "check_sharing", "cut", "parts_of", "times_of"]

Maker = torch.nn.Module | Callable[[], torch.nn.Module]
"""A stage, or a function that makes one where it is to live."""


def cut(
    model: torch.nn.Sequential,
    stages: int | None = None,
    *,
    at: Sequence[str] = (),
    balance: Literal["count", "size", "time"] = "count",
    sample: Any = None,
) -> list[torch.nn.Sequential]:
    """Cut a Sequential into stages, which keep the names of its layers, and so of its state.

    Either ``at`` the layers of these names, each of which begins a stage, or into so many ``stages`` of about the same
    number of layers, the same bytes of parameters (``balance="size"``), or the same time forward and backward of a
    ``sample``, as measured here (``balance="time"``).
    """
    if not isinstance(model, torch.nn.Sequential):
        raise UsageError(
            f"only a torch.nn.Sequential can be cut, not a {type(model).__name__}: give a list of its parts instead"
        )
    if type(model).forward is not torch.nn.Sequential.forward or model._forward_hooks or model._forward_pre_hooks:
        raise UsageError(
            f"this {type(model).__name__} does more than to call its layers one after the other, by a forward or hooks "
            "of its own, which its stages would not do: give a list of its parts instead"
        )
    layers = list(model._modules.items())  # not its named_children(), of which one that occurs twice is named once
    if at:
        sizes = _sizes_at([name for name, _ in layers], at)
        if stages not in (None, len(sizes)):
            raise UsageError(f"cut at {', '.join(at)} makes {len(sizes)} stages, not {stages}")
    else:
        count = len(layers) if stages is None else stages
        if not 1 <= count <= len(layers):
            raise UsageError(f"{len(layers)} layers cannot be cut into {count} stages")
        if balance == "count":
            costs: list[float] = [1.0] * len(layers)
        elif balance == "size":
            costs = [float(sum(p.nbytes for p in layer.parameters())) for _, layer in layers]
        elif balance == "time":
            costs = times_of([layer for _, layer in layers], sample)
        else:
            raise UsageError(f'balance is "count", "size" or "time", not {balance!r}')
        sizes = balanced(costs, count)
    found, first = [], 0
    for size in sizes:
        stage = torch.nn.Sequential(OrderedDict(layers[first : first + size]))
        stage.training = model.training
        found.append(stage)
        first += size
    return found


def _sizes_at(names: Sequence[str], at: Sequence[str]) -> list[int]:
    unknown = [name for name in at if name not in names]
    if unknown:
        raise UsageError(f"no layer is called {', '.join(unknown)}; there are {', '.join(names)}")
    starts = [0, *(names.index(name) for name in at), len(names)]
    sizes = [end - start for start, end in itertools.pairwise(starts)]
    if min(sizes) <= 0:
        raise UsageError(f"cut at {', '.join(at)}: the names must be in the model's order, and not its first")
    return sizes


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """The sizes of so many consecutive parts, none of them empty, of which the most expensive is as cheap as can be.

    >>> balanced([1, 1, 1, 3, 1, 1], 2)
    [3, 3]
    >>> balanced([9, 1, 1], 3)
    [1, 1, 1]
    """
    count = len(costs)
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[k][i]: the cost of the most expensive of k parts of the first i, and where the last of them begins
    best: list[list[tuple[float, int]]] = [[(before[i], 0) for i in range(count + 1)]]
    for part in range(1, parts):
        row = [(float("inf"), 0)] * (count + 1)
        for end in range(part + 1, count + 1):
            row[end] = min((max(best[-1][start][0], before[end] - before[start]), start) for start in range(part, end))
        best.append(row)
    sizes, end = [], count
    for row in reversed(best):
        start = row[end][1]
        sizes.append(end - start)
        end = start
    return sizes[::-1]


def times_of(layers: Sequence[torch.nn.Module], sample: Any, rounds: int = 3) -> list[float]:
    """Seconds that each layer takes for a sample, forward and backward; nothing of the layers changes."""
    if sample is None:
        raise UsageError('balance="time" measures the layers on a sample: give sample=…')
    value = sample if isinstance(sample, tuple) else (sample,)
    with torch.random.fork_rng(devices=[]):
        return _times_of(layers, value, rounds)


def _times_of(layers: Sequence[torch.nn.Module], value: Any, rounds: int) -> list[float]:
    times = []
    for layer in layers:
        buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        parameters = dict(layer.named_parameters())
        took = []
        for _ in range(rounds):
            leaves = tuple(_leaf(part) for part in value)
            given = tuple(part.clone() if _wants_grad(part) else part for part in leaves)  # which may change in place
            start = time.perf_counter()
            out = torch.func.functional_call(layer, {**parameters, **buffers}, given)
            outs = out if isinstance(out, tuple) else (out,)
            roots = [part for part in outs if isinstance(part, torch.Tensor) and part.requires_grad]
            wanted = [part for part in (*leaves, *parameters.values()) if _wants_grad(part)]
            if roots and wanted:
                torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)
            took.append(time.perf_counter() - start)
        times.append(statistics.median(took))
        value = tuple(part.detach() if isinstance(part, torch.Tensor) else part for part in outs)
    return times


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def _wants_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def parts_of(
    model: torch.nn.Sequential | Sequence[Maker],
    stages: int | None,
    workers: int,
    at: Sequence[str],
    balance: Any,
    sample: Any,
) -> tuple[list[Maker], list[str]]:
    """Return the stages, and the names at which they begin: of the first layer of each, or the place in the list."""
    if isinstance(model, torch.nn.Sequential):
        count = workers if stages is None and not at else stages
        found = cut(model, count, at=at, balance=balance, sample=sample)
        return list(found), [next(iter(stage._modules)) for stage in found]
    if isinstance(model, torch.nn.Module) or not isinstance(model, Sequence) or not model:
        raise UsageError(
            f"a pipeline is made of a Sequential, or of a list of stages, not of {type(model).__name__}"
            if not isinstance(model, Sequence)
            else "a pipeline has at least one stage"
        )
    for index, part in enumerate(model):
        if not callable(part):
            raise UsageError(f"stage {index} should be a module, or a function that makes one, not {part!r}")
    if stages not in (None, len(model)) or at or balance != "count" or sample is not None:
        raise UsageError("a list has its stages in it: stages, at, balance and sample are for a Sequential")
    return list(model), [str(index) for index in range(len(model))]


def check_sharing(parts: Sequence[Maker], workers: int) -> None:
    """Refuse a parameter of two stages on different workers: sent to both, it would be two parameters."""
    owners: dict[int, int] = {}
    for stage, part in enumerate(parts):
        for name, parameter in part.named_parameters() if isinstance(part, torch.nn.Module) else ():
            other = owners.setdefault(id(parameter), stage)
            if other % workers != stage % workers:
                raise UsageError(
                    f"{name} of stage {stage} is a parameter of stage {other}, too, which is on another worker: stages "
                    "that share parameters have to be on one"
                )
