"""One stage of a pipeline, as it computes: on its worker, or in the one process that is the reference.

What a stage draws at random does not depend on where the stage runs: `nbdist.nn.randomness`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from nbdist.nn.batches import Values, as_tuple
from nbdist.nn.randomness import seed_of, seeded

__all__ = ["Stage", "shapes_of"]


class Stage:
    """A module, its place in the pipeline, and how it is called."""

    def __init__(
        self,
        module: torch.nn.Module,
        index: int,
        *,
        device: str = "cpu",
        seed: int = 0,
        checkpoint: bool = False,
        prefix: str = "",
    ) -> None:
        self.index = index
        self.prefix = prefix
        """What the full names in the model, of all that is in the module, begin with."""
        self.seed = seed
        self.device = torch.device(device)
        self.module = module.to(self.device)
        self.checkpoint = checkpoint
        self._copies: dict[str, torch.Tensor] = {}
        self.parameters = list(module.parameters())

    def __call__(self, values: Values, step: int, micro_batch: int) -> Any:
        """Compute; an error says which stage it was, and what it had been given."""
        values = tuple(self._here(value) for value in values)
        number = seed_of(self.seed, step, self.index, micro_batch)
        try:
            if self.checkpoint and torch.is_grad_enabled():
                run = _Repeatable(self, number)
                # What is drawn, `_Repeatable` knows better.
                return checkpoint(run, *values, use_reentrant=False, preserve_rng_state=False)
            return self.compute(number, values)
        except Exception as error:
            error.add_note(f"in stage {self.index}, forward of micro-batch {micro_batch}, given {shapes_of(values)}")
            raise

    def compute(self, number: int, values: Values, buffers: Mapping[str, torch.Tensor] | None = None) -> Any:
        """Call the module; with other ``buffers`` than its own, those are what changes."""
        with seeded(number, self.device):
            if buffers:
                return torch.func.functional_call(self.module, dict(buffers), values)
            return self.module(*values)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Copies of the module's buffers as they are; of those that have not changed, the ones of before."""
        for name, buffer in self.module.named_buffers():
            known = self._copies.get(name)
            if known is None or known.shape != buffer.shape or not torch.equal(known, buffer):
                self._copies[name] = buffer.clone()
        return dict(self._copies)

    def _here(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device != self.device:
            return value.to(self.device)
        return value


class _Repeatable:
    """A stage's forward that can be done again, with the same outcome and without changing the module twice."""

    def __init__(self, stage: Stage, number: int) -> None:
        self._stage = stage
        self._number = number
        self._before: dict[str, torch.Tensor] | None = None

    def __call__(self, *values: Any) -> Any:
        stage = self._stage
        # The module may change what it is given in place, and is to be given the same once more.
        copies = {id(value): value.clone() for value in values if isinstance(value, torch.Tensor)}
        values = tuple(copies.get(id(value), value) for value in values)
        if self._before is not None:
            buffers = {name: buffer.clone() for name, buffer in self._before.items()}
            return stage.compute(self._number, values, buffers)
        self._before = stage.buffers()
        return stage.compute(self._number, values)


def shapes_of(values: Any) -> str:
    """What a stage was given, in short: ``float32[4, 64]``."""
    parts = [
        f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        for value in as_tuple(values)
    ]
    return ", ".join(parts)
