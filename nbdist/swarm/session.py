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

from nbdist.errors import UsageError
from nbdist.rpc.rref import RRef
from nbdist.swarm.history import History, Operation, Step
from nbdist.swarm.routing import Span

if TYPE_CHECKING:
    from nbdist.swarm.server import Server
    from nbdist.swarm.swarm import Swarm

__all__ = ["Gone", "Session"]

_numbers = itertools.count()


class Gone(Exception):
    """A server is gone, and the swarm knows."""


@dataclass
class _Part:
    """A span of the route, who serves it, and what has gone into it."""

    span: Span
    server: RRef[Server]
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
        self._refusal = self._refusal or why

    def step(self, hidden: torch.Tensor, calls: list[Any]) -> torch.Tensor:
        """Take tokens through all blocks."""
        if self._refusal:
            raise UsageError(self._refusal)
        before, self._before = tuple(self._before), []
        try:
            if not self._parts:
                self._parts = self._open(0, len(calls))
            at = 0
            while at < len(self._parts):
                part = self._parts[at]
                step = Step(before, hidden, tuple(calls[part.span.begin : part.span.end]))
                try:
                    hidden = self._take(part, step)
                except Gone:
                    self._parts[at : at + 1] = self._replace(part)
                else:
                    at += 1
        except BaseException as error:
            # Some have taken the step, and others have not.
            self.refuse(f"this cache is of a call that failed: {type(error).__name__}: {error}")
            raise
        return hidden

    def _take(self, part: _Part, step: Step) -> torch.Tensor:
        number = len(part.history.steps)
        found: torch.Tensor = self._swarm.ask(part.server, "step", self.id, part.span.begin, number, step)
        part.history.add(step)
        return found

    def _open(self, begin: int, end: int) -> list[_Part]:
        """A way through these blocks, on which the session has been opened everywhere."""
        while True:
            parts = [_Part(span, server) for span, server in self._swarm.servers(begin, end)]
            try:
                for part in parts:
                    self._swarm.ask(part.server, "open", self.id, part.span.begin, self._empty)
            except Gone:
                continue
            return parts

    def _replace(self, gone: _Part) -> list[_Part]:
        """Others for a span whose worker is gone, brought to where it was."""
        begin = gone.span.begin
        while True:
            parts = self._open(begin, gone.span.end)
            try:
                for step in gone.history.steps:
                    hidden = step.hidden
                    for part in parts:
                        calls = step.calls[part.span.begin - begin : part.span.end - begin]
                        hidden = self._take(part, Step(step.before, hidden, calls))
            except Gone:
                continue
            return parts
