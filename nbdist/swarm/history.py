"""What has gone into a span of blocks in one session: enough to bring another worker to where it was.

It is kept by the client, at the entrance of each span, and is data only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

__all__ = ["History", "Operation", "Step"]


class Operation(NamedTuple):
    """Something done to a cache between two steps: the name of its method, and what that was given."""

    name: str
    args: tuple[Any, ...]


class Step(NamedTuple):
    """Some tokens that go through: what is done to the cache before, the hidden states, and how layers are called."""

    before: tuple[Operation, ...]
    hidden: torch.Tensor
    calls: tuple[Any, ...]
    """For each block of the span."""


@dataclass
class History:
    """The steps of one span, oldest first."""

    steps: list[Step] = field(default_factory=list)

    def add(self, step: Step) -> None:
        """One more has been taken."""
        self.steps.append(step)

    @property
    def tokens(self) -> int:
        """How many have gone through."""
        return sum(step.hidden.shape[1] for step in self.steps)
