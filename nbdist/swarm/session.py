"""A session: one text that is being written, or several side by side, and its caches on the servers of its route.

The client keeps, at the entrance of each span, what has gone in. When a worker dies, somebody else takes its blocks,
and is given that again: step by step, so that its caches are the same to the last bit, or, if speed is worth more than
the last bit, all of it at once. The others have not noticed. Where the worker still lives, its caches move instead.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from nbdist.errors import NbdistError, UsageError
from nbdist.rpc.futures import Future
from nbdist.swarm import adapter, merging
from nbdist.swarm.crew import Gone
from nbdist.swarm.held import AGAIN, Reply
from nbdist.swarm.history import History, Operation, Step
from nbdist.swarm.large import pieces
from nbdist.swarm.routing import NoRoute, Span, named

if TYPE_CHECKING:
    from nbdist.swarm.member import Member
    from nbdist.swarm.swarm import Swarm

__all__ = ["Recover", "Session"]

Recover = Literal["exact", "fast"]

_numbers = itertools.count()
_TRIES = 16
"""Servers that may fail one after the other in one step of a session, before that is an error."""
_PUSHED = 0.5
"""Seconds after which what a server should have pushed is brought by the client: it may not have come through."""


@dataclass(eq=False)
class _Part:
    """A span of the route, who serves it, and what has gone into it."""

    span: Span
    member: Member
    history: History
    used: bool = False
    """Whether anything has gone in."""
    linked: _Part | None = field(default=None, repr=False)
    """Where it is known to push."""


class Session:
    """One session of a swarm, through some of its blocks."""

    def __init__(
        self, swarm: Swarm, empty: Any, *, begin: int = 0, end: int, recover: Recover = "exact", expected: int = 0
    ) -> None:
        self.id = f"{os.getpid()}.{next(_numbers)}"
        self.recover: Recover = recover
        self.state: Literal["idle", "writing", "recovering"] = "idle"
        self._swarm = swarm
        self._crew = swarm.crew
        self._journal = swarm.journal
        self._empty = empty
        self._begin, self._end = begin, end
        self._expected = expected
        self.rows = 1
        """Texts side by side."""
        self._before: list[Operation] = []
        self._parts: list[_Part] = []
        self._refusal = ""
        self._number = 0
        """Of the last step: the same on all servers."""
        self._lock = threading.RLock()

    @property
    def route(self) -> list[Span]:
        """Through whom it goes."""
        return [part.span for part in list(self._parts)]

    @property
    def tokens(self) -> int:
        """How many have gone through, and are in the caches."""
        return self._parts[0].history.tokens if self._parts else 0

    def note(self, name: str, args: tuple[Any, ...]) -> None:
        """Something was done to the cache; it is done elsewhere before the next step."""
        self._before.append(Operation(name, args))

    def refuse(self, why: str) -> None:
        """Take no steps from now on."""
        self._refusal = self._refusal or why

    # -- steps --------------------------------------------------------------------------------

    def step(self, hidden: torch.Tensor, calls: Sequence[Any], prompts: torch.Tensor | None = None) -> torch.Tensor:
        """Take tokens through all blocks. ``prompts``, for each block, go to the first tokens of the text."""
        with self._lock:
            if self._refusal:
                raise UsageError(self._refusal)
            before, self._before = tuple(self._before), []
            self.state = "writing"
            try:
                with self._crew.working():
                    found = self._step(before, hidden, calls, prompts)
            except BaseException as error:
                # Some have taken the step, and others have not, or wait for it.
                self.refuse(f"this cache is of a call that failed: {type(error).__name__}: {error}")
                self._crew.abandon(self.id)
                raise
            finally:
                self.state = "idle"
            self._journal.stepped(self, hidden.shape[1])
            return found

    def _step(
        self, before: tuple[Operation, ...], hidden: torch.Tensor, calls: Sequence[Any], prompts: torch.Tensor | None
    ) -> torch.Tensor:
        self.rows = hidden.shape[0]
        self._expected = max(self._expected, self.tokens + hidden.shape[1])
        if not self._parts:
            self._parts = self._opened(self._begin, self._end)
        begin = self.tokens + sum(min(0, each.args[0]) for each in before if each.name == "crop")
        if prompts is not None:
            prompts = prompts[:, :, begin : begin + hidden.shape[1]]
        size = self._swarm.chunk
        if size is None or hidden.shape[1] <= size:
            return self._through(Step(before, hidden, tuple(calls), prompts if _is_some(prompts) else None))
        found = []
        for given, called in merging.split(hidden, calls, begin, size, adapter.windows(self._empty), self._begin):
            prompt = prompts[:, :, : given.shape[1]] if prompts is not None else None
            found.append(self._through(Step(before, given, tuple(called), prompt if _is_some(prompt) else None)))
            prompts = prompts[:, :, given.shape[1] :] if prompts is not None else None
            before = ()
        return torch.cat(found, 1)

    def _through(self, step: Step) -> torch.Tensor:
        """All servers are asked at once; each hands on to the next what comes out, and tells it here besides."""
        self._number += 1
        sent: dict[_Part, tuple[Future[Reply], float]] = {}
        hidden, at, tries = step.hidden, 0, 0
        while at < len(self._parts):
            part = self._parts[at]
            own = self._own(part, step, hidden)
            try:
                if part not in sent:
                    if not part.member.has(part.span, time.monotonic()):
                        raise Gone(part.member.name)
                    sent = self._send(at, step, hidden)
                result = self._wait(part, *sent[part], own, first=not at)
            except Gone as gone:
                tries += 1
                if tries > _TRIES:
                    raise NoRoute(f"{tries} servers failed one after the other, the last: {gone}") from gone
                self._replace(at)
                sent = {}
                continue
            part.history.add(own, result)
            part.used = True
            hidden, at = result, at + 1
        return hidden

    def _own(self, part: _Part, step: Step, hidden: torch.Tensor) -> Step:
        """What of a step goes into a span."""
        span = slice(part.span.begin - self._begin, part.span.end - self._begin)
        return Step(step.before, hidden, step.calls[span], step.prompts[span] if step.prompts is not None else None)

    def _send(self, at: int, step: Step, hidden: torch.Tensor) -> dict[_Part, tuple[Future[Reply], float]]:
        """Ask all servers from there on for a step: the first is told what goes in, the others are pushed it."""
        self._link()
        crew, tokens = self._crew, hidden.shape[1]
        points = crew.points("step", hidden.shape[0] * tokens)
        nothing = hidden.new_empty(0)
        found = {}
        for number, part in enumerate(self._parts[at:]):
            told = self._own(part, step, nothing if number else hidden)
            if not number:
                told = self._sent(part, self._number, told)
            asked = crew.send(
                part.member,
                "step",
                self.id,
                part.span.begin,
                self._number,
                tokens,
                told,
                behind=number * crew.step_timeout,
                patience=crew.step_timeout,
                points=points,
                extra=number * crew.step_timeout,
            )
            found[part] = asked, time.perf_counter()
        return found

    def _sent(self, part: _Part, number: int, own: Step) -> Step:
        """What to send for a step: without what goes in, if that is large and goes before it."""
        if len(pieces(own.hidden)) == 1:
            return own
        self._bring(part, number, own.hidden)
        return own._replace(hidden=own.hidden.new_empty(0))

    def _bring(self, part: _Part, number: int, hidden: torch.Tensor) -> None:
        for at, piece in pieces(hidden):
            self._crew.send(part.member, "push", self.id, part.span.begin, number, at, piece)

    def _wait(self, part: _Part, asked: Future[Reply], since: float, own: Step, *, first: bool) -> torch.Tensor:
        if not first:
            with contextlib.suppress(Exception):  # it is raised below, if it is the call's
                asked.wait(_PUSHED)
            if not asked.done():
                self._bring(part, self._number, own.hidden)
        # It has all that it needs by now: for those before, it is not to blame.
        reply = self._crew.answer(part.member, asked, None if first else self._crew.step_timeout)
        elapsed = time.perf_counter() - since if first else None
        tokens = own.hidden.shape[0] * own.hidden.shape[1]
        part.member.answered(reply, elapsed, tokens, len(own.calls))
        found: torch.Tensor = reply.result
        return found

    # -- ways ---------------------------------------------------------------------------------

    def _opened(self, begin: int, end: int) -> list[_Part]:
        """A way through these blocks, on which the session has been opened everywhere."""
        for _ in range(_TRIES):
            way = self._crew.way(begin, end)
            parts = [_Part(span, member, self._history()) for span, member in way]
            try:
                self._open(parts)
            except BaseException as error:
                self._crew.abandon(self.id, [part.member for part in parts])
                if not isinstance(error, Gone):
                    raise
                continue
            return parts
        raise NoRoute(f"no way through blocks {begin} to {end - 1} lasted")

    def _open(self, parts: Sequence[_Part]) -> None:
        """On all of them at once; one after the other, if there may be no room: else two might wait for each other."""
        crew = self._crew
        limited = crew.options.cache_bytes is not None
        asked = []
        for part in parts:
            blocks = part.span.end - part.span.begin
            patience = self._swarm.cache_timeout if limited else 0.0
            wants = self.rows, max(self._expected, self.tokens), blocks, patience
            answer = crew.send(
                part.member, "open", self.id, part.span.begin, self._empty, crew.incarnation, self._expected, wants,
                extra=patience,
            )  # fmt: skip
            if limited:
                crew.outwait(part.member, answer)
            else:
                asked.append((part, answer))
        for part, answer in asked:
            crew.answer(part.member, answer)

    def _history(self) -> History:
        return History(adapter.forgets(self._empty))

    def _link(self) -> None:
        """Have each server know where to push."""
        asked = []
        for part, then in itertools.pairwise(self._parts):
            if part.linked is not then:
                asked.append(
                    (
                        part,
                        then,
                        self._crew.send(
                            part.member, "link", self.id, part.span.begin, then.member.address, then.span.begin
                        ),
                    )
                )
        for part, then, answer in asked:
            with contextlib.suppress(Gone):  # that will be seen when it is asked for a step
                self._crew.answer(part.member, answer)
                part.linked = then

    def _replace(self, at: int) -> None:
        """Others for a span whose server is gone, or is to be relieved of it, brought to where that was."""
        self.state = "recovering"
        self._journal.news()
        part = self._parts[at]
        for _ in range(_TRIES):
            try:
                parts = self._moved(part) or self._caught_up(part)
            except Gone:
                continue
            self._parts[at : at + 1] = parts
            for other in self._parts[max(0, at - 1) : at + len(parts)]:
                other.linked = None
            self.state = "writing"
            return
        raise NoRoute(f"nobody could be brought to where {part.member.name} was")

    def _moved(self, part: _Part) -> list[_Part] | None:
        """Its caches with somebody else, if the server still has them and one other has all of its blocks."""
        if not part.used or not part.member.there or part.member.is_banned(time.monotonic()):
            return None
        way = self._crew.way(part.span.begin, part.span.end)
        if len(way) != 1:
            return None
        ((span, member),) = way
        if member is part.member:
            return None
        try:
            self._crew.ask(
                member,
                "adopt",
                self.id,
                span.begin,
                span.end,
                part.member.address,
                part.span.begin,
                self._crew.incarnation,
                self._crew.step_timeout,
                extra=self._crew.step_timeout,
            )
        except NbdistError as error:  # the one who has it may have died meanwhile
            self._journal.tell(f"session {self.id} could not be moved to {member.name}: {error}")
            return None
        self._crew.abandon(self.id, [part.member], part.span.begin)
        self._journal.tell(f"session {self.id} moved from {part.member.name} to {member.name}, {_named(span)}")
        return [_Part(span, member, part.history, used=True)]

    def _caught_up(self, gone: _Part) -> list[_Part]:
        """Others that are given again what went in."""
        began = time.perf_counter()
        history = gone.history
        parts = self._opened(gone.span.begin, gone.span.end)
        how = "nothing to do again"
        if self.recover == "fast" and len(history.steps) > 1 and self._at_once(gone, parts):
            how = f"{history.tokens} tokens at once"
        elif history.steps:
            if any(part.used for part in parts):  # what was tried at once was not right
                parts = self._opened(gone.span.begin, gone.span.end)
            for step in history.steps:
                self._again(gone, parts, step)
            how = f"{len(history.steps)} steps again"
        if len(parts) == 1:
            parts[0].history = history
        if gone.member not in [part.member for part in parts]:
            self._crew.abandon(self.id, [gone.member], gone.span.begin)  # where it only did not answer
        who = ", ".join(f"{part.member.name} ({_named(part.span)})" for part in parts)
        self._journal.tell(f"session {self.id} goes on by {who}: {how}, {(time.perf_counter() - began) * 1e3:.0f} ms")
        return parts

    def _again(self, gone: _Part, parts: Sequence[_Part], step: Step) -> torch.Tensor:
        hidden = step.hidden
        for part in parts:
            span = slice(part.span.begin - gone.span.begin, part.span.end - gone.span.begin)
            prompts = step.prompts[span] if step.prompts is not None else None
            own = Step(step.before, hidden, step.calls[span], prompts)
            reply: Reply = self._crew.ask(
                part.member,
                "step",
                self.id,
                part.span.begin,
                AGAIN,
                hidden.shape[1],
                self._sent(part, AGAIN, own),
                push=False,
                patience=self._crew.step_timeout,
            )
            part.history.add(own, reply.result)
            part.used = True
            hidden = reply.result
        return hidden

    def _at_once(self, gone: _Part, parts: Sequence[_Part]) -> bool:
        """In one step, if that comes to the same but for rounding."""
        try:
            merged = merging.merge(gone.history, self._swarm.layout)
            calls = tuple(adapter.LayerCall(*call) for call in merged.calls)
            found = self._again(gone, parts, Step((), merged.hidden, calls, merged.prompts))
            if merging.is_near(found, merged.result, merged.calls):
                return True
            why = "came out different"
        except Gone:
            raise
        except (merging.Unmergeable, RuntimeError, TypeError, ValueError, IndexError) as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
        self._journal.tell(f"session {self.id}: all at once {why}; step by step")
        for part in parts:
            part.used = True  # whatever came of it, it is to be opened anew
        return False

    def settle(self) -> None:
        """Leave servers that are to be relieved of what it has there; between two steps."""
        with self._lock:
            if self._refusal:
                return
            try:
                for part in list(self._parts):
                    if not part.member.has(part.span, time.monotonic()):
                        self._leave(part)
            finally:
                self.state = "idle"

    def _leave(self, part: _Part) -> None:
        try:
            with self._crew.working():
                self._replace(self._parts.index(part))
        except NbdistError as error:  # it is tried again by the next step, whose user is told
            self._journal.tell(f"session {self.id} could not leave {part.member.name} yet: {error}")


def _is_some(prompts: torch.Tensor | None) -> bool:
    return prompts is not None and prompts.shape[2] > 0


def _named(span: Span) -> str:
    return named(range(span.begin, span.end))
