"""Finds and ends the contexts of one worker: the context of an id, of a message, of a thread.

The life of a context, here made by worker0::

    worker0, the maker            worker1                  worker2
    new()
      |---- call ------------------> enter()
      |                                |---- call ----------> enter()
      |<------------- Entered ---------------------------------|      worker0 now knows of worker2
    release()
      |---- Release ---------------> release()
      |---- Release ----------------------------------------> release()

Only the maker ends a context. A worker that a third worker's call has brought into the context tells the maker so
(`Entered`); so the maker knows all its workers, and can end the context even if a worker between them has died.
Messages that come after the end find the context in `Contexts._over`, and are not recorded.

A worker that takes the place of a dead one counts its contexts from the same number as the dead one did. Two contexts
with the same id differ in the incarnation of their maker.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager

from nbdist.autograd.passes.context import Context
from nbdist.errors import UsageError
from nbdist.thread_frames import thread_name

# An id of a context or message is the worker's id, followed by a counter of this many bits, as in torch, whose tests
# read the worker from an id.
_COUNTER_BITS = 48
_ENDED_CONTEXTS_REMEMBERED = 10_000  # to recognise messages that come too late


class _PerThread(threading.local):
    context: Context | None = None


class Contexts:
    """All contexts that touch one worker, and the one that each thread is in."""

    def __init__(self, worker_id: int, incarnation: int) -> None:
        self._incarnation = incarnation
        self._first = worker_id << _COUNTER_BITS
        self._numbers = itertools.count()
        self._messages = itertools.count()
        self._contexts: dict[int, Context] = {}
        # The contexts that ended last, as (id, incarnation of the maker): a restarted maker uses the ids again.
        self._over: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._lock = threading.RLock()  # a user's ``__del__``, which may run anywhere, may open a context
        self.here = _PerThread()  # the context that the thread is in, also if it has ended: see `current`
        # `is_gone` returns whether the worker of an incarnation was a member and is lost; `on_displaced` is called with
        # a dead maker's context that one with the same id has replaced. The recorder sets both.
        self.is_gone: Callable[[int], bool] = lambda maker: False
        self.on_displaced: Callable[[Context], None] = lambda context: None

    def next_message(self) -> int:
        """Return a new number for an edge; no other worker has the same."""
        return self._first + next(self._messages)

    def all(self) -> list[Context]:
        """Return all contexts that this worker has now."""
        with self._lock:
            return list(self._contexts.values())

    # -- of the calling thread ----------------------------------------------------------------

    @property
    def current(self) -> Context | None:
        """The context that the calling thread is in; None if it is in none, or if that context has ended."""
        context = self.here.context
        return context if context is not None and context.id in self._contexts else None

    @contextmanager
    def outside(self) -> Generator[None]:
        """Take the calling thread out of its context for a block, so that nbdist's own calls in it are not recorded."""
        before, self.here.context = self.here.context, None
        try:
            yield
        finally:
            self.here.context = before

    @property
    def of_others(self) -> str:
        """Words on the contexts that other threads have opened, for an error in a thread that is in none, or ""."""
        opened = [
            f"thread {thread_name(each.thread)!r} has opened context {each.id}" for each in self.all() if each.thread
        ]
        if not opened or self.current is not None:
            return ""
        me = threading.current_thread().name
        return f"; {', '.join(opened)}, and this thread, {me!r}, is in none, so its calls are not recorded there"

    # -- life ---------------------------------------------------------------------------------

    def new(self, *, lines: bool = False, check: bool = False) -> Context:
        """Make a new context on this worker, its maker; no thread enters it."""
        with self._lock:
            context = Context(self._first + next(self._numbers), self._incarnation, lines=lines, check=check)
            self._contexts[context.id] = context
        return context

    def get(self, id: int) -> Context:
        """Return the context with an id; raises UsageError if this worker does not have it, or no longer."""
        context = self._contexts.get(id)
        if context is None:
            # The beginning is torch's, which its own tests match.
            why = ". It never came to this worker, or it ended: contexts end with their `with` block"
            if any(over == id for over, _ in self._over):
                why = ": it has ended"
            raise UsageError(f"Could not find autograd context with id: {id}{why}")
        return context

    def find(self, id: int) -> Context | None:
        """Return the context with an id, or None if this worker does not have it, or no longer."""
        return self._contexts.get(id)

    def enter(self, id: int, maker: int, *, lines: bool = False, check: bool = False) -> Context | None:
        """Return the context of a message, made now if it is new on this worker; None if that context is over."""
        context = self._contexts.get(id)  # without the lock, as nearly every message is of a context that is here
        if context is not None and context.maker == maker:
            context.lines = context.lines or lines  # a Watch message may have made the context, without these
            context.check = context.check or check
            return context
        with self._lock:
            before = self._contexts.get(id)  # once more: another thread may have made it meanwhile
            if before is not None and before.maker == maker:
                return before
            # A late message must not make a context again, not even one that another worker than the maker has sent
            # (test_a_late_message_of_a_dead_maker_neither_takes_a_context_away_nor_makes_one).
            if (id, maker) in self._over or self.is_gone(maker):
                return None
            if before is not None:  # of a dead maker, whose place this one has taken, counting from the same number
                self._note_over(id, before.maker)
            context = self._contexts[id] = Context(id, maker, lines=lines, check=check)
        if before is not None:
            self.on_displaced(before)
        return context

    def release(self, id: int, maker: int) -> Context | None:
        """End a context on this worker, so that late messages do not make it again; return it, or None if not here."""
        with self._lock:
            self._note_over(id, maker)
            context = self._contexts.get(id)
            return self._contexts.pop(id) if context is not None and context.maker == maker else None

    def _note_over(self, id: int, maker: int) -> None:
        self._over[id, maker] = None
        if len(self._over) > _ENDED_CONTEXTS_REMEMBERED:
            self._over.popitem(last=False)
