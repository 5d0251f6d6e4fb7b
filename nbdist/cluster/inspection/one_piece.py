"""Compares a model that the notebook holds in one piece with the same model on workers, which may hold shards of it.

::

    notebook   observe ── OnePiece.keep ──> kept <── OnePiece.compare <─┐
    worker     observe ── gather, send ─────────────── what, tensors ───┘   answer: how they differ

This happens once for each of `STEPS`, on all workers at once; the first with a difference is the last one. A worker
sends each output in the middle of its forward pass, and so holds no copies. To gather a tensor is a collective: a
worker that has found a difference goes on, because the others wait for it.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.cluster.cluster import Cluster
from nbdist.cluster.inspection.comparing import flatten
from nbdist.cluster.inspection.forward_passes import STEPS, observe
from nbdist.cluster.inspection.rounding import difference, eps_of, nearest_slice
from nbdist.cluster.worker.flight_recorder import last_collective
from nbdist.code_lines import users_lines
from nbdist.errors import UsageError
from nbdist.rpc.api import current_agent
from nbdist.thread_frames import lines_of

ROOM = 4_000_000_000
"""Bytes of inputs and outputs that the notebook keeps. What comes after these is not compared."""


@dataclass
class Deviation:
    """The first difference on one worker; if nothing differs, only ``worker`` is set."""

    worker: str
    part: str = ""
    """The name of what differs, such as ``parameter model.0.weight`` or ``the output of model.0``."""
    told: str = ""
    """The difference in words, where the user's code calls the module, and the worker's last collective before that."""


class OnePiece:
    """The values that the notebook has observed in one step. Workers call `compare`, each from a thread of its own."""

    def __init__(self, step: str, terms: int, exact: bool) -> None:
        self._step, self._terms, self._exact, self._room = step, terms, exact, ROOM
        self._eps: dict[str, float] = {}  # of the coarsest dtype so far, by worker
        self.kept: dict[str, tuple[Any, Any]] = {}
        """By what it is, in order: the module, and a text, or tensors by path, or None where there was no room."""
        self.seen: set[tuple[str, str]] = set()
        """The workers and what they have had compared."""

    def keep(self, what: str, module: Any, value: Any) -> None:
        """Keep a value: of an output, which later modules may write into, a copy, as long as there is room."""
        parts = {"": value} if self._step == "values" else _parts(value)
        self._room -= sum(each.nbytes for each in parts.values()) if self._step == "outputs" else 0
        self.kept[what] = module, parts if self._room >= 0 else None

    def compare(self, worker: str, what: str, parts: dict[str, Any], training: bool | None, is_sharded: bool) -> str:
        """Return in words how a worker's value differs from the one here; "" if it does not, or was not kept."""
        self.seen.add((worker, what))
        module, own = self.kept.get(what, (None, {}))
        if own is not None and own.keys() != parts.keys():
            return f"{len(parts)} tensors instead of {len(own)}" if own else "the notebook has none"
        if not parts:
            return ""
        if own is None or self._step == "kinds":
            return "" if own in (None, parts) else f"{parts['']} instead of {own['']}"
        calls = 1 + list(self.kept).index(what) if what.startswith(("the output", "the value")) else 0
        for path, part in parts.items():
            # If the model is sharded, an output may be a slice.
            one = nearest_slice(own[path], part) if is_sharded and calls else _whole(own[path])
            # What is float32 may have been computed from bfloat16, as under autocast.
            eps = self._eps[worker] = max(self._eps.get(worker, 0.0), eps_of(one), eps_of(part))
            if told := difference(one, part, calls, self._terms, eps, exact=self._exact):
                return f"{path} {told}{_mode(module, training)}".lstrip()
        return ""


def _mode(module: Any, training: bool | None) -> str:
    if getattr(module, "training", None) != training:
        return f"; it is in training mode {'on the worker' if training else 'in the notebook'} only"
    parts = module.modules() if training else ()
    rates = [getattr(each, "p" if "Dropout" in type(each).__name__ else "dropout", 0) for each in parts]
    if any(isinstance(rate, float) and rate > 0 for rate in rates):
        return "; it is in training mode with dropout: call the model's eval() in the notebook and on workers"
    return ""


def _whole(tensor: Any) -> torch.Tensor:
    """Return a copy of a tensor on the CPU, without gradient; of a DTensor all of it, which is a collective."""
    found: torch.Tensor = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    # Copied also because the result of a collective may not have arrived: torch waits for it before the copy.
    return (found if found.layout is torch.strided else found.to_dense()).to("cpu", copy=True)


def _parts(value: Any) -> dict[str, Any]:
    tensors = {path: _whole(each) for path, each in flatten(value) if isinstance(each, torch.Tensor)}
    return {"": value} if isinstance(value, str) else tensors


def first_deviation(run: Any, names: list[str], notebook: str, step: str) -> Deviation:
    """Observe a step on this worker, and have the agent ``notebook`` compare it. Runs in a cell, which made ``run``."""
    agent, began = current_agent(), time.time_ns()
    found, models = Deviation(agent.me.name), {name: eval(name, run.__globals__) for name in names}
    is_sharded = any(hasattr(each, "full_tensor") for model in models.values() for each in model.parameters())

    def note(what: str, module: Any, value: Any) -> None:
        asked = found.worker, what, _parts(value), getattr(module, "training", None), is_sharded
        if not found.told and (told := agent.at(notebook, "one_piece").ask("compare", *asked)):
            line = next(users_lines(lines_of(sys._getframe())), None)
            called = f"; called at {line.place}" if line and __name__ not in line.text else ""  # else by our own cell
            before = last_collective(began, _whole.__code__)
            found.part, found.told = what, f"{told}{called}{before and f'; the collective before it: {before}'}"

    observe(models, run, step, note)
    return found


def compare_with_workers(
    cluster: Cluster, expression: str, targets: str | None, exact: bool, names: dict[str, Any], run: Callable[[], Any]
) -> tuple[list[Deviation], int, int]:
    """Return what differs first on each worker in ``targets``, and how much the last step compared, and left out.

    The worker that differs first comes first. ``run`` runs the expression here, with the variables ``names``. Raises
    UsageError if the expression names no module of the notebook, and the error of a run that fails anywhere.
    """
    words = re.findall(r"(?<![\w.])[^\W\d]\w*", expression)
    models = {name: names[name] for name in words if isinstance(names.get(name), torch.nn.Module)}
    if not models:
        raise UsageError(f"{expression} names no model of the notebook; write its variable, as in step(model, x)")
    # The longest sum, as far as shapes tell of it.
    terms = max((each.shape[1:].numel() for model in models.values() for each in model.parameters()), default=1)
    for step in STEPS:
        piece = OnePiece(step, terms, exact)
        current_agent().named.publish("one_piece", piece, "compare")
        observe(models, run, step, piece.keep)
        asked = f"lambda: ({expression}), {list(models)}, {cluster.driver!r}, {step!r}"
        code = f"__import__({__name__!r}, fromlist=['_']).first_deviation({asked})"
        found: list[Deviation] = cluster.evaluate(code, [worker.rank for worker in cluster.select(targets)])
        for each in found:
            missing = [what for what in piece.kept if (each.worker, what) not in piece.seen]
            if missing and not each.told:
                each.part, each.told = missing[0], "the worker has none"
        order = [*piece.kept, ""]
        found.sort(key=lambda each: order.index(each.part) if each.part in order else -1)
        if found[0].told:
            break
    return found, len(piece.kept), sum(parts is None for _, parts in piece.kept.values())
