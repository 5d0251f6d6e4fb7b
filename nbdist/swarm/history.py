"""The steps of one span of a session, as data: enough to rebuild the span's caches on another server.

The client keeps a `History` for each span. If a crop removes all tokens of a step, the history drops this step. So
trying many endings of a text (as assisted generation does) takes no more memory than the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Operation(NamedTuple):
    """A change of a cache between two steps: the name of the cache's method, and the arguments."""

    name: str
    args: tuple[Any, ...]


class Step(NamedTuple):
    """One step of a session on a span of blocks.

    ``before`` has the changes of the cache that come first, ``hidden`` the hidden states of the new tokens.
    """

    before: tuple[Operation, ...]
    hidden: torch.Tensor
    calls: tuple[Any, ...]  # for each block of the span, its `LayerCall`
    # (blocks, sequences or 1, tokens, width): added to the hidden states of the first new tokens before each block.
    prompts: torch.Tensor | None = None


@dataclass
class History:
    """The steps of one span, oldest first, and the output of each."""

    # True if a crop leaves the cache as if the cropped tokens had never been in it; False with sliding windows.
    forgets: bool = True
    steps: list[Step] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0  # in the cache now

    def add(self, step: Step, result: torch.Tensor) -> None:
        """Append a step and its output; drop the steps before whose tokens it crops away, if `forgets`."""
        before = list(step.before)
        for operation in step.before:
            if operation.name == "crop":
                self.tokens += operation.args[0]  # the change in length: a negative number
        # A crop of at least the whole last step undoes that step: drop it, and crop the steps before it by the rest.
        while self.forgets and before and before[0].name == "crop" and self.steps:
            last = self.steps[-1]
            left = before[0].args[0] + last.hidden.shape[1]
            if left > 0:
                break
            # The dropped step changed the cache before its own tokens came: these changes still count.
            before[:1] = [*last.before, *([Operation("crop", (left,))] if left else [])]
            self.steps.pop()
            self.results.pop()
        self.steps.append(step._replace(before=tuple(before)))
        self.results.append(result)
        self.tokens += step.hidden.shape[1]
