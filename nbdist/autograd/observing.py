"""Brings together who watches the passes of a context, and the workers that run them.

A context is watched from one worker. All that it touches are told so by its maker, which knows them; and every message
of a pass says who watches it, so that whoever comes to a pass observes it, however it came there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from nbdist.autograd import inherited, messages
from nbdist.autograd.contexts import Context, Contexts
from nbdist.autograd.messages import Head, PassId, Watching
from nbdist.autograd.observer import Observer
from nbdist.autograd.watching import Watch
from nbdist.errors import UsageError

if TYPE_CHECKING:
    from typing import Protocol

    from nbdist.autograd import watching
    from nbdist.autograd.inspection import Plan
    from nbdist.autograd.run import Run

    class Transport(watching.Transport, Protocol):
        """What observing needs of an agent."""

        @property
        def name(self) -> str:
            """This worker's name."""


__all__ = ["Observing"]

_AWAITED = 64
"""So many watches whose contexts are over wait for what is on its way to them; those before are complete or lost."""


class Observing:
    """The watches and observers of one worker."""

    def __init__(self, transport: Transport, contexts: Contexts) -> None:
        self._transport = transport
        self._contexts = contexts
        self._awaiting: OrderedDict[tuple[int, int], Watch] = OrderedDict()
        """Watches whose contexts are over, but not all is here that was seen of the passes."""

    # -- for whoever watches ------------------------------------------------------------------

    def watch(self, context: Context, *, paused: bool, norms: bool) -> Watch:
        """See from here the passes of a context, wherever they begin."""
        if context.watch is not None and not context.watch.closed:
            raise UsageError(f"the context {context.id} is watched already: close() that watch first")
        watch = context.watch = Watch(self._transport, context.id, paused=paused, norms=norms, ended=self._unwatch)
        self._have_watched(context, watch.watching, over=False)
        return watch

    def _unwatch(self, watch: Watch) -> None:
        if not watch.complete:
            self._awaiting[watch.context_id, watch.id] = watch
            while len(self._awaiting) > _AWAITED:
                self._awaiting.popitem(last=False)
        context = self._contexts.find(watch.context_id)
        if context is not None:
            self._have_watched(context, watch.watching, over=True)

    def _have_watched(self, context: Context, watching: Watching, *, over: bool) -> None:
        message = messages.Watch(context.id, context.maker, watching, over)
        if context.maker != self._transport.me:
            self._transport.tell(context.maker, message)
        else:
            self.on_watch(message)

    def on_observed(self, message: messages.Observed, sender: int) -> None:
        """To the watcher: what was seen."""
        watch = self._find(message.context, message.watch)
        if watch is not None:
            watch.on_observed(message, sender)
            self._forget_complete(watch)

    def on_over(self, message: messages.Over) -> None:
        """To the watcher: a pass has ended."""
        watch = self._find(message.context, message.watch)
        if watch is not None:
            watch.on_over(message)
            self._forget_complete(watch)

    def _find(self, context_id: int, id: int) -> Watch | None:
        context = self._contexts.find(context_id)
        if context is not None and context.watch is not None and context.watch.id == id:
            return context.watch
        return self._awaiting.get((context_id, id))

    def _forget_complete(self, watch: Watch) -> None:
        if watch.complete:
            self._awaiting.pop((watch.context_id, watch.id), None)

    # -- for all that a context touches -------------------------------------------------------

    def on_watch(self, message: messages.Watch) -> None:
        """The passes that begin here are watched, or not any more."""
        context = self._contexts.enter(message.context, message.maker)
        if context is None:
            return
        known, new = context.watching, message.watching
        if message.over:
            context.watches_over.add((new.watcher, new.watch))
            for _, observer in _observers(context):
                if observer.whose == (new.watcher, new.watch):
                    observer.leave()
            if known is not None and (known.watcher, known.watch) == (new.watcher, new.watch):
                context.watching = None
        elif (new.watcher, new.watch) not in context.watches_over:
            context.watching = new
        if context.maker == self._transport.me:
            for worker in context.workers - {self._transport.me}:
                self._transport.tell(worker, message)

    def on_join(self, context: Context, worker: int) -> None:
        """A worker comes to a context."""
        if context.watching is not None and context.maker == self._transport.me:
            self._transport.tell(worker, messages.Watch(context.id, context.maker, context.watching, False))

    # -- for the workers that run a pass ------------------------------------------------------

    def observer(self, head: Head, context: Context, *, in_engine: bool = True) -> Observer | None:
        """Who sees a pass here; None where nobody wants to know."""
        watching, me = head.watching, self._transport.me
        if watching is None or (watching.watcher, watching.watch) in context.watches_over:
            return None
        watcher, watch = watching.watcher, watching.watch

        def send(number: int, happened: list[messages.Happening], version: int) -> None:
            message = messages.Observed(head.id, context.id, watch, head.smart, number, happened, version)
            if watcher != me:
                self._transport.tell(watcher, message)
            else:
                self.on_observed(message, me)

        context.number_all()
        explain = partial(inherited.explain, context, self._transport.name, self._transport.name_of)
        observer = Observer(self._transport.name, context.numbers, watching, send, explain, in_engine=in_engine)
        observer.note("began")
        observer.flush()  # so that the watcher knows of whom to ask what it wants
        return observer

    # -- for the steps of pipelines -----------------------------------------------------------

    def is_watched(self, context: Context) -> bool:
        """Return whether somebody wants to see what begins here in a context."""
        return context.watching is not None or (context.watch is not None and not context.watch.closed)

    def begin_step(self, context: Context, id: PassId, plan: Plan) -> Head | None:
        """Tell the watcher what a step consists of that begins here; return what its workers have to know of it."""
        watch = context.watch if context.watch is not None and not context.watch.closed else None
        if watch is not None:
            watch.prepare_step(plan)
        elif context.before_step is not None:
            context.before_step(plan)
        watching = watch.watching if watch is not None else context.watching
        if watching is None:  # not any more
            return None
        if watch is not None:
            watch.begin(id, "smart")
        return Head(id, context.id, True, False, False, id.number, watching)

    @contextmanager
    def observed_step(self, head: Head, context: Context) -> Iterator[Observer | None]:
        """Observe this worker's share of a step for the time of the block."""
        observer = self.observer(head, context, in_engine=False)
        if observer is None:
            yield None
            return
        context.step_observers[head.id] = observer
        try:
            if not self._transport.is_there(observer.whose[0]) and observer.whose[0] != self._transport.me:
                observer.leave()
            yield observer
        finally:
            context.step_observers.pop(head.id, None)
            observer.flush()

    def end(self, run: Run, error: str = "") -> None:
        """A pass is over; its root tells that to whoever watches it."""
        ledger, watching = run.ledger, run.head.watching
        if ledger is not None and watching is not None:
            self.tell_over(run.head, run.context, error, ledger.observed)

    def tell_over(self, head: Head, context: Context, error: str, observed: dict[int, int]) -> None:
        """Tell the watcher that a pass is over, and how often each worker has told of it."""
        watching = head.watching
        if watching is None:
            return
        over = messages.Over(head.id, context.id, watching.watch, error, {} if error else observed)
        if watching.watcher != self._transport.me:
            self._transport.tell(watching.watcher, over)
        else:
            self.on_over(over)

    def on_steer(self, message: messages.Steer, sender: int) -> None:
        """The watcher says how a context's passes are to go on."""
        context = self._contexts.find(message.context)
        if context is None:
            return
        known = context.watching
        if known is not None and known.watch == message.watch and known.control.version < message.control.version:
            context.watching = known._replace(control=message.control)
        over = dict(message.over)
        for id, observer in _observers(context):
            if observer.whose == (sender, message.watch):
                observer.steer(message.control, over.get(id, 0))

    def on_go(self, message: messages.Go) -> None:
        """The watcher lets a halted node run."""
        context = self._contexts.find(message.context)
        for id, observer in _observers(context) if context is not None else ():
            if id == message.id:
                observer.steer(None, message.halts)

    def on_lost(self, worker: int) -> None:
        """A worker is gone: what it watched goes on, and what it has not told will not come."""
        for watch in list(self._awaiting.values()):
            watch.on_lost(worker)
            self._forget_complete(watch)
        for context in self._contexts.all():
            if context.watching is not None and context.watching.watcher == worker:
                context.watching = None
            if context.watch is not None:
                context.watch.on_lost(worker)
            for _, observer in _observers(context):
                if observer.whose[0] == worker:
                    observer.leave()

    def begun(self, run: Run) -> None:
        """A pass has begun here: by now, its watcher may be gone."""
        if run.observer is not None and not self._transport.is_there(run.observer.whose[0]):
            run.observer.leave()


def _observers(context: Context) -> list[tuple[PassId, Observer]]:
    """Return who observes something that is under way in a context, with the pass or the step that it is."""
    of_passes = [(id, run.observer) for id, run in list(context.runs.items()) if run.observer is not None]
    return [*of_passes, *list(context.step_observers.items())]
