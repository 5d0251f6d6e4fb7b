"""Holds the values that an agent owns, and carries out what `Forks` decides about references.

Python may collect an `RRef` in any thread, in the middle of anything. So the end of an `RRef` is only noted
(`nbdist.holds`), and the reading thread acts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nbdist.errors import NbdistError, RRefError
from nbdist.gpus.spans import CUDA_IS_BUILT
from nbdist.holds import Hold, Holds
from nbdist.ids import GlobalId, IdSource
from nbdist.rpc.core.arrivals import Arrival
from nbdist.rpc.core.exchange import Exchange
from nbdist.rpc.core.forks import Drop, Instruction, Send
from nbdist.rpc.core.members import Membership
from nbdist.rpc.failures import Failure
from nbdist.rpc.links import Links
from nbdist.rpc.pool import Job
from nbdist.rpc.promise import Promise
from nbdist.rpc.references.describing import describe_error, describe_value
from nbdist.rpc.references.news import News
from nbdist.signals import DeferredSignals
from nbdist.wire.messages import ChildAccept, Fork, ForkConfirm, ForkRequest, RRefState, State, UserDelete


def creation_error(why: object) -> RRefError:
    """Return the error to raise when a reference is used whose ``remote()`` call failed because of ``why``."""
    return RRefError(
        f"RRef creation via rpc.remote() failed, and the value may not exist: call remote() again. The cause: {why}"
    )


def _failed_promise() -> Promise[Any]:
    """Return a promise that has failed with RRefError. It stands in for a value that does not exist any more."""
    gone: Promise[Any] = Promise()
    why = "a worker that passed it on was lost, or the call that was to make it was given up; create it again"
    gone.try_settle(None, RRefError(f"the value of this RRef is gone: {why}"))
    return gone


class References:
    """The values that one agent owns, and the references that it uses.

    Call its methods without the lock: values are dropped, and calls resumed, without it. ``rref`` is the id of a value,
    ``fork`` the id of a fork held here, None on the owner, and ``to`` an incarnation.
    """

    def __init__(
        self, ids: IdSource, exchange: Exchange, membership: Membership, links: Links, submit: Callable[[Job], None]
    ) -> None:
        self.me = membership.me.incarnation
        self.forks = exchange.forks
        self.new_id = ids.next
        self.refer: Callable[[GlobalId, GlobalId | None, int, Promise[Any] | None], Any]
        """Makes the `RRef` for a value: takes ``rref``, ``fork``, the owner, and the outcome of its `remote` call."""
        self.is_ending = False
        """True once all calls of an ending world have ended: forks of agents that leave from now on count as leaked."""
        self.membership = membership
        self._exchange = exchange
        self._links = links
        self._submit = submit
        self._lock = exchange.lock
        self._values: dict[GlobalId, Promise[Any]] = {}  # those that this agent owns or is about to own
        # The failed calls that should have made a value, by the value's id.
        self._failures: dict[GlobalId, Failure] = {}
        # The forks that agents held when they left an ending world: the ids of value and fork.
        self._leaked: list[tuple[GlobalId, GlobalId]] = []
        self.holds: Holds[tuple[GlobalId, GlobalId | None]] = Holds()
        """The holds on references here: each has the ids of value and fork."""
        news = News(self._lock)
        self.when_changed, self._tell = news.when_changed, news.tell

    # -- values -------------------------------------------------------------------------------

    def own(self, rref: GlobalId) -> Promise[Any]:
        """Make this agent the owner of a value; return its promise. Counts the `RRef` that the caller then makes."""
        with self._lock:
            self.forks.retain(rref)
            return self._value(rref)

    def _value(self, rref: GlobalId) -> Promise[Any]:
        """Return the promise of a value; make it if there is none. The caller holds the lock."""
        value = self._values.get(rref)
        if value is None:
            value = self._values[rref] = Promise()
        return value

    def expect(self, rref: GlobalId) -> None:
        """Make an empty promise for a value that a call is to make here, so that other calls can wait for it."""
        with self._lock:
            self._value(rref)

    def abandon(self, caller: int, id: int) -> None:
        """Fail the value of a call that was refused here and that its caller will not repeat."""
        with self._lock:
            rref, going_on = self._exchange.abandoned(caller, id)
        if rref is not None:
            error = creation_error("the owner lacked a definition of __main__, and the call was given up")
            self.settle(rref, None, error)
        self.resume(going_on)  # these calls wait for the value: they run, and fail

    def refuse(self, arrival: Arrival) -> None:
        """Forget a call that lacks a definition of ``__main__`` until its caller repeats it, gives it up or is lost."""
        with self._lock:
            instructions = self._exchange.refused(arrival)
            caller_is_lost = self.forks.is_lost(arrival.sender)
        self.perform(instructions)
        if caller_is_lost:  # nobody will repeat it: the value fails
            self.abandon(arrival.sender, arrival.call.id)

    def resume(self, arrivals: Sequence[Arrival]) -> None:
        """Run calls that have waited here for a value or a fork, in jobs; fail those whose callers are lost."""
        for arrival in arrivals:
            self._submit(arrival.run if arrival.is_heard else arrival.end_unheard)

    def announce(
        self, rref: GlobalId, value: Any, error: BaseException | None, failure: Failure | None = None
    ) -> State:
        """Send the description of a value, or of the error in its place, to its users; return the description."""
        # `fulfil`, which hands out the value, comes after this: the reply with the description goes out in between.
        state = describe_value(value) if error is None else describe_error(error)
        with self._lock:
            if failure is not None and self.forks.owns(rref):
                self._failures[rref] = failure
            instructions = self.forks.set_state(rref, state)
        self.perform(instructions)
        self._tell(rref)
        return state

    def fulfil(self, rref: GlobalId, value: Any, error: BaseException | None) -> None:
        """Give the value, or the error, to everything that waits for it, and run the calls that work on it."""
        with self._lock:
            # Calls and forks for this value may have arrived before the call that makes it.
            future = self._value(rref) if self.forks.owns(rref) and not self._links.closed else None
        if future is not None:
            if CUDA_IS_BUILT and error is None:
                future.note_streams(value)
            future.try_settle(value, error)
            with self._lock:
                going_on = self._exchange.made(rref)
            if going_on:
                self.resume(going_on)

    def settle(self, rref: GlobalId, value: Any, error: BaseException | None) -> None:
        """Announce and fulfil a value that exists at once, or an error that no call here has raised."""
        self.announce(rref, value, error)
        self.fulfil(rref, value, error)

    def failure(self, rref: GlobalId) -> Failure | None:
        """Return the failed call that should have made the value, the answer to each later use; None without one."""
        return self._failures.get(rref)

    def target(self, rref: GlobalId) -> Promise[Any]:
        """Return the promise of the value on which a running call works: done, or failed if the value is gone."""
        with self._lock:
            value = self._values.get(rref)
        return value if value is not None and value.done() else _failed_promise()

    def local_value(self, rref: GlobalId, timeout: float | None) -> Any:
        """Wait for a value that is owned here, and return it or raise its error. A ``timeout`` of 0 means no limit."""
        with self._lock:
            future = self._values.get(rref)
        if future is None:
            raise RRefError(
                f"the value of {rref} is gone: RPC has been shut down on this worker. Start it again, and create the "
                "value again"
            )
        try:
            return future.wait(timeout or None)
        except BaseException as error:
            if not (future.done() and error is future.exception()):
                raise  # of the wait
        # A copy, as on other workers: the error itself would keep the frames that it passes on its way, and with them
        # the caller's RRefs, as long as this value is kept.
        raise future.copy_of_error()

    def owned(self) -> list[tuple[GlobalId, Promise[Any], set[int]]]:
        """List the values that this agent owns or will own: id, promise, and the other agents that hold forks."""
        self.reap()
        with self._lock:
            return [(id, value, self.forks.holders_of(id)) for id, value in self._values.items()]

    @property
    def closed(self) -> bool:
        """True once the agent has ended."""
        return self._links.closed

    # -- references of this agent -------------------------------------------------------------

    def begin(self, rref: GlobalId, fork: GlobalId, owner: int) -> None:
        """Register the fork of a ``remote()`` call that is about to be sent; `confirm` or `fail` must follow."""
        with self._lock:
            self.forks.begin(rref, fork, owner)

    def confirm(self, fork: GlobalId, state: State | None) -> None:
        """Mark the fork of a ``remote()`` call as confirmed: the reply has arrived. ``state`` describes the value."""
        with self._lock:
            instructions = self.forks.confirm(fork, state)
        self.perform(instructions)
        self._tell(fork)

    def fail(self, fork: GlobalId, *, may_exist: bool) -> None:
        """Mark the fork of a ``remote()`` call as failed. If the value may exist, its owner is told of the release."""
        self._perform_locked(self.forks.fail, fork, may_exist)
        self._tell(fork)

    def hand_over(self, rref: GlobalId, fork: GlobalId | None, to: int, child: GlobalId | None = None) -> Fork:
        """Make a fork for agent ``to``. ``child`` is the id of the new fork; None for a new id."""
        with self._lock:
            return self.forks.hand_over(rref, fork, to, child)

    def take_back(self, handed: Sequence[Fork], to: int) -> None:
        """Undo forks that were to be made for a message to agent ``to`` which was not sent."""
        with self._lock:
            instructions = [action for fork in handed for action in self.forks.take_back(fork, to)]
        self.perform(instructions)

    def accept(self, forks: Sequence[Fork]) -> list[Any]:
        """Return the references that a message brought, as `refer` makes them, even if the message's call has ended."""
        accepted: list[Any] = []
        for fork in forks:
            mine = fork.owner == self.me
            with self._lock:
                gone = mine and fork.rref not in self._values and self.forks.is_gone(fork.rref)
                instructions = self.forks.accept(fork)
                if gone:
                    self._values[fork.rref] = _failed_promise()
                    self.forks.make(fork.rref)
                elif mine:
                    self._value(fork.rref)
            accepted.append(self.refer(fork.rref, None if mine else fork.fork, fork.owner, None))
            self.perform(instructions)
        return accepted

    # -- messages from other agents -----------------------------------------------------------

    def on_fork_request(self, message: ForkRequest, sender: int, _: list[bytes]) -> None:
        """Count a fork of another agent, and confirm it. If the value is gone, the answer says so."""
        self._perform_locked(self.forks.on_fork_request, message, sender)

    def on_user_delete(self, message: UserDelete, sender: int, _: list[bytes]) -> None:
        """Drop a fork that another agent has released; with the last, the value, if nothing here refers to it."""
        self._perform_locked(self.forks.on_user_delete, message, sender)

    def on_child_accept(self, message: ChildAccept, sender: int, _: list[bytes]) -> None:
        """Record that the owner counts a fork which was made here for another agent, or that this fork is dead."""
        self._perform_locked(self.forks.on_child_accept, message)

    def on_fork_confirm(self, message: ForkConfirm, sender: int, _: list[bytes]) -> None:
        """Mark a fork held here as counted by its owner, or as dead, and run the calls that waited for this."""
        with self._lock:
            instructions = self.forks.on_fork_confirm(message)
            going_on = self._exchange.confirmed(message.fork)
        self.perform(instructions)
        self.resume(going_on)
        self._tell(message.fork)

    def on_state(self, message: RRefState, sender: int, _: list[bytes]) -> None:
        """Store the owner's description of a value that did not exist yet when the reference came here."""
        with self._lock:
            self.forks.on_state(message)
        self._tell(message.rref)

    # -- releasing ----------------------------------------------------------------------------

    def hold(self, rref: GlobalId, fork: GlobalId | None) -> Hold:
        """Return a new hold on a reference: an object that keeps the fork alive; on the owner, the value."""
        # Each `RRef` has one, and so has each message on its way that carries one. When nothing refers to the hold any
        # more, `reap` releases the fork or the value.
        return self.holds.hold((rref, fork))

    def reap(self) -> None:
        """Release the forks and values to which nothing here refers any more. Ctrl-C is deferred meanwhile."""
        with DeferredSignals():  # else Ctrl-C in between would keep some of the values for ever
            self.release_ended()

    def release_ended(self) -> None:
        """Do the work of `reap`, in a thread that Ctrl-C cannot interrupt or that defers it."""
        for rref, fork in self.holds.take_ended():
            with self._lock:
                instructions = self.forks.release_owned(rref) if fork is None else self.forks.release(fork)
            self.perform(instructions)
            self._tell(fork if fork is not None else rref)

    def release_all(self) -> None:
        """Release every fork held here, even if objects still refer to it, because the world ends."""
        self.reap()
        with self._lock:
            instructions = [action for fork in self.forks.held() for action in self.forks.release(fork)]
        self.perform(instructions)

    def leaked(self) -> list[tuple[GlobalId, GlobalId]]:
        """List the forks that other agents hold, or held when they left the ending world: the ids of value and fork."""
        with self._lock:
            return [*self._leaked, *self.forks.handed_out()]

    def on_lost(self, incarnation: int) -> None:
        """Drop the forks of a lost agent, fail the values it was to create here, end or resume waiting calls."""
        with self._lock:
            if self.is_ending:
                self._leaked += self.forks.handed_out(incarnation)
            instructions, going_on = self._exchange.lost(incarnation)
            never = self.forks.expected_from(incarnation)
        self.perform(instructions)
        for rref in never:
            error = RRefError("the worker that was to create the value was lost before it did; create it again")
            self.settle(rref, None, error)
        self.resume(going_on)
        self._tell()

    def clear(self) -> None:
        """Fail the values that do not exist yet and forget all others, because the agent has ended."""
        self.holds.clear()
        with self._lock:
            values, self._values = self._values, {}
            self._failures.clear()
            self._exchange.clear()
        for future in values.values():
            error = RRefError(
                "RPC was shut down on this worker before the value existed: start it again, and create the value again"
            )
            future.try_settle(None, error)
        self._tell()

    # -- carrying out instructions ------------------------------------------------------------

    def _perform_locked(self, event: Callable[..., list[Instruction]], *arguments: Any) -> None:
        """Call a method of `Forks` under the lock, and carry out the instructions that it returns."""
        with self._lock:
            instructions = event(*arguments)
        self.perform(instructions)

    def perform(self, instructions: Sequence[Instruction]) -> None:
        """Carry out the instructions of `Forks`: send messages, drop values."""
        for instruction in instructions:
            if isinstance(instruction, Send):
                to, message = instruction
                try:
                    if isinstance(message, UserDelete):
                        self._links.post_later(to, message)  # rides on the next message
                    else:
                        self._links.post(to, message)
                except NbdistError:  # the agent is gone: `on_lost` handles its forks, if it ever was known here
                    # Nobody will answer: the calls that wait for the confirmation must not wait for ever.
                    if isinstance(message, ForkRequest):
                        self.on_fork_confirm(ForkConfirm(message.rref, message.fork, gone=True), to, [])
            elif isinstance(instruction, Drop):
                dropped = None
                with self._lock:
                    if not self.forks.owns(instruction.rref):  # a repeat of the call that makes it may have arrived
                        dropped = self._values.pop(instruction.rref, None)
                        self._failures.pop(instruction.rref, None)
                del dropped  # without the lock: the value's finaliser may do anything
