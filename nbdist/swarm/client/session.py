"""A session: one inference with caches on the servers of its route, for one sequence or for a batch of sequences.

A route is a chain of spans; the client keeps the inputs of each span in a `History`::

    client      hidden ──► history 0      history 1      history 2
                           span 0 ──push► span 1 ──push► span 2 ──► result
    servers                worker0        worker1        worker0

    a step      `_step_with_spares`: `_send` to all servers at once, then `_wait_for_result` for each in turn
    worker1 no longer serves span 1        `_replace`
      ├─ it still answers (`leave`, `move`): another server takes over its caches        `_move_caches`
      └─ it is dead: other servers load its blocks (`_open_on_a_route`), then                     `_caught_up`
           ├─ recover="fast": get all inputs of the history in one merged step           `_at_once`
           └─ recover="exact", or the result of the merged step was different:
              get the steps of the history one by one, equal to the last bit             `_step_of_lost_part`

The other spans are not touched: their servers keep their caches.

============= =================================================================
Session.state when
============= =================================================================
"idle"        between two steps
"writing"     in a step
"recovering"  in a step, or in `Session.settle`, while a span gets another server
============= =================================================================

Order of locks: first a session's lock, then `Placer._arranging`, then `Crew._changed`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from nbdist.amounts import counted, duration
from nbdist.errors import NbdistError, UsageError
from nbdist.rpc.futures import Future
from nbdist.swarm import adapter, model_cache
from nbdist.swarm.carriage import carriage
from nbdist.swarm.client import merging
from nbdist.swarm.client.crew import Crew, Gone, Halted
from nbdist.swarm.client.journal import Journal
from nbdist.swarm.client.server_record import ServerRecord
from nbdist.swarm.directory.routing import NoRoute, Span, named
from nbdist.swarm.history import History, Operation, Step
from nbdist.swarm.policy import Recover
from nbdist.swarm.server.session_caches import REPLAYED, StepReply

_numbers = itertools.count()
_MAX_LOST_SERVERS = 16  # that may fail one after the other in a step before the step fails with `NoRoute`
# Seconds for which the client waits for a server's result before it sends that server's input itself: the push of the
# server before may get lost. Sending the input twice is harmless.
_PUSH_SECONDS = 0.5


@dataclass(eq=False)
class _Part:
    """A span of the route, the server of that span, and the inputs that it has received."""

    span: Span
    member: ServerRecord
    history: History
    cache: int = 0  # bytes that the server has reserved for the span, as of its last reply
    # True if the server may have computed something for the session, so that its caches may not be empty.
    used: bool = False
    # False once servers have been opened in its place: one of them may be this server, whose caches begin anew.
    intact: bool = True
    # The part to which the server has been told to push its output.
    linked: _Part | None = field(default=None, repr=False)

    @property
    def serves(self) -> bool:
        """True if the server has all blocks of the span, and the session's caches."""
        return self.intact and self.member.has(self.span, time.monotonic())


class Session:
    """One inference through some blocks of a swarm, with caches on the servers; made by `Sessions.begin`.

    One thread at a time can take a step or move the session, so `settle` waits until a step has ended.
    """

    def __init__(
        self, crew: Crew, journal: Journal, empty: Any, *, begin: int, end: int, recover: Recover, expected: int
    ) -> None:
        # By which servers know the session. No two agents have one incarnation, while a number of a process comes back.
        self.id = f"{crew.incarnation:x}.{next(_numbers)}"
        self.recover: Recover = recover
        self.state: Literal["idle", "writing", "recovering"] = "idle"
        self._crew = crew
        self._journal = journal
        self._empty = empty  # the cache with which servers begin
        self._begin, self._end = begin, end
        self._expected = expected
        self.halted: Halted = None
        self.rows = 1  # the sequences in the batch, as of the last step
        self._before: list[Operation] = []  # on the client's cache since the last step
        self._parts: list[_Part] = []  # the route; empty before the first step
        self._refusal = ""  # the reason why further steps fail; empty while the session is usable
        self._number = 0  # of the last step, the same on all servers
        self._lock = threading.RLock()

    @property
    def route(self) -> list[Span]:
        """The spans that the session goes through, each with its server; empty before the first step."""
        return [part.span for part in list(self._parts)]

    @property
    def tokens(self) -> int:
        """The number of tokens of each sequence in the caches."""
        return self._parts[0].history.tokens if self._parts else 0

    @property
    def cache(self) -> int:
        """The bytes that servers have reserved for the session."""
        return sum(part.cache for part in list(self._parts))

    def told(self) -> dict[str, Any]:
        """Describe the session for a map, as a dict of JSON values; ``route`` has a list for each span."""
        route = [list(span) for span in self.route]
        return {"id": self.id, "tokens": self.tokens, "state": self.state, "route": route}

    def note(self, name: str, args: tuple[Any, ...]) -> None:
        """Record an operation on the client's cache, as ("crop", (-2,)). Servers repeat it before the next step."""
        self._before.append(Operation(name, args))

    def refuse(self, why: str) -> None:
        """Make all further steps raise UsageError with the message ``why``, or with that of an earlier call."""
        self._refusal = self._refusal or why

    def check_usable(self) -> None:
        """Raise UsageError with the message of `refuse` if the session takes no further steps."""
        if self._refusal:
            raise UsageError(self._refusal)

    # -- steps --------------------------------------------------------------------------------

    def step(self, hidden: torch.Tensor, calls: Sequence[Any], prompts: torch.Tensor | None = None) -> torch.Tensor:
        """Take the hidden states of new tokens through all blocks; return the hidden states behind the last block.

        Servers that are lost meanwhile are replaced. After any error the session is over, since some servers may have
        taken the step and others may not: all further steps raise UsageError.

        Args:
            hidden: (sequences, new tokens, width).
            calls: for each block, the `LayerCall` with which it is called.
            prompts: (blocks, sequences or 1, tokens, width), added to the hidden states of the first tokens of the
                sequences before each block. Tokens count from the beginning of the session.

        Raises:
            NoRoute: no server has a block, and none can load it; or more than 16 servers failed in this step.
            CacheFull: the caches do not fit into a server's memory.
            UsageError: the session is over.
        """
        with self._lock:
            self.check_usable()
            before, self._before = tuple(self._before), []
            self.state = "writing"
            try:
                with self._crew.working():
                    found = self._step(before, hidden, calls, prompts)
                self._journal.stepped(self.told, hidden.shape[1], self.rows)
                return found
            except BaseException as error:
                # Some servers may have taken the step, while others have not, or still wait for its input. After an
                # interrupt, all may have taken it, but the client's cache does not count its tokens
                # (`RecordedCache.growing`).
                self.refuse(
                    f"this cache is of a call that failed: {type(error).__name__}: {error}\n"
                    "Its contents are incomplete: start again with a new cache."
                )
                self._crew.abandon(self.id)
                raise
            finally:
                self.state = "idle"

    def _step(
        self, before: tuple[Operation, ...], hidden: torch.Tensor, calls: Sequence[Any], prompts: torch.Tensor | None
    ) -> torch.Tensor:
        """Take a step in pieces of `chunk` tokens; before the first step, open the session on a route."""
        self.rows = hidden.shape[0]
        self._expected = max(self._expected, self.tokens + hidden.shape[1])
        if not self._parts:
            self._parts = self._open_on_a_route(self._begin, self._end)
        # The position of the first new token. Operations that crop the cache come first; their numbers are negative.
        begin = self.tokens + sum(min(0, each.args[0]) for each in before if each.name == "crop")
        size = self._crew.policy.chunk
        pieces: Sequence[tuple[torch.Tensor, Sequence[Any]]] = [(hidden, calls)]
        if size is not None and hidden.shape[1] > size:
            pieces = merging.split(hidden, calls, begin, size, model_cache.windows(self._empty), self._begin)
        found = []
        for given, called in pieces:
            own = prompts[:, :, begin : begin + given.shape[1]] if prompts is not None else None
            own = own.detach() if own is not None and own.shape[2] else None
            step = Step(before, given.detach(), tuple(called), own)
            found.append(self._step_with_spares(step))
            begin += given.shape[1]
            before = ()  # only for the first of the smaller steps
        return torch.cat(found, 1) if len(found) > 1 else found[0]

    def _step_with_spares(self, step: Step) -> torch.Tensor:
        """Take one step, with new servers in place of lost ones; return the output of the last span.

        All servers are called at once. Each pushes its output to the next one, and also returns it to the client, which
        adds it to the histories and needs it if the next server is lost.
        """
        self._number += 1
        sent: dict[_Part, tuple[Future[StepReply], float]] = {}
        hidden, at, tries = step.hidden, 0, 0
        while at < len(self._parts):
            part, lost = self._parts[at], at
            own: Step = part.span.part_of(step, self._begin, hidden)
            try:
                if part not in sent:
                    # A server that lacks a block must not get the step: it could compute only a part of it.
                    for number, each in enumerate(self._parts[at:], at):
                        if not each.serves:
                            lost = number
                            raise Gone(each.member.name)
                    sent = self._send(at, step, hidden)
                result = self._wait_for_result(part, *sent[part], own, first=not at)
            except Gone as gone:
                tries += 1
                if tries > _MAX_LOST_SERVERS:
                    raise NoRoute(
                        f"{tries} servers failed one after the other in one step, the last: {gone}. Swarm.log says "
                        "why. Let other workers join, then start again with a new cache."
                    ) from gone
                self._replace(lost)
                # All servers from here on are called again: a server that has taken the step has the answer stored.
                sent = {}
                continue
            # Only now: `_replace` replays the history, which must not have a step that is still to be taken.
            part.history.add(own, result)
            part.used = True
            hidden, at = result, at + 1
        return hidden

    def _send(self, at: int, step: Step, hidden: torch.Tensor) -> dict[_Part, tuple[Future[StepReply], float]]:
        """Call all servers from span number ``at`` on for a step; return the future and the time of each call."""
        self._link()
        crew = self._crew
        patience, moving = crew.policy.step_timeout, carriage(hidden)
        options = {"patience": patience, "points": crew.policy.spend("step", hidden.shape[0] * hidden.shape[1])}
        # Only the first server gets its input with the call. The others wait for a push of the server before.
        nothing = hidden.new_empty(0)
        found = {}
        for number, part in enumerate(self._parts[at:]):
            own = part.span.part_of(step, self._begin, nothing if number else hidden)
            behind = number * (patience + moving)
            options |= {"pushed": number > 0, "behind": behind, "extra": behind + moving}
            found[part] = self._send_to(part, "step", self._number, own, **options), time.perf_counter()
        return found

    def _send_to(self, part: _Part, method: str, *args: Any, **options: Any) -> Future[Any]:
        """Call a method of a span's server for this session, without waiting, as `Crew.send` does."""
        return self._crew.send(part.member, method, self.id, part.span.begin, *args, **options)

    def _wait_for_result(
        self, part: _Part, asked: Future[StepReply], since: float, own: Step, *, first: bool
    ) -> torch.Tensor:
        """Wait for a server's result of a step and return it; raise `Gone` if the server is lost or does not answer.

        ``asked`` is the call, which was sent at the time ``since``. ``own`` is the part of the step for this span.
        ``first`` is True if the input was sent with the call.
        """
        if not first:
            with contextlib.suppress(Exception):  # an error of the call is raised by `Crew.answer` below
                asked.wait(_PUSH_SECONDS + carriage(own.hidden))
            if not asked.done():
                self._send_to(part, "push", self._number, own.hidden, extra=carriage(own.hidden))
        # The server has its input by now, so its time counts from here on. It is not to blame for earlier servers.
        within = None if first else self._crew.policy.step_timeout + carriage(own.hidden)
        reply = self._crew.answer(part.member, asked, within)
        # The time of any other server includes that of the servers before it.
        elapsed = time.perf_counter() - since if first else None
        tokens = own.hidden.shape[0] * own.hidden.shape[1]
        # Also ends the server's ban and its strikes: else each later ban would last twice as long.
        part.member.answered(reply, elapsed, tokens, len(own.calls))
        part.cache = reply.reserved
        found: torch.Tensor = reply.result
        return found

    # -- ways ---------------------------------------------------------------------------------

    def _open_on_a_route(self, begin: int, end: int) -> list[_Part]:
        """Find a route through these blocks and open the session on all of its servers; try again if one is lost.

        Returns the spans of the route, with empty histories. Raises `NoRoute` after 16 attempts, or if no server has a
        block, and `CacheFull` if a server has no memory for the caches.
        """
        for _ in range(_MAX_LOST_SERVERS):
            way = self._crew.way(begin, end)
            parts = [_Part(span, member, History(model_cache.forgets(self._empty))) for span, member in way]
            try:
                self._open(parts)
            except BaseException as error:  # also Ctrl-C: some servers may have reserved memory
                self._crew.abandon(self.id, [part.member for part in parts])
                if not isinstance(error, Gone):
                    raise
                continue
            return parts
        raise NoRoute(
            f"on every route through blocks {begin} to {end - 1} a server failed while the session was opened; "
            "Swarm.log says why. Let other workers join, then start again with a new cache"
        )

    def _open(self, parts: Sequence[_Part]) -> None:
        """Open the session on the servers of these spans of the route. Raises `Gone` if one is lost, or `CacheFull`."""
        crew = self._crew
        limited = crew.options.cache_bytes is not None
        asked = []
        for part in parts:
            blocks = part.span.end - part.span.begin
            patience = crew.policy.cache_timeout if limited else 0.0
            wants = self.rows, max(self._expected, self.tokens), blocks, patience
            answer = self._send_to(part, "open", self._empty, crew.incarnation, self._expected, wants, extra=patience)
            # One after the other, in the order of the route: two sessions that each hold memory on one server and wait
            # for memory on the other would wait for ever.
            if limited:
                crew.outwait(part.member, answer, halted=self.halted)
            else:
                asked.append((part, answer))
        for part, answer in asked:
            crew.answer(part.member, answer)

    def _link(self) -> None:
        asked = [
            (part, then, self._send_to(part, "link", then.member.address, then.span.begin))
            for part, then in itertools.pairwise(self._parts)
            if part.linked is not then
        ]
        for part, then, answer in asked:
            with contextlib.suppress(Gone):  # the step will notice that the server is gone
                self._crew.answer(part.member, answer)
                part.linked = then

    def _replace(self, at: int) -> None:
        """Give span number ``at`` of the route to other servers, or open it again on its server; restore its caches.

        Raises `NoRoute` if other servers fail in each of 16 attempts, or if no server can take the span; then the route
        stays as it was.
        """
        self.state = "recovering"
        self._journal.news()
        part = self._parts[at]
        for _ in range(_MAX_LOST_SERVERS):
            try:
                parts = self._move_caches(part) or self._caught_up(part)
            except Gone:
                continue
            self._parts[at : at + 1] = parts
            for other in self._parts[max(0, at - 1) : at + len(parts)]:
                other.linked = None  # the server before must push to the new one, and the new ones onwards
            self.state = "writing"
            return
        raise NoRoute(
            f"no server could take over the session from {part.member.name}: each one failed while it was given "
            "the session's inputs. Swarm.log says why. Let other workers join, then start again with a new cache."
        )

    def _move_caches(self, part: _Part) -> list[_Part] | None:
        """Move the caches of a span to another server; return a list of the span with that server, or None.

        Possible while the old server answers and one other server has all blocks of the span.
        """
        if not (part.used and part.intact and part.member.there) or part.member.is_banned(time.monotonic()):
            return None
        crew = self._crew
        (span, member), *others = crew.way(part.span.begin, part.span.end)
        if others or member is part.member:
            return None
        try:
            patience, other = crew.policy.step_timeout, (part.member.address, part.span.begin)
            crew.ask(member, "adopt", self.id, span.begin, span.end, *other, crew.incarnation, patience, extra=patience)
        except NbdistError as error:  # the old server, or the new one, may have died meanwhile
            self._journal.tell(f"session {self.id} could not be moved to {member.name}: {error}")
            return None
        self._crew.abandon(self.id, [part.member], part.span.begin)
        self._journal.tell(f"session {self.id} moved from {part.member.name} to {member.name}, {_named(span)}")
        return [_Part(span, member, part.history, used=True)]

    def _caught_up(self, gone: _Part) -> list[_Part]:
        """Open a span on other servers and replay its history there; return the spans that replace it."""
        began = time.perf_counter()
        history = gone.history
        gone.intact = False
        parts = self._open_on_a_route(gone.span.begin, gone.span.end)
        how = "nothing to do again"
        if self.recover == "fast" and len(history.steps) > 1 and self._at_once(gone, parts):
            how = f"{counted(history.tokens, 'token')} at once"
        elif history.steps:
            if any(part.used for part in parts):  # the merged step failed, and has left wrong caches
                parts = self._open_on_a_route(gone.span.begin, gone.span.end)
            for step in history.steps:
                self._step_of_lost_part(gone, parts, step)
            how = f"{counted(len(history.steps), 'step')} again"
        if len(parts) == 1:
            parts[0].history = history  # a merged step would be the only one in the new history
        if gone.member not in [part.member for part in parts]:
            self._crew.abandon(self.id, [gone.member], gone.span.begin)  # it may be alive and only too slow
        who = ", ".join(f"{part.member.name} ({_named(part.span)})" for part in parts)
        self._journal.tell(f"session {self.id} goes on by {who}: {how}, {duration(time.perf_counter() - began)}")
        return parts

    def _step_of_lost_part(self, gone: _Part, parts: Sequence[_Part], step: Step) -> torch.Tensor:
        """Take a step of the span ``gone`` through the spans that replace it, one by one; return the result."""
        hidden = step.hidden
        for part in parts:
            own = part.span.part_of(step, gone.span.begin, hidden)
            patience = self._crew.policy.step_timeout
            asked = self._send_to(part, "step", REPLAYED, own, push=False, patience=patience, extra=carriage(hidden))
            reply: StepReply = self._crew.answer(part.member, asked)
            part.history.add(own, reply.result)
            part.used = True
            hidden = reply.result
        return hidden

    def _at_once(self, gone: _Part, parts: Sequence[_Part]) -> bool:
        """Replay the whole history as one merged step; return whether the result equals the old one within rounding.

        If not, the log says why, and the caches of ``parts``, the spans that replace ``gone``, are not usable.
        """
        try:
            merged = merging.merge(gone.history, self._crew.layout)
            calls = tuple(adapter.LayerCall(*call) for call in merged.calls)
            found = self._step_of_lost_part(gone, parts, Step((), merged.hidden, calls, merged.prompts))
            if merging.is_near(found, merged.result, merged.calls):
                return True
            why = "its result was different"
        except Gone:
            raise
        # A merged call may have read an argument's shape wrongly, and the layer, or torch, raises.
        except (merging.Unmergeable, RuntimeError, TypeError, ValueError, IndexError) as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
        self._journal.tell(f"session {self.id}: replaying all steps at once failed ({why}); replaying step by step")
        for part in parts:
            part.used = True  # the server may have computed something, so the session must be opened there anew
        return False

    def settle(self) -> None:
        """Move the session away from servers that no longer serve its spans. Waits until a running step has ended.

        If a span cannot move now, it stays, a line in the log says so, and the next step tries again.
        """
        with self._lock:
            if self._refusal:
                return
            try:
                for part in [part for part in self._parts if not part.serves]:
                    try:
                        with self._crew.working():
                            self._replace(self._parts.index(part))
                    except NbdistError as error:  # the next step tries again, and raises it if it occurs again
                        self._journal.tell(f"session {self.id} could not leave {part.member.name} yet: {error}")
            finally:
                self.state = "idle"


def _named(span: Span) -> str:
    return named(range(span.begin, span.end))
