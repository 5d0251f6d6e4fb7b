"""The steps of one span of a session, as data: enough to bring the caches of another server to the same state.

The client keeps a `History` for each span. If a crop removes all tokens of a step, the history drops this step. So
trying many endings of a text (as assisted generation does) takes no more memory than the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

__all__ = ["History", "Operation", "Step"]


class Operation(NamedTuple):
    """A change of a cache between two steps: the name of its method, and the arguments."""

    name: str
    args: tuple[Any, ...]


class Step(NamedTuple):
    """One step of a session on a span of blocks.

    ``before`` are the changes of the cache that come first, ``hidden`` the hidden states of the new tokens.
    """

    before: tuple[Operation, ...]
    hidden: torch.Tensor
    calls: tuple[Any, ...]
    """For each block of the span, a `LayerCall`: how it is called."""
    prompts: torch.Tensor | None = None
    """(blocks, sequences or 1, tokens, width): added to the first of the new tokens before each block."""


@dataclass
class History:
    """The steps of one span, oldest first, and the output of each."""

    forgets: bool = True
    """True if a cropped cache is as if the cropped tokens had never been in it: not with sliding windows."""
    steps: list[Step] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0
    """The number of tokens in the cache now."""

    def add(self, step: Step, result: torch.Tensor) -> None:
        """Append a step and its output.

        If the step's first operation is a crop by at least the whole last step, the last step is removed: its own
        operations, and then a crop by the rest, take the place of that crop. This repeats for the steps before. With
        sliding windows (`forgets` is False) all steps stay. An operation "crop" has one argument, the change in length,
        which is negative.
        """
        before = list(step.before)
        for operation in step.before:
            if operation.name == "crop":
                self.tokens += operation.args[0]
        # A crop by at least the whole last step undoes it: drop the step, and crop the steps before it by the rest.
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
