"""Runs backward passes over workers: SMART and FAST.

A pass has a *root*, the worker on which it was begun. In SMART mode it first finds out which gates take part:
each worker walks its graph from what was given to it, and for every receive that it newly reaches it sends a
*mark* to the worker at the other end, which walks on. Gradients follow as soon as they are there; they may run
what no gate can hold back that might still be marked. In FAST mode all gates of the context take part, and
nothing is marked.

Every mark and gradient is accounted for at the root (`nbdist.autograd.ledger`). So it knows when nothing goes on
anywhere: then all is done, or, in FAST mode, gates wait for gradients that will never come, which is an error that
names them.

An error anywhere goes to the root, which gives the pass up everywhere. So does the loss of a worker that takes
part, and the user's interrupt. The gradients of a pass that was given up are dropped.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from nbdist import trace
from nbdist.autograd import ddp, messages
from nbdist.autograd.contexts import Context, Contexts
from nbdist.autograd.edges import Received
from nbdist.autograd.ledger import Ledger
from nbdist.autograd.messages import Head, Missing, PassId, Report, Token
from nbdist.autograd.observing import Observing
from nbdist.autograd.part import Marks, Part, Roots
from nbdist.autograd.run import Outgoing, Run
from nbdist.autograd.turns import TurnTaking
from nbdist.errors import NbdistError, UsageError, WorkerLost
from nbdist.rpc.failures import Failure, describe, rebuild
from nbdist.rpc.futures import Future, Latch

if TYPE_CHECKING:
    from typing import Protocol

    from nbdist.autograd import observing

    class Transport(observing.Transport, Protocol):
        """What passes need of an agent."""

        def post(self, to: int, message: messages.Message, body: Any = None) -> None:
            """Send; a WorkerLost where there is nobody any more."""

        def submit(self, job: Any) -> None:
            """Run a job on another thread."""

        def noting(self, context: Context) -> AbstractContextManager[None]:
            """Return what a thread enters that computes in a context whose lines are noted, or that is checked."""


__all__ = ["Passes", "UnusedOutputs"]

_log = logging.getLogger("nbdist.autograd")


class UnusedOutputs(UsageError):
    """A FAST pass in a context some of whose calls do not contribute to its roots."""


class Passes:
    """The passes that touch one worker."""

    def __init__(self, transport: Transport, contexts: Contexts) -> None:
        self.observing = Observing(transport, contexts)
        self._transport = transport
        self._me = transport.me
        self._contexts = contexts
        self._numbers = itertools.count(1)
        self._tokens = itertools.count(1)
        self._runs: dict[PassId, Run] = {}
        self.turns = TurnTaking(transport)

    # -- at the root --------------------------------------------------------------------------

    def begin(
        self,
        context: Context,
        roots: Roots,
        outcome: Future[None] | None = None,
        *,
        smart: bool = True,
        retain_graph: bool = False,
        accumulate: bool = False,
    ) -> Run:
        """Begin a pass here, and run nothing yet; ``outcome`` is settled with its end, else only `wait` tells of it."""
        me = self._transport.me
        watch = context.watch if context.watch is not None and not context.watch.closed else None
        if watch is not None:
            watch.prepare("smart" if smart else "fast", roots.edges)
        elif context.before_pass is not None:
            context.before_pass("smart" if smart else "fast", roots.edges)
        id = self.new_id()
        with context.lock:
            earlier = [other.number for other in context.runs if other.root == me] if context.runs else []
        since = min(earlier, default=id.number)
        context.roots.update(dict.fromkeys(roots.edges))
        watching = watch.watching if watch is not None else context.watching
        head = Head(id, context.id, smart, retain_graph, accumulate, since, watching)
        if watch is not None:
            watch.begin(id, "smart" if smart else "fast")
        run = self._begin(head, context, Ledger(me), outcome if outcome is not None else Latch())
        begun = Token(me, 0, False)
        run.sent.append((begun, me))
        run.arrived.append(begun)
        run.part.begin(roots)
        return run

    def new_id(self) -> PassId:
        """Return the id of one more pass that begins here."""
        return PassId(self._transport.me, next(self._numbers))

    def go(self, run: Run) -> None:
        """Run on this thread what can run at once of a pass that has begun here."""
        try:
            self._advance(run)
        except BaseException:
            self.give_up(run)
            raise

    def wait(self, run: Run, read: Callable[[Latch], None] | None = None) -> None:
        """Wait for the end of a pass that began here; ``read`` as for `Latch.wait`."""
        outcome = run.outcome
        assert outcome is not None  # it began here
        try:
            outcome.wait(read) if isinstance(outcome, Latch) else outcome.wait()
        except BaseException:
            self.give_up(run)
            raise
        finally:
            del outcome  # it has the error, which by its traceback has this frame
        self.commit(run)

    def commit(self, run: Run) -> None:
        """A pass is over: its gradients are the context's."""
        self._runs.pop(run.head.id, None)
        run.outcome = None
        run.context.commit(run)
        self.turns.end(run)
        self.observing.end(run)

    def _begin(
        self, head: Head, context: Context, ledger: Ledger | None = None, outcome: Future[None] | Latch | None = None
    ) -> Run:
        run = Run(head, context)
        run.ledger, run.outcome = ledger, outcome
        sends = list(context.sends.values())
        run.observer = self.observing.observer(head, context) if head.watching is not None else None
        # A thread that runs a pass may stop on its way if it is watched, or averages gradients.
        run.most_threads = 1 if run.observer is not None or ddp.living else _most_threads()
        # Not by the run itself, which has the part: a circle would keep all of them until the next collection.
        known = weakref.ref(run)
        run.part = Part(sends, head, partial(self._send_back, known), partial(self._send_marks, known), run.observer)
        context.runs[head.id] = self._runs[head.id] = run
        if run.observer is not None:
            self.observing.begun(run)
        return run

    def _find(self, head: Head) -> Run | None:
        """Return a pass that this worker may not know of yet; None if it is over or given up."""
        context = self._contexts.find(head.context)
        if context is None:
            return None
        with context.lock:
            run = context.runs.get(head.id)
            if run is not None or head.id in context.given_up:
                return run
            run = self._begin(head, context)
            root = head.id.root
            over = [run for id, run in context.runs.items() if id.root == root and id.number < head.since]
        for earlier in over:
            self.commit(earlier)
        return run

    # -- messages -----------------------------------------------------------------------------

    def on_mark(self, message: messages.Mark) -> None:
        """Others' tensors that were made of ours take part."""
        run = self._runs.get(message.head.id) or self._find(message.head)
        if run is None:
            return
        if run.observer is not None:
            for sent, _ in message.sends:
                run.observer.note("marked", message=sent)
        with run.lock:
            out = [
                mark for sent, outputs in message.sends for mark in self._announce(run, run.part.mark(sent, outputs))
            ]
            run.settled.append(message.token)
        self._post_marks(run, out)
        self._report(run)

    def on_gradients(self, message: messages.Gradients, gradients: Sequence[torch.Tensor | None]) -> None:
        """What flows back into this worker."""
        run = self._runs.get(message.head.id) or self._find(message.head)
        if run is None:
            return
        if message.report is not None:
            self._enter(run, message.token.sender, message.report)
        if run.observer is not None:
            run.observer.note("arrived", message=message.message)
        with run.lock:
            run.part.arrive(message.message, message.outputs, gradients)
            run.arrived.append(message.token)
        self._advance(run)

    def on_marked(self, message: messages.Marked) -> None:
        """No gate will be marked any more."""
        run = self._runs.get(message.id)
        if run is not None:
            run.part.end_marking()
            self._advance(run)

    def on_granted(self, message: messages.Granted, sender: int) -> None:
        """To the root: it is the pass's turn to reduce."""
        run = self._runs.get(message.id)
        if run is None or run.ended:  # that it was over may have overtaken that it asked
            self._transport.tell(sender, messages.Turn(message.id, True))
        else:
            self._let_go_on(run, self.turns.granted(run))

    def on_report(self, message: Report, sender: int) -> None:
        """News for the root."""
        run = self._runs.get(message.id)
        if run is not None:
            self._enter(run, sender, message)

    def on_failed(self, message: messages.Failed, failure: Failure) -> None:
        """To the root: it went wrong somewhere."""
        run = self._runs.get(message.id)
        if run is not None:
            self._settle(run, rebuild(failure))

    def on_cancel(self, message: messages.Cancel) -> None:
        """The pass is given up."""
        context = self._contexts.find(message.context)
        if context is None:
            return
        with context.lock:
            known = message.id in context.given_up
            context.given_up.add(message.id)
            run = context.runs.pop(message.id, None)
        if run is not None and not known:
            self._end(run, tell=set())

    def on_lost(self, worker: int, name: str, why: str) -> None:
        """A worker is gone."""
        self.turns.on_lost(worker)
        for context in self._contexts.all():
            for run in list(context.runs.values()):
                if run.head.id.root == worker:
                    self.on_cancel(messages.Cancel(run.head.id, context.id))
                elif worker in self._needed(run):
                    error = WorkerLost(f"{name} {why}; the backward pass of context {context.id} needed it")
                    self._transport.submit(partial(self._fail, run, error))

    def release(self, context: Context) -> None:
        """A context is over: so are its passes."""
        for run in list(context.runs.values()):
            if not run.ended:
                self._settle(run, UsageError(f"the context {context.id} ended during its backward pass"))
            self._drop(run)  # whoever else has it is told of the context's end
        context.runs.clear()

    # -- going on -----------------------------------------------------------------------------

    def _advance(self, run: Run) -> None:
        """Run what can run, unless there are enough threads that do so; the last of them reports it."""
        with run.lock:
            if run.threads >= run.most_threads:
                run.again = True
                return
            run.threads += 1
            run.entries += 1
        while True:
            with run.lock:
                run.again = False
                run.taken += run.arrived
                run.arrived = []
                alone, entries = run.threads == 1, run.entries
            start = time.monotonic()
            try:
                if run.context.check:
                    # What a checkpoint recomputes in a pass is a forward pass: that is checked as the first one was.
                    with self._transport.noting(run.context):
                        waits = run.part.run(partial(self._before_step, run))
                else:
                    waits = run.part.run(partial(self._before_step, run))
            except BaseException as error:
                run.part.stop()
                self._fail(run, error)
                if not isinstance(error, Exception):
                    raise
                return
            if trace.listeners:
                trace.emit("segment.ran", agent=self._transport.name, start=start, context=run.context.id)
            with run.lock:
                if run.again:
                    continue
                if run.threads > 1:
                    run.threads -= 1
                    last = False
                elif not alone or run.entries > entries:
                    continue  # others have run something since: what was found is out of date
                else:
                    taken, run.taken = run.taken, []
                    if waits:  # it will run when the marking is over, and is not dealt with before
                        run.arrived = taken + run.arrived
                        run.marked += taken
                    else:
                        run.settled += taken
                    run.threads = 0
                    last = True
            break
        if not last:
            self._empty_outbox(run)  # the report may be far
            return
        if run.observer is not None:
            run.observer.waits_for({slot.message for slot in run.part.missing()})
        self._report(run)

    def _may_keep(self, run: Run) -> bool:
        """Return whether gradients for the root may wait for this worker's report, to go in one message.

        They may if the report comes soon: one thread runs the pass, and nothing can stop that thread on its way.
        """
        return run.threads == 1 and not run.part.ready and run.observer is None and not ddp.living

    def _before_step(self, run: Run) -> None:
        """The calling thread is going to be busy: it leaves nothing behind, and lets others take what is left."""
        if run.outbox is not None:  # whoever fills it empties it
            self._empty_outbox(run)
        if run.part.ready and run.threads < run.most_threads:
            self._transport.submit(partial(self._advance, run))

    def _empty_outbox(self, run: Run) -> None:
        with run.lock:
            out, run.outbox = run.outbox, None
        if out is not None:
            self._post(run, run.head.id.root, *out)

    def _send_back(
        self,
        known: weakref.ref[Run],
        end: Received,
        outputs: Sequence[int],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        run = known()
        assert run is not None  # whoever runs its part has it
        with run.lock:
            token = Token(self._me, next(self._tokens), False)
            run.sent.append((token, end.peer))
            out: Outgoing | None = messages.Gradients(run.head, token, end.message, list(outputs)), list(gradients)
            if end.peer == run.head.id.root != self._me and self._may_keep(run):
                out, run.outbox = run.outbox, out
        if run.observer is not None:
            run.observer.note("sent", message=end.message)
        if out is not None:
            self._post(run, end.peer, *out)

    def _send_marks(self, known: weakref.ref[Run], marks: Marks) -> None:
        run = known()
        assert run is not None
        with run.lock:
            out = self._announce(run, marks)
        self._post_marks(run, out)

    def _announce(self, run: Run, marks: Marks) -> list[tuple[int, messages.Mark]]:
        by_peer: dict[int, list[tuple[int, list[int]]]] = {}
        for end, outputs in marks.items():
            by_peer.setdefault(end.peer, []).append((end.message, outputs))
        return [(peer, messages.Mark(run.head, self._mark_token(run, peer), sends)) for peer, sends in by_peer.items()]

    def _mark_token(self, run: Run, to: int) -> Token:
        token = Token(self._me, next(self._tokens), True)
        run.sent.append((token, to))
        return token

    def _post_marks(self, run: Run, out: Sequence[tuple[int, messages.Mark]]) -> None:
        for peer, message in out:
            self._post(run, peer, message)

    def _post(self, run: Run, to: int, message: messages.Message, body: Any = None) -> None:
        run.told.add(to)
        if not run.ended:
            self._transport.post(to, message, body)

    def _report(self, run: Run) -> None:
        waits = run.part.unsure
        missing: list[Missing] = []
        if not run.head.smart:
            sends = run.context.sends
            for number in {slot.message for slot in run.part.missing()}:
                missing.append(Missing(number, sends[number].function, sends[number].peer))
        observed = 0
        if run.observer is not None:
            run.observer.flush()
            observed = run.observer.sent
        with run.lock:
            if run.ended or not (run.settled or run.marked or run.sent or waits):
                return
            run.reports += 1
            report = Report(
                run.head.id, run.reports, run.settled, run.marked, run.sent, waits, missing, run.part.reduces, observed
            )
            run.settled, run.marked, run.sent = [], [], []
            outbox, run.outbox = run.outbox, None
        root = run.head.id.root
        if root == self._me:
            self._enter(run, root, report)
        else:
            try:
                if outbox is None:
                    self._transport.post(root, report)
                else:
                    message, gradients = outbox
                    self._post(run, root, msgspec.structs.replace(message, report=report), gradients)
            except NbdistError:  # the loss of the root ends the pass here
                _log.debug("the root of %s is gone", run.head.id)

    # -- the end ------------------------------------------------------------------------------

    def _enter(self, run: Run, sender: int, report: Report) -> None:
        ledger = run.ledger
        assert ledger is not None  # reports go to the root
        with run.lock:
            if run.ended:
                return
            ledger.take(sender, report)
            over = ledger.over
            waiting = set[int]()
            if ledger.waiting and ledger.marked:
                waiting, ledger.waiting = ledger.waiting, set()
        if over:
            owed = ledger.owed()
            self._settle(run, self._unused(owed) if owed else None)
        elif waiting:
            self._let_go_on(run, self.turns.wait(run, ledger, waiting))

    def _let_go_on(self, run: Run, workers: set[int]) -> None:
        """Tell workers that all has been marked, and that they may reduce."""
        for worker in workers:
            if worker == self._me:
                self._transport.submit(partial(self.on_marked, messages.Marked(run.head.id)))
            else:
                try:
                    self._transport.post(worker, messages.Marked(run.head.id))
                except NbdistError as error:
                    self._fail(run, error)

    def _unused(self, owed: Sequence[tuple[int, Missing]]) -> UnusedOutputs:
        name = self._transport.name_of
        lines = [f"  what {name(worker)} sent to {name(missing.peer)} ({missing.function})" for worker, missing in owed]
        return UnusedOutputs(
            "this backward pass ran in FAST mode, which needs every tensor that was sent in the context to "
            "contribute to the roots. These got no gradient:\n" + "\n".join(lines) + '\nUse mode="smart".'
        )

    def _settle(self, run: Run, error: BaseException | None) -> None:
        outcome = run.outcome
        if outcome is None:
            return
        if error is None:
            with run.lock:
                if run.ended:
                    return
                run.ended = True
        run.error = error
        outcome.try_settle(None, error)

    def _fail(self, run: Run, error: BaseException) -> None:
        """It cannot go on here."""
        if run.ended:
            return
        outcome = run.outcome
        if outcome is not None:
            run.error = run.error or error
            outcome.try_settle(None, error)
            run.part.stop()
            if run.observer is not None:
                run.observer.stop()  # who waits for the outcome may be halted in the pass itself
            return
        failure = describe(error, self._transport.name, f"the backward pass of context {run.context.id}")
        self._transport.tell(run.head.id.root, messages.Failed(run.head.id), failure)

    def give_up(self, run: Run) -> None:
        """End a pass that began here without its result."""
        context = run.context
        with context.lock:
            context.given_up.add(run.head.id)
            context.runs.pop(run.head.id, None)
        workers = run.ledger.workers if run.ledger is not None else set[int]()
        error = run.error
        self._end(run, tell=workers)
        self.observing.end(run, f"{type(error).__name__}: {error}" if error is not None else "given up")

    def _drop(self, run: Run) -> None:
        with run.lock:
            run.ended = True
        self._runs.pop(run.head.id, None)
        run.outcome = None
        run.part.stop()
        self.turns.end(run)
        if run.observer is not None:
            run.observer.stop()

    def _end(self, run: Run, tell: set[int]) -> None:
        self._drop(run)
        for worker in (run.told | tell) - {self._transport.me}:
            self._transport.tell(worker, messages.Cancel(run.head.id, run.context.id))

    def _needed(self, run: Run) -> set[int]:
        needed = run.told | run.part.peers()
        needed.update(run.context.sends[slot.message].peer for slot in run.part.missing())
        if run.ledger is not None:
            needed |= run.ledger.workers
        return needed


def _most_threads() -> int:
    """As many as there are cores for, if each uses as many as torch has been told to."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // torch.get_num_threads())
