"""Ends the calls of an agent: with an answer, or without one.

The code that takes a call out of the table (`PendingCalls`) settles it. So each call ends once, whichever comes first:
the answer, the time limit, the loss of the callee, or the user's Ctrl-C.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nbdist import trace
from nbdist.amounts import counted, duration
from nbdist.errors import MissingDefinition, NbdistError, RpcTimeout, WorkerLost
from nbdist.rpc.core.members import lost_error
from nbdist.rpc.core.pending import Pending, PendingCalls
from nbdist.rpc.failures import rebuild
from nbdist.rpc.futures import without_first_frame
from nbdist.rpc.latch import Latch
from nbdist.rpc.links import Links, try_post
from nbdist.rpc.pool import Job
from nbdist.rpc.promise import Promise
from nbdist.rpc.recording import Attach, Served
from nbdist.rpc.references.reference_table import References, creation_error
from nbdist.rpc.references.rref import RRef
from nbdist.wire import codec
from nbdist.wire.messages import Fork, Record, Reply, Stop


@dataclass(eq=False, repr=False)
class Outcomes:
    """Ends the calls that one agent has made: with the answer, or with an error if there is none.

    ``may_exist`` is True if the callee may have made the value that a call was to make, and must be told to drop it.
    """

    _me: Record
    _pending: PendingCalls
    _references: References
    _links: Links
    _recorder: Served
    _submit: Callable[[Job], None]

    def close(self, why: str) -> None:
        """End all calls with `WorkerLost`, those that wait for a job, too. ``why`` completes "worker0 ..."."""
        for call in self._pending.all():
            self._pending.pop(call.id)
            self._pending.ending[call] = None
        # The job that should end such a call may never run: the pool is closing.
        for call in list(self._pending.ending):
            error = WorkerLost(
                f"{self._me.name} {why} before {call.worker} had answered; {call.function} may have run there. Wait "
                "for calls before RPC ends in this process"
            )
            call.outcome.try_settle(None, error)  # and nothing else: a forked child's other locks may stay taken

    def _job_of(self, job: Callable[[Pending], None], call: Pending) -> Job:
        self._pending.ending[call] = None  # if the job never runs, `close` ends the call
        return partial(job, call)

    # -- ending with an answer ----------------------------------------------------------------

    def on_reply(self, reply: Reply, sender: int, frames: list[bytes]) -> Job | None:
        """Handle an answer: settle its call, or return the job that does. An answer whose call has ended is dropped."""
        # Even if the call has ended: each fork in the answer must be registered, and then released in the usual way.
        references = self._references.accept(reply.payload.forks) if reply.payload.forks else []
        call = self._pending.answered(reply.id, sender)
        if call is None:
            if reply.missing:
                self._abandon(sender, reply.id)
            return None  # too late; the references in it are released at once
        if reply.missing:
            peer = self._links.peer(sender)
            if peer is not None:
                lacking = {digest for _, digest in reply.missing}
                # The callee has not run the call. From now on these definitions are sent to it by value.
                peer.lacking.update(lacking)
                peer.definitions.difference_update(lacking)
            if call.again is None:
                names = ", ".join(name for name, _ in reply.missing)
                error = MissingDefinition(
                    f"{call.worker} no longer has the definition of {names} that it had; call again to send it along"
                )
                return self._job_of(partial(self.unrepeated, error=error), call)
            again = call.again
            return self._job_of(lambda _: again(), call)
        # The callee has run the call, so it has the definitions that the call needed.
        if call.definitions:
            peer = self._links.peer(sender)
            if peer is not None:
                peer.definitions.update(digest for _, digest in call.definitions if digest not in peer.lacking)
        if call.result is not None:
            # The reply to a `remote()` call confirms the fork.
            self._references.confirm(call.result.fork, reply.state)
        # One thread waits, and no callback can run: settle the call here if decoding is quick.
        if type(call.outcome) is Latch and reply.ok:
            if reply.recording is None:
                value = codec.decode_early(reply.payload, frames, references)
                if value is not codec.NOT_DECODED:
                    self.end(call, value, None)
                    return None
            elif codec.decodes_quickly(reply.payload, frames) and not (
                reply.payload.places and self._recorder.looks(reply.recording.context)
            ):
                self._settle(call, reply, frames, references)
                return None
        # The result stays with the callee, so there is no value to decode. Callbacks run in a job.
        if type(call.outcome) is Promise and reply.ok and not frames:
            self.end(call, None, None, self._submit)
            return None
        return self._job_of(partial(self._settle, reply=reply, frames=frames, references=references), call)

    def _settle(self, call: Pending, reply: Reply, frames: list[bytes], references: Sequence[RRef[Any]]) -> None:
        """Decode an answer and end its call with the value, the callee's error, or the error of decoding."""
        outcome: Any = None
        error: BaseException | None = None
        try:
            if frames:
                outcome = codec.decode(reply.payload, frames, references, self._attach(call, reply))
            if not reply.ok:
                outcome, error = None, rebuild(outcome)
        except BaseException as failed:  # a class of the user's, while it is unpickled: the call ends with that
            outcome, error = None, without_first_frame(failed)  # without this frame, which refers to the call
            if reply.ok and isinstance(failed, NbdistError):
                error.add_note(f"while the result of {call.function} from {call.worker} was decoded")
        self.end(call, outcome, error)

    def _attach(self, call: Pending, reply: Reply) -> Attach | None:
        """Return the function that joins the tensors of an answer to the graph; None without a context that is open."""
        if reply.recording is None:
            return None
        context = self._recorder.enter(reply.recording, call.to)
        if context is None:
            return None
        return self._recorder.incoming(context, reply.recording, call.to, call.function)

    def end(
        self, call: Pending, outcome: Any, error: BaseException | None, submit: Callable[[Job], None] | None = None
    ) -> None:
        """Settle a call, which must have left the table. Callbacks run in this thread, or in a job by ``submit``."""
        if call.again is not None:
            call.drop_repeat()
        if self._pending.ending:
            self._pending.ending.pop(call, None)
        if trace.listeners:
            trace.emit("call.ended", agent=self._me.name, to=call.worker, function=call.function, id=call.id)
        if submit is not None and isinstance(call.outcome, Promise):
            call.outcome.try_settle(outcome, error, submit)
        else:
            call.outcome.try_settle(outcome, error)

    # -- ending without an answer -------------------------------------------------------------

    def _fail(self, call: Pending, error: BaseException, *, may_exist: bool) -> None:
        """End a call without an answer. It must have left the table."""
        if call.result is not None:
            self.creation_failed(call.result, error, may_exist=may_exist)
        self.end(call, None, error)

    def creation_failed(self, result: Fork, why: BaseException, *, may_exist: bool) -> None:
        """Mark the reference that a call was to make as failed: using it raises RRefError with the reason ``why``."""
        if result.owner == self._me.incarnation:  # then others may wait here for the value
            self._references.settle(result.rref, None, creation_error(why))
        else:
            self._references.fail(result.fork, may_exist=may_exist)

    def unsent(self, result: Fork | None, outcome: Promise[Any], error: BaseException) -> None:
        """End a call of a finaliser or signal handler that another thread could not send (`Sender.send`)."""
        if result is not None:
            self.creation_failed(result, error, may_exist=False)
        outcome.try_settle(None, error)

    def run_due(self, now: float) -> None:
        """End the calls that have timed out, in a job; ping the callees of calls that have used half of their time."""
        half, over = self._pending.due(now)
        for worker in {call.to for call in half}:
            self._links.ask(worker)  # the answer goes into the text of a later RpcTimeout
        # Here, not in the job: the connection still knows whether the call has arrived.
        errors = [(call, self._timeout_error(call, now)) for call in over]

        def fail() -> None:
            for call, error in errors:
                self._fail(call, error, may_exist=True)

        if errors:
            self._pending.ending.update((call, None) for call in over)
            self._submit(fail)

    def _timeout_error(self, call: Pending, now: float) -> RpcTimeout:
        status = self._links.status(call.to, call.seq)
        return RpcTimeout(
            f"RPC ran for more than {call.timeout:g} s ({call.timeout * 1000:.0f} ms): {call.function} on "
            f"{call.worker}; {status}. If {call.function} needs longer, give the call a longer timeout, or set "
            "rpc_timeout; it may still run there"
        )

    def undelivered(self, id: int) -> None:
        """Fail the call ``id`` with WorkerLost, unless it has ended: the callee has not acknowledged it in any try."""
        call = self._pending.pop(id)
        if call is not None:
            error = WorkerLost(
                f"{call.worker} did not acknowledge the call of {call.function} in any try: see whether the worker "
                "still runs. The function may have run: call again only if it may run twice"
            )
            self._fail(call, error, may_exist=True)  # perhaps only the acknowledgements were lost

    def unrepeated(self, call: Pending, error: BaseException) -> None:
        """End a call that its callee refused for lack of definitions, and that is not sent again."""
        self._abandon(call.to, call.id)
        self._fail(call, error, may_exist=False)

    def _abandon(self, callee: int, id: int) -> None:
        """Tell a callee that a call which it refused will not be repeated: other calls may wait there for its value."""
        try_post(self._links, callee, Stop(id))  # if the callee is gone, nothing waits there

    def lost(self, call: Pending, why: str, others: int) -> None:
        """End a call whose callee is lost, unless it has ended; ``others`` is how many other calls the callee had."""
        if self._pending.pop(call.id) is None:
            return
        more = f", and {counted(others, 'other call')}" if others else ""
        since = duration(time.monotonic() - call.started)
        error = lost_error(call.worker, f"{why}; it had been asked to run {call.function} {since} before{more}")
        self._fail(call, error, may_exist=False)

    def interrupt(self, calls: Sequence[Pending], error: BaseException) -> None:
        """Fail calls that the user has given up on. Calls that have ended stay as they are."""
        for call in calls:
            if self._pending.pop(call.id) is not None:
                self._fail(call, error, may_exist=True)
