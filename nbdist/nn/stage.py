"""Computes one stage of a pipeline, on its worker or in the one process of `Reference`.

A stage draws the same random numbers wherever it runs: see `nbdist.nn.randomness`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from nbdist.nn.batches import Values, as_tuple
from nbdist.nn.randomness import seed_of, seeded
from nbdist.nn.shared_inputs import SharedInputs

_CPU = torch.device("cpu")


@dataclass(eq=False, repr=False)
class Stage:
    """A module with its number in the pipeline, its device, its seed, and whether it is checkpointed."""

    module: torch.nn.Module
    index: int
    _: KW_ONLY
    device: torch.device = _CPU
    seed: int = 0
    checkpoint: bool = False
    prefix: str = ""  # before the module's own names in the names of the model's state: "3." or empty

    def __post_init__(self) -> None:
        self.module = self.module.to(self.device)
        self.parameters = list(self.module.parameters())
        self._copies: dict[str, torch.Tensor] = {}

    def __call__(self, values: Values, step: int, micro_batch: int) -> Any:
        """Return the module's output for one micro-batch; move the values to the stage's device first."""
        # A second call with the same step and micro-batch draws the same random numbers.
        values = tuple(
            value.to(self.device) if isinstance(value, torch.Tensor) and value.device != self.device else value
            for value in values
        )
        number = seed_of(self.seed, step, self.index, micro_batch)
        try:
            if self.checkpoint and torch.is_grad_enabled():
                run = _Repeatable(self, number)
                # `_Repeatable` seeds the generators itself, so torch need not restore them.
                return checkpoint(run, *values, use_reentrant=False, preserve_rng_state=False)
            return self.compute(number, values)
        except Exception as error:  # the user's module: the note says where it was
            error.add_note(f"in stage {self.index}, forward of micro-batch {micro_batch}, given {shapes_of(values)}")
            raise

    def compute(self, number: int, values: Values, buffers: Mapping[str, torch.Tensor] | None = None) -> Any:
        """Call the module, its random draws seeded with ``number``; with ``buffers``, on these instead of its own."""
        with seeded(number, self.device):
            if buffers:
                return torch.func.functional_call(self.module, dict(buffers), values)
            return self.module(*values)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return copies of the module's buffers. The caller must not change them: the next call may return the same."""
        for name, buffer in self.module.named_buffers():
            known = self._copies.get(name)
            if known is None or known.shape != buffer.shape or not torch.equal(known, buffer):
                self._copies[name] = buffer.clone()
        return dict(self._copies)


class _Repeatable:
    """The forward of a checkpointed stage: later calls return the same output and leave the module unchanged.

    The first call keeps copies of the module's buffers (BatchNorm's statistics, say) from before it; the second call,
    in the backward pass, runs on copies of those with the same seed.
    """

    def __init__(self, stage: Stage, number: int) -> None:
        self._stage = stage
        self._number = number
        self._before: dict[str, torch.Tensor] | None = None

    def __call__(self, *values: Any) -> Any:
        stage = self._stage
        # The module may change its arguments in place, and the second call needs them unchanged.
        copies = {id(value): value.clone() for value in values if isinstance(value, torch.Tensor)}
        shared = SharedInputs(values, copies)
        values = tuple(copies.get(id(value), value) for value in values)
        if self._before is not None:
            buffers = {name: buffer.clone() for name, buffer in self._before.items()}
            return stage.compute(self._number, values, buffers)
        self._before = stage.buffers()
        output = stage.compute(self._number, values)
        shared.check()
        return output


def shapes_of(values: Any) -> str:
    """Return the types and shapes of values for an error message: ``float32[4, 64], int``."""
    parts = [
        f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        for value in as_tuple(values)
    ]
    return ", ".join(parts)
