"""Cuts a model into the stages of a pipeline: at named layers, or so that the stages have about the same cost."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from nbdist.errors import UsageError
from nbdist.nn.batches import wants_grad

Maker = torch.nn.Module | Callable[[], torch.nn.Module]  # the function is called on the stage's worker


def cut(
    model: torch.nn.Sequential,
    stages: int | None = None,
    *,
    at: Sequence[str] = (),
    balance: Literal["count", "size", "time"] = "count",
    sample: Any = None,
) -> list[torch.nn.Sequential]:
    """Cut a Sequential into stages of consecutive layers.

    The stages share the layers with the model, and keep the layers' names, so their states have the model's names.

    Args:
        model: the Sequential to cut. It must not have hooks or a ``forward`` of its own, which the stages would lose.
        stages: the number of stages. Without it, and without ``at``, every layer is a stage.
        at: the names of the layers at which the second and later stages begin, in the model's order.
        balance: the cost that becomes about the same for all stages: the number of layers (``"count"``), the bytes of
            their parameters (``"size"``), or the seconds of forward and backward (``"time"``). Not used with ``at``.
        sample: for ``"time"``, an input of the model, or a tuple of inputs. Each layer is timed on it in this process.

    Returns:
        The stages, each a Sequential with at least one layer.

    Raises:
        UsageError: ``model`` is no plain Sequential, or cannot be cut in this way; there is no such ``balance``; or
            ``"time"`` has no ``sample``. Nothing has been changed.
        Exception: with ``"time"``, a layer raised it for the sample.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> [list(stage.state_dict()) for stage in cut(model, at=["2"])]
        [['0.weight', '0.bias'], ['2.weight', '2.bias']]
        >>> [len(stage) for stage in cut(model, 2, balance="size")]
        [1, 2]
    """
    if not isinstance(model, torch.nn.Sequential):
        raise UsageError(
            f"only a torch.nn.Sequential can be cut, not a {type(model).__name__}: give a list of stages instead"
        )
    if type(model).forward is not torch.nn.Sequential.forward or model._forward_hooks or model._forward_pre_hooks:
        raise UsageError(
            f"this {type(model).__name__} does more than call its layers one after the other: it has a forward or "
            "hooks of its own, which its stages would lose. Give a list of stages instead"
        )
    layers = list(model._modules.items())  # named_children() would skip a layer's second occurrence
    if at:
        sizes = _sizes_at([name for name, _ in layers], at)
        if stages not in (None, len(sizes)):
            raise UsageError(
                f"a cut at {', '.join(at)} makes {len(sizes)} stages, not {stages}: give only one of at and stages"
            )
    else:
        count = len(layers) if stages is None else stages
        if not 1 <= count <= len(layers):
            raise UsageError(f"{len(layers)} layers cannot be cut into {count} stages, only into 1 to {len(layers)}")
        if balance == "count":
            costs: list[float] = [1.0] * len(layers)
        elif balance == "size":
            costs = [float(sum(p.nbytes for p in layer.parameters())) for _, layer in layers]
        elif balance == "time":
            costs = times_of([layer for _, layer in layers], sample)
        else:
            raise UsageError(f'balance is "count", "size" or "time", not {balance!r}')
        sizes = balanced(costs, count)
    left = iter(layers)
    found = [torch.nn.Sequential(OrderedDict(itertools.islice(left, size))) for size in sizes]
    for stage in found:
        stage.training = model.training
    return found


def _sizes_at(names: Sequence[str], at: Sequence[str]) -> list[int]:
    """Return the number of layers of each stage, from the names at which the second and later stages begin."""
    unknown = [name for name in at if name not in names]
    if unknown:
        raise UsageError(f"no layer is called {', '.join(unknown)}; there are {', '.join(names)}")
    starts = [0, *(names.index(name) for name in at), len(names)]
    sizes = [end - start for start, end in itertools.pairwise(starts)]
    if min(sizes) <= 0:
        raise UsageError(
            f"the model cannot be cut at {', '.join(at)}: name its layers in their order, each once, and not its first"
        )
    return sizes


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Return the sizes of consecutive ``parts``, none empty, whose most expensive part is as cheap as possible.

    >>> balanced([1, 1, 1, 3, 1, 1], 2)
    [3, 3]
    >>> balanced([9, 1, 1], 3)
    [1, 1, 1]
    """
    count = len(costs)
    before = list(itertools.accumulate(costs, initial=0.0))
    # Dynamic programming. best[k][i] is for the best division of the first i items into k + 1 parts: the cost of its
    # most expensive part, and the index of the item at which its last part begins.
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


# The layers draw numbers, and the program's own CPU generator stays as it is.
@torch.random.fork_rng(devices=[])
def times_of(layers: Sequence[torch.nn.Module], sample: Any) -> list[float]:
    """Return the seconds that each layer takes for a sample, forward and backward: the median of three rounds."""
    if sample is None:
        raise UsageError('balance="time" measures the layers on a sample: give sample=… (an input, or a tuple)')
    value = sample if isinstance(sample, tuple) else (sample,)
    times = []
    for layer in layers:
        buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}  # BatchNorm's, say, stay as they are
        parameters = dict(layer.named_parameters())
        took = []
        for _ in range(3):
            leaves = tuple(_leaf(part) for part in value)
            given = tuple(part.clone() if wants_grad(part) else part for part in leaves)  # may be changed in place
            start = time.perf_counter()
            out = torch.func.functional_call(layer, {**parameters, **buffers}, given)
            outs = out if isinstance(out, tuple) else (out,)
            roots = [part for part in outs if wants_grad(part)]
            wanted = [part for part in (*leaves, *parameters.values()) if wants_grad(part)]
            if roots and wanted:
                # Not backward(), which would add to the layers' gradients.
                torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)
            took.append(time.perf_counter() - start)
        times.append(statistics.median(took))
        value = tuple(part.detach() if isinstance(part, torch.Tensor) else part for part in outs)
    return times


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def parts_of(
    model: torch.nn.Sequential | Sequence[Maker],
    stages: int | None,
    workers: int,
    at: Sequence[str],
    balance: Any,
    sample: Any,
) -> tuple[list[Maker], list[str]]:
    """Return the stages of a `Pipeline`'s model, and the name of each: of its first layer, or for a list its number."""
    if isinstance(model, torch.nn.Sequential):
        count = workers if stages is None and not at else stages
        found = cut(model, count, at=at, balance=balance, sample=sample)
        return list(found), [next(iter(stage._modules)) for stage in found]
    if isinstance(model, torch.nn.Module) or not isinstance(model, Sequence):
        raise UsageError(f"a pipeline is made of a Sequential, or of a list of stages, not of {type(model).__name__}")
    if not model:
        raise UsageError("a pipeline has at least one stage, but the list of stages is empty")
    for index, part in enumerate(model):
        if not callable(part):
            raise UsageError(f"stage {index} should be a module, or a function that makes one, not {part!r}")
    if stages not in (None, len(model)) or at or balance != "count" or sample is not None:
        raise UsageError(
            "stages, at, balance and sample say how to cut a Sequential, but the model is a list of stages: leave them "
            "out"
        )
    return list(model), [str(index) for index in range(len(model))]


def check_sharing(parts: Sequence[Maker], workers: int) -> None:
    """Raise `UsageError` if stages on different workers share a parameter: each worker would train its own copy."""
    # Functions that make stages are not looked into: their modules do not exist yet.
    owners: dict[int, int] = {}
    for stage, part in enumerate(parts):
        for name, parameter in part.named_parameters() if isinstance(part, torch.nn.Module) else ():
            other = owners.setdefault(id(parameter), stage)
            if other % workers != stage % workers:
                raise UsageError(
                    f"{name} of stage {stage} is a parameter of stage {other}, too, which is on another worker: each "
                    "worker would train its own copy. Put stages that share parameters on one worker"
                )
