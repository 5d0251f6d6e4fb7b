"""A session: one text that is being written, or several side by side, and its caches on the workers of its route.

The client keeps, at the entrance of each span, what has gone in. When a worker dies, somebody else takes its blocks,
and is given that again: step by step, so that his caches are the same to the last bit. The others have not noticed.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nbdist.errors import RRefError, UsageError, WorkerLost
from nbdist.swarm.history import History, Operation, Step
from nbdist.swarm.routing import Span

if TYPE_CHECKING:
    from nbdist.swarm.swarm import Swarm

__all__ = ["Session"]

_numbers = itertools.count()


@dataclass
class _Part:
    """A span of the route, and what has gone into it."""

    span: Span
    history: History = field(default_factory=History)


class Session:
    """One session of a swarm."""

    def __init__(self, swarm: Swarm, empty: Any) -> None:
        self.id = f"{os.getpid()}.{next(_numbers)}"
        self._swarm = swarm
        self._empty = empty
        self._before: list[Operation] = []
        self._parts: list[_Part] = []
        self._refusal = ""

    @property
    def route(self) -> list[Span]:
        """Through whom it goes."""
        return [part.span for part in self._parts]

    @property
    def tokens(self) -> int:
        """How many have gone through."""
        return self._parts[0].history.tokens if self._parts else 0

    def note(self, name: str, args: tuple[Any, ...]) -> None:
        """Something was done to the cache; it is done elsewhere before the next step."""
        self._before.append(Operation(name, args))

    def refuse(self, why: str) -> None:
        """Take no steps from now on."""
        self._refusal = why

    def step(self, hidden: torch.Tensor, calls: list[Any]) -> torch.Tensor:
        """Take tokens through all blocks."""
        if self._refusal:
            raise UsageError(self._refusal)
        before, self._before = tuple(self._before), []
        if not self._parts:
            self._parts = self._open(0, len(calls))
        at = 0
        while at < len(self._parts):
            part = self._parts[at]
            step = Step(before, hidden, tuple(calls[part.span.begin : part.span.end]))
            try:
                hidden = self._take(part, step)
            except (WorkerLost, RRefError) as error:
                self._parts[at : at + 1] = self._replace(part, error)
            else:
                at += 1
        return hidden

    def _take(self, part: _Part, step: Step) -> torch.Tensor:
        server, begin = self._swarm.server(part.span.server), part.span.begin
        number = len(part.history.steps)
        found: torch.Tensor = self._swarm.ask(server, "step", self.id, begin, number, step)
        part.history.add(step)
        return found

    def _open(self, begin: int, end: int) -> list[_Part]:
        """A way through these blocks, on which the session has been opened everywhere."""
        while True:
            parts = [_Part(span) for span in self._swarm.route(begin, end)]
            try:
                for part in parts:
                    server = self._swarm.server(part.span.server)
                    self._swarm.ask(server, "open", self.id, part.span.begin, self._empty)
            except (WorkerLost, RRefError) as error:
                self._swarm.lose(part.span.server, error)
            else:
                return parts

    def _replace(self, gone: _Part, error: Exception) -> list[_Part]:
        """Others for a span whose worker is gone, brought to where it was."""
        while True:
            self._swarm.lose(gone.span.server, error)
            parts = self._open(gone.span.begin, gone.span.end)
            try:
                for step in gone.history.steps:
                    self._replay(parts, gone.span.begin, step)
            except (WorkerLost, RRefError) as another:
                error = another
                for name in {part.span.server for part in parts}:
                    if not self._swarm.is_there(name):
                        self._swarm.lose(name, another)
            else:
                return parts

    def _replay(self, parts: list[_Part], begin: int, step: Step) -> None:
        hidden = step.hidden
        for part in parts:
            calls = step.calls[part.span.begin - begin : part.span.end - begin]
            hidden = self._take(part, Step(step.before, hidden, calls))
