"""Agents in one thread, on a wire: a test decides which message arrives when, which is lost and which comes twice.

The agents are the ones that ship. In place of what would make them run by themselves there are:

===================  ==================================================================================
the channel          `Wire` holds the messages under way until the test delivers them
the pool             `Jobs`: calls that run, answers and errors wait until the test lets them go on
``time.monotonic``   the world's clock, which stands still until the test lets time pass
``__main__``         one for each agent, so that one can lack what another has defined
a thread's sleep     raises `Asleep`, so that the program goes on while its call is under way
===================  ==================================================================================

`SimulatedWorld` notes what its programs do, and `SimulatedWorld.check` compares the agents with that: nothing that
somebody refers to is dropped, each call runs at most once, and ends once, with its own answer or with an error that
something which has happened explains. `SimulatedWorld.check_end` finds what is left when all is over.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import os
import sys
import time
import types
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from helpers.simulated.stepping import Jobs
from nbdist import trace
from nbdist.channel.contract import ChannelError
from nbdist.errors import Interrupted, MissingDefinition, NbdistError, RpcTimeout, WorkerLost
from nbdist.rpc import RRef, functions, rpc_async, rpc_sync
from nbdist.rpc.agent import Agent, active_agent
from nbdist.rpc.core.forks import ForkStanding
from nbdist.rpc.latch import Latch
from nbdist.rpc.options import RpcBackendOptions
from nbdist.rpc.waits import set_blocking_hook
from nbdist.testing import ManualClock
from nbdist.wire.messages import Record

PATIENT = RpcBackendOptions(retries=10_000, arena_bytes=0)
HANDSHAKE = {"hello", "welcome", "ready"}
NO_LIMIT = 0.0


# --- the wire -------------------------------------------------------------------------------------


class Flying(NamedTuple):
    """A message under way."""

    to: str
    """The receiver's address."""
    frames: list[bytes]


class Wire:
    """The messages under way, in the order in which they were sent."""

    def __init__(self):
        self.flying: list[Flying] = []
        self.channels: dict[str, WireChannel] = {}
        self.refusing: set[tuple[str, str]] = set()
        """The ways, from an address to another, that refuse the next message."""
        self.deliver = None
        """Takes a message of a handshake at once."""


class WireChannel:
    """One agent's end of the wire; see `nbdist.channel.contract.Channel`."""

    readers = 1

    def __init__(self, wire, address):
        self.wire, self.address = wire, address
        self.addresses = [address]
        self.arrived = []
        self.is_cut = False
        """Whether nothing goes out any more: its process has died."""
        wire.channels[address] = self

    def connect(self, addresses):
        return WireLink(self, addresses[0])

    def receive(self, timeout, guest=False, soon=False):
        return self.arrived.pop() if self.arrived else None

    def has_more(self):
        return False

    def wake(self):
        pass

    def call(self):
        pass

    def called(self):
        pass

    def close(self):
        self.wire.channels.pop(self.address, None)


class WireLink:
    """The way from one end of the wire to another."""

    def __init__(self, channel, to):
        self.channel, self.to = channel, to

    def send(self, frames, kind):
        channel, wire = self.channel, self.channel.wire
        if channel.is_cut:
            return
        if (channel.address, self.to) in wire.refusing:
            wire.refusing.discard((channel.address, self.to))
            raise ChannelError("the wire takes nothing now")
        flying = Flying(self.to, [bytes(frame) for frame in frames])
        if kind in HANDSHAKE:
            wire.deliver(flying)
        else:
            wire.flying.append(flying)

    def close(self, *, at_once=False):
        pass


# --- what programs call ---------------------------------------------------------------------------


class Thing:
    """A value that references refer to."""

    def __init__(self, token):
        self.token = token

    def __reduce__(self):
        return Thing, (self.token,)

    def ask(self, token):
        """Return who has this, what it is, and for which call."""
        return _run(token).incarnation, self.token, token


class Failed(Exception):
    """What a function raises on purpose."""


_members: dict[int, Member] = {}


def _run(token):
    """Note that the call with this token runs; the member for which it does."""
    member = _members[active_agent().me.incarnation]
    member.world.ran[token] += 1
    return member


def count(token):
    """Return who runs it: of the usual kind, whose arguments and result need no pickler of ours."""
    return _run(token).incarnation, token


def make(token):
    """Make a value that lives until nobody refers to it."""
    return _run(token).thing(token)


def fail(token):
    _run(token)
    raise Failed(token)


def keep(token, references):
    """Go on holding the references that come."""
    member = _run(token)
    member.handles += references
    return member.incarnation, token


def lend(token):
    """Return a reference from those held here."""
    member = _run(token)
    lendable = member.usable()
    return member.incarnation, token, lendable[token % len(lendable)] if lendable else None


@functions.async_execution
def relay(token, to):
    """Have another member count, without a thread that waits here."""
    _run((token, "relayed"))
    record = active_agent().membership.get(to)
    if record is None:
        raise WorkerLost(f"{to} is gone")  # by now its name may be another's
    return rpc_async(record.name, count, (token,), timeout=NO_LIMIT)


# --- members --------------------------------------------------------------------------------------


class Asleep(BaseException):
    """The program waits for a call, and its thread is needed for other things."""


@dataclass(eq=False)
class Asked:
    """A call that a program has made."""

    by: Member
    token: Any
    answer: Any
    """What comes back if nothing goes wrong; an error's type if it is meant to raise."""
    started: float
    timeout: float
    outcome: Any = None
    """A future, or what a thread that waits has."""
    parties: set[int] = field(default_factory=set)
    """The incarnations of all on which it depends."""
    definition: str | None = None
    """The function's name in ``__main__``."""
    target: Held | None = None
    """The reference that it uses."""
    holds: Any = None
    """What the thread that waits keeps."""
    creates: bool = False
    """Whether it makes a value that stays with its callee."""
    given_up: bool = False
    error: BaseException | None = None


class Held(NamedTuple):
    """A reference as it was held when it was used."""

    by: int
    rref: Any
    fork: Any
    owner: int


class Member:
    """An agent, the ``__main__`` of its program, and the references that the program holds."""

    def __init__(self, world, name, id, incarnation):
        self.world, self.incarnation = world, incarnation
        self.main = types.ModuleType("__main__")
        self.handles: list[RRef] = []
        address = f"wire://{incarnation}"
        me = Record(name, id, incarnation, [address], "here", os.getpid(), 0, None)
        self.channel = WireChannel(world.wire, address)
        self.agent = Agent(me, self.channel, PATIENT)
        self.agent.pool = self.jobs = Jobs()
        self.agent.start()
        self._remember_parents()

    def __repr__(self):
        return f"<{self.agent.me.name} {self.incarnation}>"

    def _remember_parents(self):
        """Note from which fork each fork is made, which no agent has to know."""
        forks = self.agent.references.forks
        hand_over = forks.hand_over

        def remember(rref, fork, to, child=None):
            handed = hand_over(rref, fork, to, child)
            self.world.parents[handed.fork] = (self.incarnation, fork)
            return handed

        forks.hand_over = remember

    @contextlib.contextmanager
    def at_work(self):
        """The time in which the thread works for this agent, in its process."""
        before, sys.modules["__main__"] = sys.modules["__main__"], self.main
        try:
            with self.agent.activate():
                yield
        finally:
            sys.modules["__main__"] = before

    # -- what its threads do ------------------------------------------------------------------

    def take(self, frames):
        """Receive a message."""
        self.channel.arrived.append(list(frames))
        self.read()

    def read(self):
        """Deal with a message that has arrived, and with what is due."""
        with self.at_work():
            job = self.agent.read(0)
            if job is not None:
                self.jobs.submit(job)

    def finish(self, index=0):
        """Do one of the jobs that wait."""
        job = self.jobs.waiting[index]
        del self.jobs.waiting[index]
        with self.at_work():
            job()

    # -- what its program does ----------------------------------------------------------------

    def thing(self, token):
        """Make a value."""
        made = Thing(token)
        self.world.things[token] = weakref.ref(made)
        return made

    def is_usable(self, handle):
        """Whether nothing is known to be wrong with a reference."""
        if handle.fork_id is None:
            return True
        return self.agent.references.forks.standing(handle.fork_id) in (ForkStanding.PENDING, ForkStanding.CONFIRMED)

    def usable(self):
        """List the references held here with which nothing is known to be wrong."""
        return [handle for handle in self.handles if self.is_usable(handle)]

    def knows(self, other):
        """Whether this agent has met another and has not lost it."""
        return other.incarnation in self.agent.links.connections

    def define(self, function):
        """Define a function like one of this file in ``__main__``."""
        name = f"{function}_{next(self.world.numbers)}"
        self.world.sources[name] = (
            f"def {name}(*args):\n    from helpers.simulated import simulation\n    return simulation.{function}(*args)"
        )
        exec(self.world.sources[name], self.main.__dict__)
        return name

    def define_alike(self, name):
        """Define what another has defined."""
        exec(self.world.sources[name], self.main.__dict__)

    def own(self):
        """Make a reference to a value here."""
        token = next(self.world.numbers)
        with self.at_work():
            rref = RRef(self.thing(token))
        self.world.tokens[rref.id] = (token, Thing)
        self.handles.append(rref)
        return rref

    def remote(self, owner, function="make", *, definition=None, timeout=NO_LIMIT):
        """Have a value made elsewhere."""
        token = next(self.world.numbers)
        asked = self._asked(token, Failed if function == "fail" else None, {owner.incarnation}, timeout, definition)
        with self.at_work():
            called = self._find(function, definition)
            rref = self.agent.caller.remote(owner.agent.me.name, called, (token,), None, timeout)
        asked.outcome, asked.creates = rref._creation, True
        self.world.tokens[rref.id] = (token, Failed if function == "fail" else Thing)
        self.world.makers[rref.id] = asked
        self.handles.append(rref)
        return rref

    def call(self, to, function="count", *arguments, via=None, waits=False, definition=None, timeout=NO_LIMIT):
        """Call a function of this file, or its like in ``__main__``; the program waits for it, or has a future."""
        token = next(self.world.numbers)
        answer = Failed if function == "fail" else ((via or to).incarnation, token)
        parties = {to.incarnation, *((via.incarnation,) if via is not None else ())}
        if via is not None:
            parties.add(via.incarnation)
        asked = self._asked(token, answer, parties, timeout, definition)
        called = self._find(function, definition)
        name = to.agent.me.name
        arguments = (token, *arguments) if via is None else (token, via.incarnation)
        make = rpc_sync if waits else rpc_async
        self._begin(asked, lambda: make(name, called, arguments, timeout=timeout))
        if not waits and asked.outcome is not None:
            asked.outcome.add_done_callback(self._take_lent)
        return asked

    def share(self, handle, to, **options):
        """Pass a reference to another member, as an argument of a call."""
        return self.call(to, "keep", [handle], **options)

    def fetch(self, handle, *, timeout=NO_LIMIT):
        """Ask for a copy of a referenced value; on its owner, look at it."""
        token, kind = self.world.tokens[handle.id]
        asked = self._use(handle, None, kind if kind is Failed else token, timeout)
        value = self.agent.references._values.get(handle.id)
        if handle.fork_id is None:
            asked.holds = handle
        self._begin(asked, lambda: handle.to_here(timeout), value)
        return asked

    def method(self, handle, *, timeout=NO_LIMIT):
        """Call a method of a referenced value."""
        token = next(self.world.numbers)
        made, kind = self.world.tokens[handle.id]
        asked = self._use(handle, token, kind if kind is Failed else (handle.owner_incarnation, made, token), timeout)
        self._begin(asked, lambda: handle.rpc_async(timeout).ask(token))
        return asked

    def _use(self, handle, token, answer, timeout):
        asked = self._asked(token, answer, {handle.owner_incarnation}, timeout, None)
        asked.target = Held(self.incarnation, handle.id, handle.fork_id, handle.owner_incarnation)
        return asked

    def _asked(self, token, answer, parties, timeout, definition):
        asked = Asked(self, token, answer, self.world.clock.now(), timeout, parties=parties, definition=definition)
        self.world.asked.append(asked)
        return asked

    def _find(self, function, definition):
        return getattr(self.main, definition) if definition else globals()[function]

    def _begin(self, asked, call, promise=None):
        """Make a call; what the program then has, or waits for, is its outcome."""
        pending = self.agent.pending
        before = {each.id for each in pending.all()}
        with self.at_work():
            try:
                asked.outcome = call()
            except Asleep:
                begun = [each.outcome for each in pending.all() if each.id not in before]
                asked.outcome = begun[0] if begun else promise  # its own value needs no call
            except Exception as error:
                self.world.end(asked, error.with_traceback(None))

    def _take_lent(self, future):
        """Go on holding a reference that an answer has brought."""
        if future.exception() is None:
            lent = [part for part in future.value() if isinstance(part, RRef)]
            self.handles += lent

    def calls(self):
        """List the calls of the program that have not ended."""
        return [asked for asked in self.world.asked if asked.by is self and self._pending(asked) is not None]

    def _pending(self, asked):
        return next((call for call in self.agent.pending.all() if call.outcome is asked.outcome), None)

    def give_up(self, asked):
        """The user does not wait for a call any longer."""
        asked.given_up = True
        call = self._pending(asked)
        with self.at_work():
            self.agent.stopping.stop([call])
            self.agent.outcomes.interrupt([call], Interrupted("given up"))

    def lose(self, other):
        """Take another agent for dead."""
        with self.at_work():
            self.agent.lose(other.incarnation, "is taken for dead")

    # -- looking ------------------------------------------------------------------------------

    def left(self):
        """What is left where nothing should be, by the name of the table."""
        agent = self.agent
        tables = {
            **_filled(agent.references),
            **_filled(agent.references.forks, but=("_lost", "_dropped")),
            **_filled(agent.exchange),
            "pending": [call.function for call in agent.pending.all()],
            "running": agent.executor.doing(),
            "threads": agent.stopping._threads,
            "jobs": self.jobs.waiting,
            "kept": sum(peer.outstanding for peer in agent.links.peers()),
            # A message that a channel refused leaves a gap, which is filled when anything else comes.
            "gaps": [gap for peer in agent.links.peers() for gap in peer.arrived.above if not self.world.refused],
        }
        return {name: table for name, table in tables.items() if table}


def _filled(thing, but=()):
    kinds = (dict, list, set)
    return {
        k: v for k, v in vars(thing).items() if (isinstance(v, kinds) or hasattr(v, "popleft")) and v and k not in but
    }


class _Sleep:
    """The time in which a thread waits."""

    def __init__(self, world):
        self.world = world

    def __enter__(self):
        if not self.world.may_wait:
            raise Asleep

    def __exit__(self, *error):
        pass


class _Complaints(logging.Handler):
    """What agents say that they should not have to."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


# --- the world ------------------------------------------------------------------------------------


class SimulatedWorld:
    """Agents on a wire, and the truth about what their programs have done."""

    def __init__(self, size=0):
        self.wire, self.clock = Wire(), ManualClock()
        self.wire.deliver = self._deliver
        self.size = size
        self.may_wait = False
        """Whether a thread may sleep, because what it waits for is there."""
        self.members: list[Member] = []
        """Those that live."""
        self.all: dict[int, Member] = {}
        """All that ever were, by incarnation."""
        self.numbers = itertools.count(1)
        self.parted: set[frozenset[int]] = set()
        """The pairs of which one has lost the other, or one is dead."""
        self.refused: set[tuple[str, str]] = set()
        """The ways that have ever refused a message."""
        self.sources: dict[str, str] = {}
        """The definitions that programs have made, by name."""
        self.forgotten: set[str] = set()
        """The definitions that some member had and has no longer."""
        self.parents: dict[Any, tuple[int, Any]] = {}
        """By fork: who made it, and from which fork of its own."""
        self.tokens: dict[Any, tuple[Any, type]] = {}
        """By reference: its value's token, and what there is: a Thing, or an error."""
        self.makers: dict[Any, Asked] = {}
        """By reference: the call that makes its value."""
        self.things: dict[Any, weakref.ref[Thing]] = {}
        self.asked: list[Asked] = []
        """The calls that have not ended."""
        self.ran: Counter[Any] = Counter()
        self.ended: Counter[tuple[str, int]] = Counter()
        self._incarnations = itertools.count(100)

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        self._complaints = _Complaints()
        logger = logging.getLogger("nbdist.rpc")
        logger.addHandler(self._complaints)
        self._stack.callback(logger.removeHandler, self._complaints)
        self._stack.callback(setattr, time, "monotonic", time.monotonic)
        time.monotonic = self.clock.now
        set_blocking_hook(lambda: _Sleep(self))
        self._stack.callback(set_blocking_hook, None)
        self._stack.callback(trace.subscribe(self._hear))
        if gc.isenabled():
            gc.disable()  # else when a finaliser runs would depend on what ran before
            self._stack.callback(gc.enable)
        for id in range(self.size):
            self.join(f"worker{id}", id)
        return self

    def __exit__(self, *error):
        with self.closing():
            pass

    @contextlib.contextmanager
    def closing(self):
        """The last of a world that has been entered."""
        with self._stack:
            try:
                yield
            finally:
                for member in self.members[:]:
                    self.crash(member)
                _members.clear()

    def _hear(self, event, fields):
        if event == "call.ended":
            self.ended[fields["agent"], fields["id"]] += 1

    # -- coming and going ---------------------------------------------------------------------

    def join(self, name, id):
        """Have one more member, whom all that live meet."""
        member = Member(self, name, id, next(self._incarnations))
        _members[member.incarnation] = self.all[member.incarnation] = member
        present = [other.agent.me for other in self.members]
        for other in self.all.values():
            if other not in self.members and other is not member:
                self.part(member, other)
        self.members.append(member)
        self.may_wait = True
        with member.at_work():
            assert member.agent.handshake.join_dynamic(present, self.clock.now() + 5.0) == []
        self.may_wait = False
        return member

    def crash(self, member):
        """End a member's process; the others know nothing of it yet."""
        self.members.remove(member)
        for other in self.all.values():
            if other is not member:
                self.part(member, other)
        member.channel.is_cut = True
        member.handles.clear()
        with member.at_work():
            member.agent.close("was killed")
        member.jobs.waiting.clear()
        name = member.agent.me.name
        self.asked = [asked for asked in self.asked if asked.by is not member]
        self.ended = Counter({key: number for key, number in self.ended.items() if key[0] != name})

    def part(self, one, another):
        """Note that from now on whatever goes through this pair may be lost."""
        self.parted.add(frozenset((one.incarnation, another.incarnation)))

    def forget(self, name, member):
        """Have a member's ``__main__`` lose a definition that a call of another may name."""
        if member.main.__dict__.pop(name, None) is not None:
            self.forgotten.add(name)

    def refuse(self, member, to):
        """Have the next message from a member to another refused by its channel."""
        way = member.channel.address, to.channel.address
        self.wire.refusing.add(way)
        self.refused.add(way)

    # -- messages and time --------------------------------------------------------------------

    def _deliver(self, flying):
        channel = self.wire.channels.get(flying.to)
        member = next((member for member in self.members if member.channel is channel), None)
        if member is not None:
            member.take(flying.frames)

    def deliver(self, index=0):
        """Let a message arrive."""
        self._deliver(self.wire.flying.pop(index))

    def deliver_twice(self, index):
        """Let a message arrive, and once more later."""
        self._deliver(self.wire.flying[index])

    def pass_time(self, seconds):
        """Let time pass for all."""
        self.clock.advance(seconds)
        for member in self.members:
            member.read()

    def finish_all(self):
        """Do all jobs that wait."""
        for member in self.members:
            while member.jobs.waiting:
                member.finish()

    def settle(self, rounds=20_000):
        """Deliver everything and do everything, with time passing as it must, until all is quiet."""
        for _ in range(rounds):
            if self.wire.flying:
                self.deliver()
            elif any(member.jobs.waiting for member in self.members):
                self.finish_all()
            elif busy := [member for member in self.members if member.agent.references.holds.ended]:
                busy[0].read()
            else:
                due = min((member.agent.links.due for member in self.members), default=math.inf)
                if due == math.inf:
                    return
                self.pass_time(max(due - self.clock.now(), 0.0))
        raise AssertionError("the network does not come to rest")

    def release_all(self):
        """Have no program hold a reference any more."""
        for member in self.members:
            member.handles.clear()

    # -- the truth ----------------------------------------------------------------------------

    def is_excused(self, held):
        """Whether some pair of members on a reference's way from its origin has been parted."""
        way, fork = {held.by, held.owner, held.rref.incarnation}, held.fork
        while fork is not None and fork in self.parents:
            holder, fork = self.parents[fork]
            way.add(holder)
        return any(frozenset(pair) in self.parted for pair in itertools.combinations(way, 2))

    def check(self):
        """Compare the agents with what has happened."""
        assert not self._complaints.said, self._complaints.said
        twice = [token for token, times in self.ran.items() if times > 1]
        assert not twice, f"calls {twice} ran twice"
        twice = [call for call, times in self.ended.items() if times > 1]
        assert not twice, f"calls {twice} ended twice"
        for asked in self.asked[:]:
            self._check_asked(asked)
        for member in self.members:
            self._check_member(member)

    def _check_member(self, member):
        forks = member.agent.references.forks
        lost = {other for other in self.all if not member.knows(self.all[other])}
        for other in lost:
            assert frozenset((member.incarnation, other)) in self.parted, f"{member} has lost {other} for nothing"
        for owned in forks.owned.values():
            assert not lost & set(owned.forks.values()), f"{member} counts forks of a lost member"
        for handle in member.handles:
            if handle.fork_id is None:
                self._check_owned(member, handle)
            else:
                assert handle.fork_id in forks.users, f"{member} let go of {handle!r}, which it holds"
        for fork, user in forks.users.items():
            if user.held and not self.is_excused(Held(member.incarnation, user.rref, fork, user.owner)):
                is_dead = user.standing is ForkStanding.DEAD
                assert not is_dead or self._is_never_made(user.rref), f"{fork} of {member} is dead"
                if user.standing is ForkStanding.CONFIRMED:
                    owner = self.all[user.owner].agent.references
                    assert user.rref in owner.forks.owned, f"{user.rref} is dropped by its owner"
                    assert fork in owner.forks.owned[user.rref].forks, f"{fork} of {member} is not counted"
                    is_made = owner.forks.owned[user.rref].created
                    assert user.rref in owner._values or not is_made, f"the value of {user.rref} is dropped"

    def _is_never_made(self, rref):
        """Whether the call that was to make a value has ended without having run."""
        maker = self.makers.get(rref)
        return maker is not None and maker.error is not None and not self.ran[maker.token]

    def _check_owned(self, member, handle):
        references = member.agent.references
        assert references.forks.owns(handle.id), f"{member} dropped what it holds itself: {handle!r}"
        assert handle.id in references._values, f"{member} dropped a value that it holds itself: {handle!r}"

    def _check_asked(self, asked):
        outcome = asked.outcome
        if outcome is None:  # it was not even begun
            return
        if isinstance(outcome, Latch) and not outcome.is_settled:
            return
        if hasattr(outcome, "done") and not outcome.done():
            return
        self.may_wait = True
        try:
            answer = outcome.wait() if hasattr(outcome, "wait") else outcome
        except BaseException as error:
            self.end(asked, error.with_traceback(None))
            return
        finally:
            self.may_wait = False
        self._check_answer(asked, answer)
        self.end(asked, None)

    def _check_answer(self, asked, answer):
        if isinstance(answer, Thing):
            answer = answer.token
        elif isinstance(answer, tuple) and len(answer) == 3 and (answer[2] is None or isinstance(answer[2], RRef)):
            answer = answer[:2]
        assert answer == asked.answer, f"{asked} has the answer {answer!r}"
        assert asked.token is None or self.ran[asked.token] == 1, f"{asked} has an answer, and never ran"

    def end(self, asked, error):
        """A call has ended; with an error only if something explains it."""
        self.asked.remove(asked)
        asked.outcome, asked.holds, asked.error = None, None, error
        if error is None:
            return
        assert self._explains(asked, error), f"{error!r} ended {asked}"
        if isinstance(error, MissingDefinition | ChannelError):
            assert not self.ran[asked.token], f"{asked} ran, and {error!r}"

    def _explains(self, asked, error):
        if isinstance(error, RpcTimeout) and asked.timeout and self.clock.now() >= asked.started + asked.timeout:
            return True
        if isinstance(error, Interrupted | KeyboardInterrupt) and asked.given_up:
            return True
        if isinstance(error, MissingDefinition) and asked.definition in self.forgotten:
            return True
        if isinstance(error, ChannelError) and self._is_refused(asked):
            return True
        if isinstance(error, Failed) and asked.answer is Failed:
            return error.args == (asked.token if asked.target is None else self.tokens[asked.target.rref][0],)
        parties = {asked.by.incarnation, *asked.parties}
        if isinstance(error, WorkerLost) and self.are_parted(parties):
            return True
        return asked.target is not None and isinstance(error, NbdistError) and self._is_lost(asked.target)

    def _is_refused(self, asked):
        names = {self.all[each].channel.address for each in (asked.by.incarnation, *asked.parties)}
        return any(set(way) <= names for way in self.refused)

    def are_parted(self, members):
        return any(frozenset(pair) in self.parted for pair in itertools.combinations(members, 2))

    def _is_lost(self, held):
        """Whether a reference's value may never have come to be, or may be gone."""
        maker = self.makers.get(held.rref)
        return self.is_excused(held) or (maker is not None and (maker.error is not None or maker.given_up))

    def check_end(self):
        """Have everybody learn what happened, let all end, and find what is left."""
        for pair in self.parted:
            for one, another in itertools.permutations(self.all[each] for each in pair):
                if one in self.members:
                    one.lose(another)
        self.settle()
        self.check()
        assert not self.asked, f"never ended: {self.asked}"
        for member in self.members:
            for handle in member.handles:
                standing = (
                    member.agent.references.forks.standing(handle.fork_id) if handle.fork_id is not None else None
                )
                assert standing is not ForkStanding.PENDING, f"{handle!r} pends for ever"
        handle = None
        self.release_all()
        gc.collect()
        self.settle()
        self.check()
        for member in self.members:
            left = member.left()
            assert not left, f"{member} has left {left}"
        alive = [token for token, thing in self.things.items() if thing() is not None]
        assert not alive, f"nobody refers to the values {alive}, and they are kept"
