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
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from nbdist.autograd.passes.context import Context
from nbdist.errors import UsageError

_COUNTER_BITS = 48
"""An id of a context or message is the worker's id, followed by a counter of this many bits."""
_ENDED_CONTEXTS_REMEMBERED = 10_000
"""The number of ended contexts that a worker remembers, to recognise messages that come too late."""


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
        self._over: OrderedDict[tuple[int, int], None] = OrderedDict()
        """The contexts that ended last, as (id, incarnation of the maker)."""
        self._lock = threading.RLock()  # a user's ``__del__``, which may run anywhere, may open a context
        self.here = _PerThread()
        """The context that the calling thread has entered. It may have ended meanwhile: see `current`."""
        self.is_gone: Callable[[int], bool] = lambda maker: False
        """Return whether the worker with this incarnation was a member and is lost; set by the recorder."""
        self.on_displaced: Callable[[Context], None] = lambda context: None
        """Called with a dead maker's context that one with the same id has replaced; set by the recorder."""

    def __len__(self) -> int:
        return len(self._contexts)

    @property
    def last_id(self) -> int:
        """The highest id that a context made by this worker could have."""
        return self._first + (1 << _COUNTER_BITS) - 1

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

    def set_current(self, context: Context | None) -> Context | None:
        """Put the calling thread into a context, or with None into no context; return the context that it was in.

        The caller later passes the returned context to this method, to undo the change.
        """
        before, self.here.context = self.here.context, context
        return before

    @contextmanager
    def outside(self) -> Generator[None]:
        """Take the calling thread out of its context for a block, so that nbdist's own calls in it are not recorded."""
        before = self.set_current(None)
        try:
            yield
        finally:
            self.set_current(before)

    # -- life ---------------------------------------------------------------------------------

    def new(self, *, lines: bool = False, check: bool = False) -> Context:
        """Make a new context on this worker, its maker; no thread enters it.

        ``lines`` and ``check`` say whether it notes lines of code and looks for NaN. `Recorder.open` has the thread
        enter it, and `Recorder.close` ends it on all workers.
        """
        with self._lock:
            context = Context(self._first + next(self._numbers), self._incarnation, lines=lines, check=check)
            self._contexts[context.id] = context
        return context

    def get(self, id: int) -> Context:
        """Return the context with an id; raises UsageError if this worker does not have it, or no longer."""
        context = self._contexts.get(id)
        if context is None:
            why = ". It never came to this worker, or it ended: contexts end with their `with` block"
            if any(over == id for over, _ in self._over):
                why = ": it has ended"
            raise UsageError(f"Could not find autograd context with id: {id}{why}")
        return context

    def find(self, id: int) -> Context | None:
        """Return the context with an id, or None if this worker does not have it, or no longer."""
        return self._contexts.get(id)

    def enter(
        self,
        id: int,
        maker: int,
        entered: Callable[[], Any] = lambda: None,
        *,
        lines: bool = False,
        check: bool = False,
    ) -> Context | None:
        """Return the context to which a message belongs, or None if that context is over.

        ``maker`` is the incarnation of the worker that made the context. Calls ``entered()`` if the context is new on
        this worker. ``lines`` and ``check`` turn on what they do in `new`.
        If the maker is dead, its context is over, even if another worker's message of the context arrives late. A
        living maker may have the same id as the context of an earlier maker: that maker is dead, and this one has taken
        its place. Then the new context replaces the old one.
        """
        context = self._contexts.get(id)
        if context is not None and context.maker == maker:
            context.lines = context.lines or lines  # a Watch message may have made the context, without these
            context.check = context.check or check
            return context
        with self._lock:
            before = self._contexts.get(id)
            if before is not None and before.maker == maker:
                return before
            if (id, maker) in self._over or self.is_gone(maker):
                return None
            if before is not None:
                self._note_over(id, before.maker)
            context = self._contexts[id] = Context(id, maker, lines=lines, check=check)
        if before is not None:
            self.on_displaced(before)
        entered()
        return context

    def release(self, id: int, maker: int) -> Context | None:
        """End a context on this worker; return it, or None if it was not here.

        Later messages of the context do not find it, and do not make it again. ``maker`` is the incarnation of the
        worker that made the context: a restarted worker may reuse ids. A second call returns None.
        """
        with self._lock:
            self._note_over(id, maker)
            context = self._contexts.get(id)
            return self._contexts.pop(id) if context is not None and context.maker == maker else None

    def _note_over(self, id: int, maker: int) -> None:
        """Remember that a context has ended, so that a late message does not make it again; the lock is held."""
        self._over[id, maker] = None
        if len(self._over) > _ENDED_CONTEXTS_REMEMBERED:
            self._over.popitem(last=False)

    def made_by(self, incarnation: int) -> Iterable[Context]:
        """Return the contexts here that the worker with this incarnation has made."""
        return [context for context in self.all() if context.maker == incarnation]
