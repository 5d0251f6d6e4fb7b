"""Runs backward passes over workers, in SMART and FAST mode.

The messages of a SMART pass that began on the root and needs a tensor of worker1::

    root                                     worker1
    begin, go
      |------------ Mark ---------------------->|  on_mark: the tensor's gate is EXPECTED; marks to other workers
      |<----------- Report: mark settled -------|
      |------------ Gradients ----------------->|  on_gradients: the part runs; gradients to other workers
      |<----------- Report: gradients settled --|
    the ledger has no open token: the pass is over

A worker sends a mark only for gradients that must wait for others. If it can compute the gradients at once, it sends no
mark; the gradients are then its first message. A worker reports that it ``waits`` if gates without a mark may hold back
its gradients. When the root's ledger says that no mark can come any more, the root sends `Marked` to the workers that
wait. In FAST mode all gates of the context take part, and there are no marks.

The ledger (`nbdist.autograd.passes.ledger`) accounts for every mark and gradient message, so the root knows when no
worker has anything left to do. Then the pass is over; in FAST mode it fails if gates still wait for gradients, and the
error names them.

Only the root commits. Other workers do not hear of the end: their part of the sums counts for `Context.gradients`, and
for an optimizer's step (`Context.gradients_of`), until the next pass of the root commits it (`Head.since`).

An error on any worker goes to the root (`Failed`), which gives the pass up on all workers (`Cancel`). The root also
gives it up if a worker that takes part is lost, or after Ctrl-C. Then the gradients of the pass are dropped.

The locks of autograd, and the order in which a thread may take them:

======================= ==========================================================================================
while it holds          a thread may take
======================= ==========================================================================================
`Context.lock`          `NodeNumbers._lock`, `GradientStore._lock`, `Observer._sending`, `Observer._changed`,
                        `Watch._changed`
`Run.lock`              `Part._lock`
`Observer._halting`     `claims._lock`, `Observer._sending`, `Observer._changed`, `Watch._changed`. The thread that
                        halts a pass holds it until the halt is over
`Watch._changed`        `Freezing._lock`
any other lock, such    no other lock of autograd
as `Part._lock`,
`claims._lock` or
`TurnTaking._lock`
======================= ==========================================================================================

A thread that holds `Run.lock`, `Part._lock` or `claims._lock` sends no message, because sending may take long. A thread
that holds one of these locks does not wait for leaves that another call of torch's engine has claimed
(`nbdist.autograd.passes.claims`).

The handlers ``on_...`` run in threads of the agent's pool, but `on_report` runs in the thread that reads messages, and
`on_lost` in the thread that notices the loss.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import torch

from nbdist import trace
from nbdist.autograd.graph import messages
from nbdist.autograd.graph.edges import GraphEdge, Received
from nbdist.autograd.graph.messages import Head, Missing, Mode, PassId, Report, Token
from nbdist.autograd.graph.traces import Plan
from nbdist.autograd.graph.transport import Transport
from nbdist.autograd.passes import ddp
from nbdist.autograd.passes.context import Context, Outgoing, Run
from nbdist.autograd.passes.contexts import Contexts
from nbdist.autograd.passes.ddp_turns import TurnTaking
from nbdist.autograd.passes.ledger import Ledger
from nbdist.autograd.passes.observing import Observing
from nbdist.autograd.passes.worker_part import Entry, Marks, Part
from nbdist.channel import machine
from nbdist.errors import NbdistError, UsageError, WorkerLost
from nbdist.gpus import side_streams, spans
from nbdist.gpus.spans import CUDA_IS_BUILT
from nbdist.rpc.failures import Failure, describe, rebuild, text_of_error
from nbdist.rpc.futures import Future
from nbdist.rpc.latch import Latch

_log = logging.getLogger("nbdist.autograd")

# Set by `nbdist.autograd`, to a function of a module that imports this one.
plan_from: Callable[[Context, Sequence[GraphEdge], Mode], Plan] | None = None


def _plan(context: Context, starts: Sequence[GraphEdge], mode: Mode) -> Plan:
    assert plan_from is not None
    return plan_from(context, starts, mode)


class UnusedOutputs(UsageError):
    """Raised by a FAST pass if a tensor that was sent in its context does not contribute to the roots.

    The message names the workers and the function of each tensor that nothing uses. The pass adds nothing to the
    context's gradients. Run the forward pass again, and then `backward` with ``mode="smart"``: a pass on the same graph
    may raise RuntimeError, because the failed one has freed tensors of it, unless it had ``retain_graph=True``.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     unused = rpc.rpc_sync("worker1", torch.add, args=(w, 1))
        ...     loss = rpc.rpc_sync("worker1", torch.mul, args=(w, 3)).sum()
        ...     try:
        ...         dist_autograd.backward(context_id, [loss], mode="fast")
        ...     except UnusedOutputs as error:
        ...         print(error)
        this backward pass ran in FAST mode, ... These got no gradient:
          what worker1 sent to worker0 (add)
        Use mode="smart". First run the forward pass again, unless retain_graph has kept the graph.
    """


class Passes:
    """All passes that touch one worker: begins them, acts on their messages and ends them."""

    def __init__(self, transport: Transport, contexts: Contexts, freeze: Callable[[int, bool], None]) -> None:
        self.observing = Observing(transport, contexts, freeze)
        self._transport = transport
        self._me = transport.me
        self._contexts = contexts
        self._lost: dict[int, tuple[str, str]] = {}  # the name of each lost worker, and a text on how it was lost
        self._numbers = itertools.count(1)  # of passes that begin on this worker
        self._tokens = itertools.count(1)
        self._runs: dict[PassId, Run] = {}  # under way here; read without a lock, where the usual message finds its run
        self.turns = TurnTaking(transport)

    # -- at the root --------------------------------------------------------------------------

    def begin(
        self,
        context: Context,
        roots: Entry,
        outcome: Future[None] | None = None,
        *,
        smart: bool = True,
        retain_graph: bool = False,
        accumulate: bool = False,
    ) -> Run:
        """Make this worker the root of a new pass, and return the pass's run; nothing runs before `go`."""
        me = self._me
        mode: Mode = "smart" if smart else "fast"
        watch = context.watch if context.watch is not None and not context.watch.closed else None
        if watch is not None:
            watch.prepare(partial(_plan, context, roots.edges, mode))
        elif context.before_pass is not None:
            context.before_pass(partial(_plan, context, roots.edges, mode))
        id = self.new_id()
        with context.lock:
            earlier = [other.number for other in context.runs if other.root == me] if context.runs else []
        since = min(earlier, default=id.number)
        context.roots.update(dict.fromkeys(roots.edges))
        watching = watch.watching if watch is not None else context.watching
        head = Head(id, context.id, smart, retain_graph, accumulate, since, watching)
        if watch is not None:
            watch.begin(id, mode)
        # Without an outcome that is settled at the end, one thread has to call `wait` to learn of the end.
        run = self._begin(head, context, Ledger(me), outcome if outcome is not None else Latch())
        begun = Token(me, 0, False)  # for the roots, as if they were a message: the pass must not seem over before `go`
        run.sent.append((begun, me))
        run.arrived.append(begun)
        run.part.begin(roots)
        return run

    def new_id(self) -> PassId:
        """Return a new id for a pass, or for a pipeline's step, that begins on this worker."""
        return PassId(self._me, next(self._numbers))

    def go(self, run: Run) -> None:
        """Run the nodes of a pass that has begun here, on this thread, as far as they need no other worker's answer."""
        try:
            # An error of the pass is not raised: it settles the outcome.
            self._advance(run)
        except BaseException:  # Ctrl-C: nobody would wait for the outcome, and the other workers would go on
            self.give_up(run)
            raise

    def wait(self, run: Run, read: Callable[[Latch], None] | None = None) -> None:
        """Wait for the end of a pass that began here, and commit it: its gradients are then in the context."""
        outcome = run.outcome
        assert outcome is not None  # it began here
        try:
            # With ``read``, the thread reads messages meanwhile.
            outcome.wait(read) if isinstance(outcome, Latch) else outcome.wait()
        except BaseException:  # the error of the pass, of whatever class, or Ctrl-C
            self.give_up(run)
            raise
        finally:
            del outcome  # it refers to the error, whose traceback refers to this frame
        self.commit(run)
        if CUDA_IS_BUILT:
            self.let_read(run)

    def let_read(self, run: Run) -> None:
        """Let the calling thread's CUDA streams read the ``.grad`` into which the pool's threads have accumulated."""
        if run.head.accumulate:  # gradients elsewhere are read by methods of the context, which do the same
            side_streams.catch_up_everywhere()

    def commit(self, run: Run) -> None:
        """End a pass on this worker, and add its gradients to the context's; the root also tells the pass's watch."""
        self._runs.pop(run.head.id, None)
        run.outcome = None
        run.context.commit(run)
        self.turns.end(run)
        self.observing.end(run)

    def _begin(
        self, head: Head, context: Context, ledger: Ledger | None = None, outcome: Future[None] | Latch | None = None
    ) -> Run:
        """Make the run of a pass on this worker; only the root gives a ledger and an outcome."""
        # With `Context.lock` held, except on the root. Nothing runs yet.
        run = Run(head, context)
        run.ledger, run.outcome = ledger, outcome
        sends = list(context.sends.values())
        run.observer = self.observing.observer(head, context) if head.watching is not None else None
        # All of torch's threads together get a core each. But in a pass that is watched or averages gradients a thread
        # may block, and others would block with it.
        may_block = run.observer is not None or ddp.living
        run.most_threads = 1 if may_block else max(1, machine.cores() // torch.get_num_threads())
        # A weak reference, since the run refers to the part: a cycle would live until the next garbage collection.
        known = weakref.ref(run)
        run.part = Part(sends, head, partial(self._send_back, known), partial(self._send_marks, known), run.observer)
        context.runs[head.id] = self._runs[head.id] = run
        if run.observer is not None:
            self.observing.begun(run.observer)
        return run

    def _find_run(self, head: Head) -> Run | None:
        """Return the run to which a message belongs, new if need be; None if the pass has ended or its root is lost."""
        context = self._contexts.find(head.context)
        if context is None:
            return None
        with context.lock:
            run = context.runs.get(head.id)
            if run is not None or head.id in context.given_up:
                return run
            run = self._begin(head, context)
            root = head.id.root
            # The head also says which earlier passes of the same root are over.
            over = [run for id, run in context.runs.items() if id.root == root and id.number < head.since]
        for earlier in over:
            self.commit(earlier)
        if head.id.root in self._lost:  # looked up after `_begin`, since `on_lost` may have missed this run
            self._leave(run)
            return None
        return run

    # -- messages -----------------------------------------------------------------------------

    def on_mark(self, message: messages.Mark) -> None:
        """Handle a mark: send marks for the received tensors on which these tensors depend, and report to the root."""
        try:
            run = self._runs.get(message.head.id) or self._find_run(message.head)
            if run is None:
                return
            if run.observer is not None:
                for sent, _ in message.sends:
                    run.observer.note("marked", message=sent)
            # With the lock for both, so that no report names the mark as settled and not those in `out` as sent.
            with run.lock:
                out = [
                    mark
                    for sent, outputs in message.sends
                    for mark in self._announce(run, run.part.mark(sent, outputs))
                ]
                run.settled.append(message.token)
            self._post_marks(run, out)
            self._report(run)
        except Exception as error:  # any: without an answer, the root would wait for ever (`_fail_here`)
            self._fail_here(message.head.id, message.head.context, error)

    def on_gradients(self, message: messages.Gradients, gradients: Sequence[torch.Tensor | None]) -> None:
        """Enter gradients for tensors that were sent from here into their gates, and run the nodes that can run now."""
        try:
            run = self._runs.get(message.head.id) or self._find_run(message.head)
            if run is None:
                return
            if message.report is not None:
                self._enter_report(run, message.token.sender, message.report)
            if run.observer is not None:
                run.observer.note("arrived", message=message.message)
            sent = run.context.sends.get(message.message)
            if sent is not None and sent.has_gpu_tensors:
                # Without a lock: a copy waits for the GPU, and the thread that reads messages takes these locks.
                gradients = run.part.brought(message.message, message.outputs, gradients)
            with run.lock:
                run.part.arrive(message.message, message.outputs, gradients)
                run.arrived.append(message.token)
            self._advance(run)
        except Exception as error:  # any, as in `on_mark`; `_advance` has dealt with the errors of nodes
            self._fail_here(message.head.id, message.head.context, error)

    def on_marked(self, message: messages.Marked) -> None:
        """End the marking on this worker: no more gradients will be announced, so run the gradients that waited."""
        run = self._runs.get(message.id)
        if run is not None:
            try:
                run.part.end_marking()
                self._advance(run)
            except Exception as error:  # any, as in `on_mark`
                self._fail_here(message.id, run.context.id, error)

    def on_granted(self, message: messages.Granted, sender: int) -> None:
        """On the root: the pass has its turn to average gradients of DDP modules; tell the workers that wait for it."""
        run = self._runs.get(message.id)
        if run is None or run.ended:  # the message that ends the turn may have overtaken the one that asked for it
            self._transport.tell(sender, messages.Turn(message.id, True))
        else:
            self._let_go_on(run, self.turns.granted(run))

    def on_report(self, message: Report, sender: int) -> None:
        """On the root: enter a worker's report in the ledger; end the pass, or the marking, if the ledger says so."""
        run = self._runs.get(message.id)
        if run is not None:
            self._enter_report(run, sender, message)

    def on_failed(self, message: messages.Failed, failure: Failure) -> None:
        """On the root: end the pass with an error of another worker, which is raised to the caller of the pass."""
        run = self._runs.get(message.id)
        if run is not None:
            self._settle(run, rebuild(failure))

    def on_cancel(self, message: messages.Cancel) -> None:
        """Give up a pass on this worker, and on the workers to which this one has sent messages of the pass."""
        context = self._contexts.find(message.context)
        if context is None:
            return
        with context.lock:
            known = message.id in context.given_up
            context.given_up.add(message.id)  # also if the first message of the pass comes later than this one
            run = context.runs.get(message.id)
        if run is not None and not known:
            self._end(run, tell=set())

    def on_lost(self, worker: int, name: str, why: str) -> None:
        """Leave the passes that began on a lost worker, and fail those that need it; ``why`` is for the error."""
        self._lost[worker] = name, why  # before the search: a run that begins now looks there
        self.turns.on_lost(worker)
        for context in self._contexts.all():
            for run in list(context.runs.values()):
                # Without a Cancel: if a root has died, every worker notices it. If only the connection to it is cut,
                # the root loses this worker and fails the pass; a Cancel, by way of a third worker, could reach it
                # before and would drop the pass without an error.
                if run.head.id.root == worker:
                    self._leave(run)
                # Another pass goes on. If a later report names the worker, `_enter_report` fails the pass.
                elif worker in self._needed_workers(run):
                    self._transport.submit(partial(self._fail, run, self._lost_error(worker, context)))

    def release(self, context: Context) -> None:
        """End all passes of a context that has ended; a pass that began here and still runs fails with UsageError."""
        for run in list(context.runs.values()):
            if not run.ended:  # settled before `_drop`, which takes the outcome away
                error = UsageError(
                    f"the context {context.id} ended during its backward pass: wait for the pass, by "
                    "`handle.wait()`, before the `with` block of the context ends"
                )
                self._settle(run, error)
            self._drop(run)  # without Cancel messages: all workers are told that the context has ended
        context.runs.clear()

    # -- running ------------------------------------------------------------------------------

    def _advance(self, run: Run) -> None:
        """Run on this thread the nodes of a pass that can run; the last thread to finish reports to the root."""
        with run.lock:
            if run.threads >= run.most_threads:  # one of them looks again for something to run
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
            span = spans.begin(run.part.gpu()) if trace.listeners else None
            try:
                if run.context.check:
                    # A checkpoint computes a forward pass anew here, which is checked for NaN as the first one was.
                    with self._transport.noting(run.context):
                        waits = run.part.run(partial(self._before_step, run))
                else:
                    waits = run.part.run(partial(self._before_step, run))
            except BaseException as error:  # of a user's node or hook, of whatever class; Ctrl-C ends the pass, too
                run.part.stop()
                self._fail(run, error)
                if not isinstance(error, Exception):
                    raise
                return
            if trace.listeners:
                gpu = span.end() if span is not None else None
                trace.emit("segment.ran", agent=self._transport.name, start=start, gpu=gpu, context=run.context.id)
            with run.lock:
                last = run.threads == 1
                # If other threads have run steps since, ``waits`` is out of date.
                if run.again or (last and (not alone or run.entries > entries)):
                    continue
                run.threads -= 1
                if last:
                    taken, run.taken = run.taken, []
                    if waits:  # these run when the marking is over, and are settled only then
                        run.arrived = taken + run.arrived
                        run.waiting += taken
                    else:
                        run.settled += taken
            break
        if not last:
            self._empty_outbox(run)  # the other threads may take long to report
            return
        if run.observer is not None:
            run.observer.waits_for(run.part.missing())
        self._report(run)

    def _before_step(self, run: Run) -> None:
        """Send the gradients in `Run.outbox`, and let another thread run the other entries: this one will be busy."""
        if run.outbox is not None:  # no lock: the thread that fills the outbox also empties it
            self._empty_outbox(run)
        if run.part.ready and run.threads < run.most_threads:
            self._transport.submit(partial(self._advance, run))

    def _empty_outbox(self, run: Run) -> None:
        with run.lock:
            out, run.outbox = run.outbox, None
        if out is not None:
            self._post(run, run.head.id.root, *out)

    def _send_back(
        self, known: weakref.ref[Run], end: Received, outputs: Sequence[int], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Send gradients of tensors ``outputs`` of a received message to its sender, and note that for the report."""
        run = known()
        assert run is not None  # the thread that runs the part refers to the run
        with run.lock:
            token = Token(self._me, next(self._tokens), False)
            run.sent.append((token, end.peer))
            out: Outgoing | None = messages.Gradients(run.head, token, end.message, list(outputs)), list(gradients)
            # Kept only if the report comes soon: one thread runs the pass, and cannot block before it reports.
            soon = run.threads == 1 and not run.part.ready and run.observer is None and not ddp.living
            if soon and end.peer == run.head.id.root != self._me:
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
        """Return a Mark message for each worker that must get one, and note them as sent; `Run.lock` is held."""
        # `_post_marks` sends the messages afterwards, without the lock.
        by_peer: dict[int, list[tuple[int, list[int]]]] = {}
        for end, outputs in marks.items():
            by_peer.setdefault(end.peer, []).append((end.message, outputs))
        out = []
        for peer, sends in by_peer.items():
            token = Token(self._me, next(self._tokens), True)
            run.sent.append((token, peer))
            out.append((peer, messages.Mark(run.head, token, sends)))
        return out

    def _post_marks(self, run: Run, out: Sequence[tuple[int, messages.Mark]]) -> None:
        for peer, message in out:
            self._post(run, peer, message)

    def _post(self, run: Run, to: int, message: messages.PassMessage, body: Any = None) -> None:
        """Send a message of a pass, unless it has ended; note the receiver, for `_end`."""
        run.told.add(to)  # first: if another thread gives the pass up meanwhile, it sends a Cancel there
        if not run.ended:
            self._transport.post(to, message, body)

    def _report(self, run: Run) -> None:
        """Tell the root which messages this worker has settled and sent since the last report, if there are any."""
        waits = run.part.unsure
        missing: list[Missing] = []
        if not run.head.smart:
            sends = run.context.sends
            missing = [Missing(number, sends[number].function, sends[number].peer) for number in run.part.missing()]
        observed = run.observer.finish() if run.observer is not None else 0  # without the lock: this sends messages
        with run.lock:
            if run.ended or not (run.settled or run.waiting or run.sent or waits):
                return
            run.reports += 1  # from 1 on: the root takes a worker's reports only in the order of these numbers
            report = Report(
                run.head.id, run.reports, run.settled, run.waiting, run.sent, waits, missing, run.part.reduces, observed
            )
            run.settled, run.waiting, run.sent = [], [], []
            outbox, run.outbox = run.outbox, None
        root = run.head.id.root
        if root == self._me:
            self._enter_report(run, root, report)
        else:
            try:
                if outbox is None:
                    self._transport.post(root, report)
                else:
                    message, gradients = outbox
                    self._post(run, root, msgspec.structs.replace(message, report=report), gradients)
            except WorkerLost:  # `on_lost` gives the pass up on this worker
                _log.debug("the worker that began the pass %s is gone: it gets no report", run.head.id)

    # -- the end ------------------------------------------------------------------------------

    def _enter_report(self, run: Run, sender: int, report: Report) -> None:
        """Enter a report in the root's ledger; end the pass, or the marking, if the ledger says so."""
        ledger = run.ledger
        assert ledger is not None  # reports go to the root only
        with run.lock:
            if run.ended:
                return
            ledger.take(sender, report)
            lost = self._lost.keys() & ledger.workers
            over = ledger.over
            waiting = set[int]()
            if ledger.waiting and ledger.marking_is_over:
                waiting, ledger.waiting = ledger.waiting, set()
        if over:
            if owed := ledger.owed():  # in another thread: this one may have to read the answers to `plan_from`
                self._transport.submit(partial(self._fail_unused, run, owed))
            else:
                self._settle(run, None)
        elif lost:  # when `on_lost` was called, no report had named the worker
            self._fail(run, self._lost_error(min(lost), run.context))
        elif waiting:
            self._let_go_on(run, self.turns.wait(run, ledger, waiting))

    def _let_go_on(self, run: Run, workers: set[int]) -> None:
        """Tell workers that the marking is over, and their DDP modules may reduce; one that is gone fails the pass."""
        for worker in workers:
            if worker == self._me:  # in another thread: this one may be the one that reads messages
                self._transport.submit(partial(self.on_marked, messages.Marked(run.head.id)))
            else:
                try:
                    self._transport.post(worker, messages.Marked(run.head.id))
                except NbdistError as error:
                    self._fail(run, error)

    def _fail_unused(self, run: Run, owed: Sequence[tuple[int, Missing]]) -> None:
        """End a FAST pass with `UnusedOutputs`, which names the messages that nothing uses, as `plan` does."""
        name = self._transport.name_of
        named = [(name(worker), name(missing.peer), missing.function) for worker, missing in owed]
        with suppress(Exception):  # a worker does not answer; whatever it is, the pass must end
            # What is owed has too much and too little: all that only an unused message depends on, and nothing of a
            # worker that the pass has not reached. The plan asks all workers of the context.
            unused = _plan(run.context, run.part.root_edges, "fast").unused
            named = [(edge.sender, edge.receiver, edge.function) for edge in unused] or named
        lines = [f"  what {sender} sent to {receiver} ({function})\n" for sender, receiver, function in named]
        error = UnusedOutputs(
            "this backward pass ran in FAST mode, which needs every tensor that was sent in the context to "
            f'contribute to the roots. These got no gradient:\n{"".join(lines)}Use mode="smart". First run the '
            "forward pass again, unless retain_graph has kept the graph."
        )
        self._settle(run, error)

    def _settle(self, run: Run, error: BaseException | None) -> None:
        """On the root, settle the outcome of a pass: the thread that waits for it commits the pass or gives it up."""
        outcome = run.outcome
        if outcome is None:
            return
        if error is None:
            with run.lock:
                if run.ended:
                    return
                run.ended = True
        run.error = error  # a later error settles nothing, but a watch shows it
        outcome.try_settle(None, error)

    def _fail(self, run: Run, error: BaseException) -> None:
        """End a pass with an error of this worker: on the root settle its outcome, elsewhere tell the root."""
        if run.ended:
            return
        outcome = run.outcome
        if outcome is not None:
            run.error = run.error or error
            outcome.try_settle(None, error)
            run.part.stop()
            if run.observer is not None:
                run.observer.stop()  # the thread that waits for the outcome may be halted in a node of the pass
            return
        failure = describe(error, self._transport.name, f"the backward pass of context {run.context.id}")
        self._transport.tell(run.head.id.root, messages.Failed(run.head.id), failure)

    def _fail_here(self, id: PassId, context: int, error: Exception) -> None:
        """End a pass because a message of it could not be handled on this worker, perhaps before its run was made."""
        run = self._runs.get(id)
        if run is not None:
            run.part.stop()
            self._fail(run, error)
        else:
            failure = describe(error, self._transport.name, f"the backward pass of context {context}")
            self._transport.tell(id.root, messages.Failed(id), failure)

    def give_up(self, run: Run) -> None:
        """Cancel a pass that began here on all workers that take part, drop its gradients, and tell its watch."""
        workers = run.ledger.workers if run.ledger is not None else set[int]()
        error = run.error
        self._end(run, tell=workers)
        self.observing.end(run, f"{type(error).__name__}: {text_of_error(error)}" if error is not None else "given up")

    def _drop(self, run: Run) -> None:
        """End a pass on this worker, and give its turn to reduce back. A second call is harmless."""
        with run.lock:
            run.ended = True
        self._runs.pop(run.head.id, None)
        run.outcome = None
        run.part.stop()
        self.turns.end(run)
        if run.observer is not None:
            # Threads that a watch has halted in the pass raise `Stopped`.
            run.observer.stop()

    def _leave(self, run: Run) -> None:
        """Drop a pass here, with its later messages and its gradients; tell nobody."""
        context = run.context
        with context.lock:  # `_find_run`, which takes this lock, must not make the run again for a late message
            context.given_up.add(run.head.id)
            context.runs.pop(run.head.id, None)
        self._drop(run)

    def _end(self, run: Run, tell: set[int]) -> None:
        """Drop a pass here, and send a Cancel to the workers that got messages of it from this one, and to ``tell``."""
        self._leave(run)
        for worker in (run.told | tell) - {self._me}:
            self._transport.tell(worker, messages.Cancel(run.head.id, run.context.id))

    def _lost_error(self, worker: int, context: Context) -> WorkerLost:
        name, why = self._lost[worker]
        return WorkerLost(
            f"{name} {why}; the backward pass of context {context.id} needed it. Repeat the step, forward pass "
            "included, in a new context, with workers that live"
        )

    def _needed_workers(self, run: Run) -> set[int]:
        """Return the workers without which a pass cannot end, by incarnation, as far as this worker knows."""
        needed = run.told | run.part.peers()
        needed.update(run.context.sends[message].peer for message in run.part.missing())
        if run.ledger is not None:
            needed |= run.ledger.workers
        return needed
