"""What has gone into a span of blocks in one session: enough to bring another worker to where it was.

It is kept by the client, at the entrance of each span, and is data only. What was cropped away whole is forgotten, so
that a text of which one tries many ends takes no more than its longest.
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
    prompts: torch.Tensor | None = None
    """What is added to the first of these tokens at the entrance of each block of the span."""


@dataclass
class History:
    """The steps of one span, oldest first, and what came out behind it."""

    forgets: bool = True
    """Whether a cache that has been cropped is as if what was cropped had never been: not with sliding windows."""
    steps: list[Step] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0
    """So many are in the cache."""

    def add(self, step: Step, result: torch.Tensor) -> None:
        """One more has been taken."""
        before = list(step.before)
        for operation in step.before:
            if operation.name == "crop":
                self.tokens += operation.args[0]
        while self.forgets and before and before[0].name == "crop" and self.steps:
            last = self.steps[-1]
            left = before[0].args[0] + last.hidden.shape[1]
            if left > 0:
                break
            before[:1] = [*last.before, *([Operation("crop", (left,))] if left else [])]
            self.steps.pop()
            self.results.pop()
        self.steps.append(step._replace(before=tuple(before)))
        self.results.append(result)
        self.tokens += step.hidden.shape[1]
