"""Connects the watch of a context with the workers that run its passes.

::

    watcher --- WatchChanged ---> maker of the context --- WatchChanged ---> every worker in the context, later ones too
    root of a pass --- Head.watching, in every message of the pass ---> every worker that the pass reaches
    worker  --- Observed ---> watcher --- Steer, Go ---> worker
    root    --- Over -------> watcher

A worker has at most one open watch of a context, and any worker that the context reaches may have one. The maker passes
a watch on, because only the maker knows all workers of the context. A worker stores it as `Context.watching`, and a
pass that begins there puts it into all its messages. So every worker that a pass reaches observes the pass, even if the
message about the watch has not reached that worker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

from nbdist.autograd.graph import messages
from nbdist.autograd.graph.edges import GraphEdge
from nbdist.autograd.graph.messages import Head, PassId, Watching
from nbdist.autograd.graph.traces import Plan
from nbdist.autograd.graph.transport import Transport
from nbdist.autograd.passes import claims, inherited_nans
from nbdist.autograd.passes.context import Context, Run
from nbdist.autograd.passes.contexts import Contexts
from nbdist.autograd.watching.node_hooks import CallHooks
from nbdist.autograd.watching.observer import Observer
from nbdist.autograd.watching.prompter import Prompter
from nbdist.autograd.watching.watcher import Watch
from nbdist.errors import UsageError
from nbdist.rpc.failures import text_of_error

_Message = TypeVar("_Message", bound=messages.PassMessage)
_CLOSED_WATCHES_KEPT = 64  # for batches on their way; an older watch has all its batches, or will never get them


class Observing:
    """The watches of one worker, and the observers of the passes that run there; `Passes` has one on each worker."""

    def __init__(self, transport: Transport, contexts: Contexts, freeze: Callable[[int, bool], None]) -> None:
        self._transport = transport
        self._freeze = freeze
        self._contexts = contexts
        self._prompter = Prompter()
        # Closed watches, by context and number, for which batches are still missing.
        self._awaiting: OrderedDict[tuple[int, int], Watch] = OrderedDict()

    # -- on the watcher -----------------------------------------------------------------------

    def watch(self, context: Context, *, paused: bool, norms: bool) -> Watch:
        """Watch the passes of a context from this worker; raises UsageError if this worker has an open watch of it."""
        if context.watch is not None and not context.watch.closed:
            raise UsageError(f"context {context.id} is watched already: close() its other watch first")
        watch = context.watch = Watch(
            self._transport, context.id, paused=paused, norms=norms, ended=self._unwatch, freeze=self._freeze
        )
        self._have_watched(context, watch.watching, over=False)
        return watch

    def _unwatch(self, watch: Watch) -> None:
        """Tell the workers of the context that a watch is closed; keep the watch while batches are on their way."""
        if not watch.complete:
            self._awaiting[watch.context_id, watch.id] = watch
            while len(self._awaiting) > _CLOSED_WATCHES_KEPT:
                self._awaiting.popitem(last=False)
        context = self._contexts.find(watch.context_id)
        if context is not None:
            self._have_watched(context, watch.watching, over=True)

    def _have_watched(self, context: Context, watching: Watching, *, over: bool) -> None:
        """Send the begin or the end of a watch to the maker of the context, which alone knows all its workers."""
        self._tell(context.maker, messages.WatchChanged(context.id, context.maker, watching, over), self.on_watch)

    def _tell(self, worker: int, message: _Message, act: Callable[[_Message], None]) -> None:
        if worker != self._transport.me:
            self._transport.tell(worker, message)
        else:
            act(message)

    def on_observed(self, message: messages.Observed, sender: int) -> None:
        """On the watcher: give a batch of events of the worker ``sender`` to the watch of the pass, if it is known."""
        self._tell_watch(message, lambda watch: watch.on_observed(message, sender))

    def on_over(self, message: messages.Over) -> None:
        """On the watcher: tell the watch, if it is known here, that a pass has ended."""
        self._tell_watch(message, lambda watch: watch.on_over(message))

    def _tell_watch(self, message: messages.Observed | messages.Over, tell: Callable[[Watch], None]) -> None:
        """Call ``tell`` with the watch of a message, if it is one of this worker: open, or closed but incomplete."""
        context = self._contexts.find(message.context)
        watch = context.watch if context is not None else None
        if watch is None or watch.id != message.watch:
            watch = self._awaiting.get((message.context, message.watch))
        if watch is not None:
            tell(watch)
            self._forget_complete(watch)

    def _forget_complete(self, watch: Watch) -> None:
        if watch.complete:
            self._awaiting.pop((watch.context_id, watch.id), None)

    # -- on all workers of a context ----------------------------------------------------------

    def on_watch(self, message: messages.WatchChanged) -> None:
        """Note that a watch of a context begins or ends (``message.over``); the maker tells all other workers of it."""
        # New here, if this overtakes the context's first call.
        context = self._contexts.enter(message.context, message.maker)
        if context is None:
            return
        known, new = context.watching, message.watching
        if message.over:
            # Noted for ever: the end may overtake the begin, which is ignored then.
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
        """On the maker: tell a worker that joins a context about its watch, so that passes there are seen."""
        if context.watching is not None and context.maker == self._transport.me:
            self._transport.tell(worker, messages.WatchChanged(context.id, context.maker, context.watching, False))

    # -- on the workers that run a pass -------------------------------------------------------

    def observer(self, head: Head, context: Context, *, in_engine: bool = True) -> Observer | None:
        """Return a new observer for a pass, or a step that torch's engine does not run; None if nobody watches it.

        The observer has told the watcher already that this worker takes part.
        """
        watching = head.watching
        if watching is None or (watching.watcher, watching.watch) in context.watches_over:
            return None
        watcher, watch = watching.watcher, watching.watch

        def send(number: int, happened: list[messages.Happening], version: int) -> None:
            message = messages.Observed(head.id, context.id, watch, head.smart, number, happened, version)
            self._tell(watcher, message, lambda message: self.on_observed(message, watcher))

        context.number_all()  # all at once: numbers are in the order of the forward pass, and not of the steps
        explain = partial(inherited_nans.explain, context, self._transport)
        # While torch's engine halts, others see the leaves that it has claimed. Steps of pipelines claim none.
        halts = claims.halted if in_engine else nullcontext
        observer = Observer(self._transport.name, context.numbers, watching, send, explain, standing_still=halts)
        observer.note("began")
        observer.flush()  # at once: the watcher steers only workers that it has heard from
        self._prompter.follow(observer)
        return observer

    # -- for the steps of pipelines -----------------------------------------------------------

    def is_watched(self, context: Context) -> bool:
        """Return whether a pass or step that begins here in a context is watched."""
        return context.watching is not None or (context.watch is not None and not context.watch.closed)

    def begin_step(self, context: Context, id: PassId, plan: Plan) -> Head | None:
        """Show the plan of a pipeline step that begins here; return the `Head`, which names the step and its watch.

        `observed_step` needs it on each worker of the step. Returns None if nobody watches any more.
        """
        watch = context.watch if context.watch is not None and not context.watch.closed else None
        if watch is not None:
            watch.prepare(lambda: plan)
        elif context.before_pass is not None:
            context.before_pass(lambda: plan)
        watching = watch.watching if watch is not None else context.watching
        if watching is None:  # the watch has ended meanwhile
            return None
        if watch is not None:
            watch.begin(id, "smart")
        return Head(id, context.id, True, False, False, id.number, watching)

    @contextmanager
    def observed_step(self, head: Head, context: Context) -> Iterator[Observer | None]:
        """Observe this worker's share of a pipeline step during the block; yield None if nobody watches."""
        observer = self.observer(head, context, in_engine=False)
        if observer is None:
            yield None
            return
        context.step_observers[head.id] = observer
        try:
            self.begun(observer)
            yield observer
        finally:
            context.step_observers.pop(head.id, None)
            observer.flush()  # also after an error

    @contextmanager
    def observed_local(
        self, head: Head, context: Context, roots: Sequence[GraphEdge], ended: Callable[[str, int], None]
    ) -> Iterator[None]:
        """Observe this worker's share of a local pass, which runs in the block; its nodes have numbers already.

        Afterwards calls ``ended(error, batches)``: the error that the pass has raised, as text, or an empty one, and
        the number of batches that the watcher must await.
        """
        with self.observed_step(head, context) as observer:
            if observer is None:
                yield
                return
            observer.is_local, error = True, ""
            try:
                with CallHooks(observer, None, context.numbers.all(), [node for node, _ in roots]):
                    yield
            except BaseException as raised:
                # An interrupt may leave this generator to the garbage collector, which closes it.
                kind = KeyboardInterrupt if isinstance(raised, GeneratorExit) else type(raised)
                error = ": ".join(filter(None, (kind.__name__, text_of_error(raised))))
                raise
            finally:
                observer.note("resting")
                ended(error, observer.finish())

    def end(self, run: Run, error: str = "") -> None:
        """On the root of a pass that is over: tell the watcher, with the error that ended the pass if there is one."""
        if run.ledger is not None:
            self.tell_over(run.head, run.context, error, run.ledger.observed)

    def tell_over(self, head: Head, context: Context, error: str, observed: dict[int, int]) -> None:
        """Tell the watcher, if any, that a pass or step is over; ``observed`` has each worker's number of batches."""
        watching = head.watching
        if watching is None:
            return
        # After an error the watcher awaits no batches, as the workers' numbers are not known.
        over = messages.Over(head.id, context.id, watching.watch, error, {} if error else observed)
        self._tell(watching.watcher, over, self.on_over)

    def on_steer(self, message: messages.Steer, sender: int) -> None:
        """Take the watcher's order on where passes halt, later ones too, and end the halts that are over by it."""
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
        """End the halts of one pass here up to the number in the message; the control stays as it is."""
        context = self._contexts.find(message.context)
        for id, observer in _observers(context) if context is not None else ():
            if id == message.id:
                observer.steer(None, message.halts)

    def on_lost(self, worker: int) -> None:
        """Handle the loss of a worker: passes that it watched run without halts, and watches expect nothing from it."""
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

    def begun(self, observer: Observer) -> None:
        """Let a pass or step that has just begun here run without halts if its watcher is gone already."""
        # Lost before the observer was entered in its context, where `on_lost` looks for observers: nobody would end a
        # halt (test_passes_that_begin_when_the_watcher_is_gone_do_not_halt).
        if not self._transport.is_there(observer.whose[0]):
            observer.leave()


def _observers(context: Context) -> list[tuple[PassId, Observer]]:
    of_passes = [(id, run.observer) for id, run in list(context.runs.items()) if run.observer is not None]
    return [*of_passes, *list(context.step_observers.items())]
