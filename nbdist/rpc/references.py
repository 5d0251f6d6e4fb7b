"""Drives the reference counting of one agent: values, handles, and the messages that `Forks` asks for.

Python may collect an `RRef` in any thread and in the middle of anything. So its end is only noted (`nbdist.holds`),
and the thread that reads acts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nbdist.errors import NbdistError, RRefError
from nbdist.holds import Hold, Holds
from nbdist.ids import GlobalId, IdSource
from nbdist.rpc.arrivals import Arrival
from nbdist.rpc.describing import describe_error, describe_value
from nbdist.rpc.dispatch import Job
from nbdist.rpc.exchange import Exchange
from nbdist.rpc.failures import Failure
from nbdist.rpc.forks import Drop, Instruction, Send
from nbdist.rpc.futures import Promise
from nbdist.rpc.links import Links
from nbdist.rpc.membership import Membership
from nbdist.rpc.news import News
from nbdist.signals import Deferral
from nbdist.wire.messages import ChildAccept, Fork, ForkConfirm, ForkRequest, RRefState, State, UserDelete

__all__ = ["References", "creation_error"]


def creation_error(why: object) -> RRefError:
    """What to raise wherever a reference is used whose ``remote()`` did not get through."""
    return RRefError(f"RRef creation via rpc.remote() failed, and the value may not exist: {why}")


def _gone() -> Promise[Any]:
    gone: Promise[Any] = Promise()
    why = "a worker through which it came was lost, or the call that was to make it was given up"
    gone.try_settle(None, RRefError(f"the value of this RRef is gone: {why}"))
    return gone


class References:
    """The values that one agent owns, and the references that it uses."""

    def __init__(
        self,
        ids: IdSource,
        exchange: Exchange,
        membership: Membership,
        links: Links,
        submit: Callable[[Job], None],
    ) -> None:
        self.me = membership.me.incarnation
        """The agent's incarnation."""
        self.forks = exchange.forks
        self.new_id = ids.next
        self.refer: Callable[[GlobalId, GlobalId | None, int, Promise[Any] | None], Any]
        """Makes the object with which the user refers to a value.

        Takes the ids of the value and of the fork (None on the owner), the owner's incarnation, and the end of the
        ``remote()`` that makes the value (None where there was none).
        """
        self.is_ending = False
        """Whether the world is past the end of calls: forks that others still hold when they leave count as leaked."""
        self.membership = membership
        self._exchange = exchange
        self._links = links
        self._submit = submit
        self._lock = exchange.lock
        self._values: dict[GlobalId, Promise[Any]] = {}
        self._failures: dict[GlobalId, Failure] = {}
        self._leaked: list[tuple[GlobalId, GlobalId]] = []
        self.holds: Holds[tuple[GlobalId, GlobalId | None]] = Holds()
        """The holds of references here: each of a value, by its id, and of the fork, None on the owner."""
        news = News(self._lock)
        self.when_changed, self._tell = news.when_changed, news.tell

    # -- values -------------------------------------------------------------------------------

    def own(self, rref: GlobalId) -> Promise[Any]:
        """This agent is to have a value of that id; the caller's handle is counted."""
        with self._lock:
            self.forks.retain(rref)
            return self._value(rref)

    def _value(self, rref: GlobalId) -> Promise[Any]:
        """With the lock held: what is, or is to be, the value of that id."""
        value = self._values.get(rref)
        if value is None:
            value = self._values[rref] = Promise()
        return value

    def expect(self, rref: GlobalId) -> None:
        """Have a place for a value that a call is to make here."""
        with self._lock:
            self._value(rref)

    def abandon(self, caller: int, id: int) -> None:
        """Fail the value of a call that was refused here and that its caller will not repeat.

        ``id`` is the caller's number for the call. Others may wait for the value already.
        """
        with self._lock:
            rref, going_on = self._exchange.abandoned(caller, id)
        if rref is not None:
            self.settle(rref, None, creation_error("the owner lacked a definition, and the call was given up"))
        self.resume(going_on)

    def refuse(self, arrival: Arrival) -> None:
        """Forget a call that lacks a definition, until its caller repeats it or gives it up, or is lost."""
        with self._lock:
            instructions = self._exchange.refused(arrival)
            caller_is_lost = self.forks.is_lost(arrival.sender)
        self.perform(instructions)
        if caller_is_lost:
            self.abandon(arrival.sender, arrival.call.id)

    def resume(self, arrivals: Sequence[Arrival]) -> None:
        """Have those calls run that no longer wait, and those end whose callers are lost."""
        for arrival in arrivals:
            self._submit(arrival.run if arrival.is_heard else arrival.end_unheard)

    def announce(
        self, rref: GlobalId, value: Any, error: BaseException | None, failure: Failure | None = None
    ) -> State:
        """Tell what the value is going to be, or the error in its place, described by ``failure``."""
        state = describe_value(value) if error is None else describe_error(error)
        with self._lock:
            if failure is not None and self.forks.owns(rref):
                self._failures[rref] = failure
            instructions = self.forks.set_state(rref, state)
        self.perform(instructions)
        self._tell(rref)
        return state

    def fulfil(self, rref: GlobalId, value: Any, error: BaseException | None) -> None:
        """Let those have the value who wait for it, and run the calls that work on it."""
        with self._lock:
            # Calls and forks may have come for a value that is to be made here before the call that makes it.
            future = self._value(rref) if self.forks.owns(rref) and not self._links.closed else None
        if future is not None:
            future.try_settle(value, error)
            with self._lock:
                going_on = self._exchange.made(rref)
            if going_on:
                self.resume(going_on)

    def settle(self, rref: GlobalId, value: Any, error: BaseException | None) -> None:
        """The value has come to be, or the error in its place."""
        self.announce(rref, value, error)
        self.fulfil(rref, value, error)

    def failure(self, rref: GlobalId) -> Failure | None:
        """How the call failed that should have made the value."""
        return self._failures.get(rref)

    def target(self, rref: GlobalId) -> Promise[Any]:
        """Return the value, owned here, that a call works on which need not wait any more."""
        with self._lock:
            value = self._values.get(rref)
        return value if value is not None and value.done() else _gone()

    def local_value(self, rref: GlobalId, timeout: float | None) -> Any:
        """The value, once it is there."""
        with self._lock:
            future = self._values.get(rref)
        if future is None:
            raise RRefError(f"the value of {rref} is gone: RPC has been shut down on this worker")
        return future.wait(timeout or None)

    def owned(self) -> list[tuple[GlobalId, Promise[Any], set[int]]]:
        """All values that are owned here, or are to be, and which other agents hold references to them."""
        self.reap()
        with self._lock:
            return [(id, value, self.forks.holders_of(id)) for id, value in self._values.items()]

    @property
    def closed(self) -> bool:
        """Whether the agent has ended."""
        return self._links.closed

    # -- users --------------------------------------------------------------------------------

    def begin(self, rref: GlobalId, fork: GlobalId, owner: int) -> None:
        """This agent is about to call ``remote()``."""
        with self._lock:
            self.forks.begin(rref, fork, owner)

    def confirm(self, fork: GlobalId, state: State | None) -> None:
        """The reply to ``remote()`` has come."""
        with self._lock:
            instructions = self.forks.confirm(fork, state)
        self.perform(instructions)
        self._tell(fork)

    def fail(self, fork: GlobalId, *, may_exist: bool) -> None:
        """``remote()`` did not get through."""
        with self._lock:
            instructions = self.forks.fail(fork, may_exist=may_exist)
        self.perform(instructions)
        self._tell(fork)

    def hand_over(self, rref: GlobalId, fork: GlobalId | None, to: int, child: GlobalId | None = None) -> Fork:
        """Make a fork for another agent; ``fork`` is the one held here, or None on the owner.

        ``child`` is the id that it gets; where it is None, a new one.
        """
        with self._lock:
            return self.forks.hand_over(rref, fork, to, child)

    def take_back(self, handed: Sequence[Fork], to: int) -> None:
        """Those forks were not sent after all."""
        with self._lock:
            instructions = [action for fork in handed for action in self.forks.take_back(fork, to)]
        self.perform(instructions)

    def accept(self, forks: Sequence[Fork]) -> list[Any]:
        """Return the references, as `refer` makes them, that a message brought."""
        accepted: list[Any] = []
        for fork in forks:
            mine = fork.owner == self.me
            with self._lock:
                gone = mine and fork.rref not in self._values and self.forks.is_gone(fork.rref)
                instructions = self.forks.accept(fork)
                if gone:
                    self._values[fork.rref] = _gone()
                    self.forks.make(fork.rref)
                elif mine:
                    self._value(fork.rref)
            accepted.append(self.refer(fork.rref, None if mine else fork.fork, fork.owner, None))
            self.perform(instructions)
        return accepted

    # -- what others say ----------------------------------------------------------------------

    def on_fork_request(self, message: ForkRequest, sender: int, _: list[bytes]) -> None:
        """Count a fork of another agent, and confirm it."""
        self._perform_locked(self.forks.on_fork_request, message, sender)

    def on_user_delete(self, message: UserDelete, sender: int, _: list[bytes]) -> None:
        """Drop a fork that another agent has released."""
        self._perform_locked(self.forks.on_user_delete, message, sender)

    def on_child_accept(self, message: ChildAccept, sender: int, _: list[bytes]) -> None:
        """Note that the owner counts a fork which was made here for another agent."""
        self._perform_locked(self.forks.on_child_accept, message)

    def on_fork_confirm(self, message: ForkConfirm, sender: int, _: list[bytes]) -> None:
        """Mark a fork held here as counted by its owner, or as dead."""
        self._confirmed(message)

    def _confirmed(self, message: ForkConfirm) -> None:
        with self._lock:
            instructions = self.forks.on_fork_confirm(message)
            going_on = self._exchange.confirmed(message.fork)
        self.perform(instructions)
        self.resume(going_on)
        self._tell(message.fork)

    def on_state(self, message: RRefState, sender: int, _: list[bytes]) -> None:
        """Store what the owner tells of a value that now exists."""
        with self._lock:
            self.forks.on_state(message)
        self._tell(message.rref)

    # -- letting go ---------------------------------------------------------------------------

    def hold(self, rref: GlobalId, fork: GlobalId | None) -> Hold:
        """Return what keeps ``fork`` (on the owner, where it is None, the value) until nothing refers to it.

        A reference has it, and so has each message with which the reference is on its way.
        """
        return self.holds.hold((rref, fork))

    def reap(self) -> None:
        """Release what was held by holds that have gone, in a thread in which Ctrl-C may come."""
        with Deferral():  # or some of it would stay held
            self.release_ended()

    def release_ended(self) -> None:
        """Do as `reap`, in a thread in which Ctrl-C does not come."""
        for rref, fork in self.holds.take_ended():
            with self._lock:
                instructions = self.forks.release_owned(rref) if fork is None else self.forks.release(fork)
            self.perform(instructions)
            self._tell(fork if fork is not None else rref)

    def release_all(self) -> None:
        """Let go of every fork held here, whatever objects still hold it: the world ends."""
        self.reap()
        with self._lock:
            instructions = [action for fork in self.forks.held() for action in self.forks.release(fork)]
        self.perform(instructions)

    def leaked(self) -> list[tuple[GlobalId, GlobalId]]:
        """List the forks of values here that others hold, or held when they left the world that was ending."""
        with self._lock:
            return [*self._leaked, *self.forks.handed_out()]

    def on_lost(self, incarnation: int) -> None:
        """Drop what an agent held that is gone, fail what it was to create here, and end or resume what waited."""
        with self._lock:
            if self.is_ending:
                self._leaked += self.forks.handed_out(incarnation)
            instructions, going_on = self._exchange.lost(incarnation)
            never = self.forks.expected_from(incarnation)
        self.perform(instructions)
        for rref in never:
            self.settle(rref, None, RRefError("the worker that was to create the value is lost"))
        self.resume(going_on)
        self._tell()

    def clear(self) -> None:
        """The agent has ended."""
        self.holds.clear()
        with self._lock:
            values, self._values = self._values, {}
            self._failures.clear()
            self._exchange.clear()
        for future in values.values():
            future.try_settle(None, RRefError("RPC was shut down before the value came to be"))
        self._tell()

    # -- doing --------------------------------------------------------------------------------

    def _perform_locked(self, event: Callable[..., list[Instruction]], *arguments: Any) -> None:
        with self._lock:
            instructions = event(*arguments)
        self.perform(instructions)

    def perform(self, instructions: Sequence[Instruction]) -> None:
        """Carry out what `Forks` asks for."""
        for instruction in instructions:
            if isinstance(instruction, Send):
                to, message = instruction
                try:
                    if isinstance(message, UserDelete):
                        self._links.post_later(to, message)
                    else:
                        self._links.post(to, message)
                except NbdistError:  # gone: `on_lost` has seen or will see to its forks, if it ever was known here
                    if isinstance(message, ForkRequest):
                        self._confirmed(ForkConfirm(message.rref, message.fork, gone=True))
            elif isinstance(instruction, Drop):
                dropped = None
                with self._lock:
                    if not self.forks.owns(instruction.rref):  # the call that makes it may have come once more
                        dropped = self._values.pop(instruction.rref, None)
                        self._failures.pop(instruction.rref, None)
                del dropped  # outside of the lock: a value's own finaliser may do anything
