"""Calls and references of agents that ship: every order of small scenarios, and a state machine for long ones."""

import gc
import inspect
from functools import partial

import pytest
from helpers.simulated.simulation import NO_LIMIT, SimulatedWorld
from helpers.suite.examples import long, quick
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nbdist.errors import RRefError
from nbdist.rpc.core.forks import ForkStanding


@pytest.fixture(autouse=True, scope="module")
def earlier_objects_left_out():
    """Each history ends with a garbage collection, which takes long where other tests have left a gigabyte behind.

    Nothing ends this: gc.unfreeze would also undo the freeze of conftest.py, for all tests that follow.
    """
    gc.collect()
    gc.freeze()


# --- every order of small scenarios ---------------------------------------------------------------


def remote_and_forget(owner, user, other):
    user.remote(owner)
    yield
    user.handles.clear()


def share_before_confirmation(owner, user, other):
    user.share(user.remote(owner), other)
    yield
    user.handles.clear()


def share_and_return(owner, user, other):
    handle = owner.own()
    owner.share(handle, user)
    owner.share(handle, other)
    del handle
    yield
    owner.handles.clear()
    for member in (user, other):
        for handle in member.handles:
            member.share(handle, owner)
        member.handles.clear()


def give_up_while_it_runs(owner, user, other):
    user.remote(owner)
    yield
    user.handles.clear()
    give_up_all(user)


def share_home_before_creation(owner, user, other):
    handle = user.remote(owner)
    user.share(handle, owner)
    user.share(handle, other)
    del handle
    yield
    give_up_all(user)
    user.handles.clear()


def call_and_give_up(owner, user, other):
    user.call(owner, waits=True)
    user.call(owner, definition=user.define("count"))
    yield
    give_up_all(user)


def fetch_through_a_third(owner, user, other):
    user.share(user.remote(owner), other)
    user.handles.clear()
    yield
    for handle in other.handles:
        other.fetch(handle)
    other.handles.clear()


def lend_and_forget(owner, user, other):
    owner.own()
    user.call(owner, "lend")
    yield
    owner.handles.clear()
    user.handles.clear()


def repeat_with_a_definition(owner, user, other):
    handle = user.remote(owner, definition=user.define("make"))
    user.share(handle, other, definition=user.define("keep"), waits=True)
    del handle
    yield
    user.handles.clear()


def lose_the_callee(owner, user, other):
    user.call(owner, "relay", via=other)
    user.fetch(user.remote(owner))
    yield
    user.world.part(user, owner)
    user.lose(owner)


def lose_the_caller(owner, user, other):
    user.fetch(user.remote(owner))
    yield
    user.world.part(user, owner)
    owner.lose(user)


def share_and_lose_the_parent(owner, user, other):
    user.share(user.remote(owner), other)
    yield
    for member in (owner, other):
        user.world.part(user, member)
        member.lose(user)


DEPTHS = {
    remote_and_forget: 7,
    share_before_confirmation: 7,
    share_and_return: 7,
    give_up_while_it_runs: 7,
    share_home_before_creation: 5,
    call_and_give_up: 6,
    fetch_through_a_third: 7,
    lend_and_forget: 7,
    repeat_with_a_definition: 7,
    lose_the_callee: 5,
    lose_the_caller: 7,
    share_and_lose_the_parent: 7,
}
"""By scenario: how many of its steps are taken in every order; the rest then follows in the order of sending."""


def give_up_all(member):
    for call in member.calls():
        member.give_up(call)


class Orders:
    """All ways through a program that chooses again and again: the first choices first, the last ones varied first."""

    def __init__(self):
        self.path: list[int] = []
        self._sizes: list[int] = []
        self._at = 0

    def __iter__(self):
        while True:
            self._at = 0
            yield self
            while self.path and self.path[-1] + 1 == self._sizes[-1]:
                self.path.pop()
                self._sizes.pop()
            if not self.path:
                return
            self.path[-1] += 1

    def choose(self, items):
        """Return one of the items; another one on another way."""
        if self._at == len(self.path):
            self.path.append(0)
            self._sizes.append(len(items))
        self._at += 1
        return items[self.path[self._at - 1]]


def steps_of(world, acts):
    """List what can happen next: a message arrives, a job goes on, or the scenario's second half is played."""
    messages = [partial(world.deliver, index) for index in range(len(world.wire.flying))]
    jobs = [partial(each.finish, index) for each in world.members for index in range(len(each.jobs.waiting))]
    second = [partial(next, acts, None)] if inspect.getgeneratorstate(acts) == inspect.GEN_SUSPENDED else []
    return messages + jobs + second


@pytest.mark.parametrize("scenario", DEPTHS)
def test_in_every_order_nothing_is_dropped_early_and_nothing_leaks(scenario):
    count = 0
    for order in Orders():
        count += 1
        with SimulatedWorld(3) as world:
            acts = scenario(*world.members)
            next(acts)
            for _ in range(DEPTHS[scenario]):
                steps = steps_of(world, acts)
                if steps:
                    order.choose(steps)()
                    world.check()
            next(acts, None)
            world.check_end()
    print(scenario.__name__, count)
    assert count > 2


# --- what histories have found --------------------------------------------------------------------


def test_a_creation_that_cannot_be_repeated_fails_its_reference():
    """The reference was pending for ever: nothing could be asked of it, and its world could not end in order."""
    with SimulatedWorld(2) as world:
        owner, user = world.members
        handle = user.remote(owner, definition=user.define("make"))
        world.deliver()
        owner.finish()
        world.deliver()  # the owner lacks the definition
        world.refuse(user, owner)
        user.finish()
        assert user.agent.references.forks.standing(handle.fork_id) is ForkStanding.FAILED
        with pytest.raises(RRefError, match="the wire takes nothing now"), user.at_work():
            handle.to_here()
        del handle
        world.check_end()


def test_a_creation_that_ends_unrepeated_ends_who_waits_for_its_value():
    with SimulatedWorld(2) as world:
        owner, user = world.members
        handle = user.remote(owner, definition=user.define("make"))
        user.fetch(handle)
        del handle
        world.deliver()
        world.deliver()  # the fetch waits at the owner
        owner.finish()
        give_up_all(user)  # before it hears that the owner lacks the definition
        world.check_end()


def test_a_creation_whose_time_is_up_before_it_is_refused_ends_who_waits_for_its_value():
    with SimulatedWorld(2) as world:
        owner, user = world.members
        handle = user.remote(owner, definition=user.define("make"), timeout=5.0)
        user.fetch(handle)
        del handle
        world.deliver()
        world.deliver()  # the fetch waits at the owner
        owner.finish()
        world.pass_time(6.0)  # no word of that goes to the owner
        world.check_end()


def test_a_creation_refused_after_its_creator_is_lost_ends_who_waits_for_its_value():
    with SimulatedWorld(3) as world:
        owner, creator, other = world.members
        handle = creator.remote(owner, definition=creator.define("make"))
        creator.share(handle, other)
        del handle
        while world.wire.flying:
            world.deliver()  # the owner is about to find that it lacks the definition
        other.finish()  # it has the reference now
        while world.wire.flying:
            world.deliver()
        other.fetch(other.handles[0])
        while world.wire.flying:
            world.deliver()  # the fetch waits at the owner
        world.crash(creator)
        owner.lose(creator)
        other.lose(creator)
        owner.finish()
        world.settle()
        assert not owner.agent.exchange.active
        assert not owner.agent.references.forks.expected_from(creator.incarnation)
        world.check_end()


# --- the state machine ----------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """Several agents on a bad network, against the plain truth of who holds what and who called whom.

    Any agent may be lost by another at any time, as after a crash or a long silence; then what runs through
    that pair is excused. Nothing else is.
    """

    @initialize(size=st.integers(2, 4))
    def begin(self, size):
        self.world = SimulatedWorld(size)
        self.world.__enter__()
        self.shared: list[tuple] = []
        """The definitions that were made: who made it, its name, and the function's that it is like."""

    def pick(self, data, items, label):
        return items[data.draw(st.integers(0, len(items) - 1), label=label)]

    def member(self, data, label="member"):
        return self.pick(data, self.world.members, label)

    # -- what programs do ---------------------------------------------------------------------

    def definition(self, data, member, to, function):
        """Choose how the function is found: in this file, or in ``__main__``, which the callee has alike or lacks."""
        known = [
            name
            for maker, name, like in self.shared
            if maker is member and like == function and hasattr(member.main, name)
        ]
        kinds = ["imported", "imported", "lacking", "alike", *(["again"] if known else [])]
        kind = data.draw(st.sampled_from(kinds), label="definition")
        if kind == "imported":
            return None
        if kind == "again":
            return self.pick(data, known, "name")
        name = member.define(function)
        if kind == "alike" and to is not member:
            to.define_alike(name)
        self.shared.append((member, name, function))
        return name

    def timeout(self, data):
        return data.draw(st.sampled_from([NO_LIMIT, NO_LIMIT, NO_LIMIT, 0.3, 5.0]), label="timeout")

    def refuse_perhaps(self, data, member, to):
        """Perhaps have the channel of a member not take its next message to another."""
        if not data.draw(st.integers(0, 9), label="refused"):
            self.world.refuse(member, to)

    @rule(data=st.data())
    def own(self, data):
        self.member(data).own()

    @rule(data=st.data())
    def remote(self, data):
        member, owner = self.member(data), self.member(data, "owner")
        if member.knows(owner):
            function = data.draw(st.sampled_from(["make", "make", "make", "fail"]), label="function")
            definition = self.definition(data, member, owner, function)
            timeout = self.timeout(data)
            self.refuse_perhaps(data, member, owner)
            member.remote(owner, function, definition=definition, timeout=timeout)

    @rule(data=st.data())
    def call(self, data):
        member, to = self.member(data), self.member(data, "to")
        if not member.knows(to):
            return
        function = data.draw(st.sampled_from(["count", "count", "fail", "lend", "relay"]), label="function")
        options = {"timeout": self.timeout(data), "definition": self.definition(data, member, to, function)}
        if function == "relay":
            options["via"] = self.member(data, "via")
            options["definition"] = None
        elif function != "lend":
            options["waits"] = data.draw(st.booleans(), label="waits")
        self.refuse_perhaps(data, member, to)
        member.call(to, function, **options)

    @rule(data=st.data())
    def share(self, data):
        member, to = self.member(data), self.member(data, "to")
        if member.knows(to) and member.usable():
            handle = self.pick(data, member.usable(), "handle")
            definition = self.definition(data, member, to, "keep")
            waits = data.draw(st.booleans(), label="waits")
            self.refuse_perhaps(data, member, to)
            member.share(handle, to, definition=definition, waits=waits, timeout=self.timeout(data))

    @rule(data=st.data(), fetch=st.booleans())
    def use(self, data, fetch):
        member = self.member(data)
        if member.usable():
            handle = self.pick(data, member.usable(), "handle")
            (member.fetch if fetch else member.method)(handle, timeout=self.timeout(data))

    @rule(data=st.data())
    def release(self, data):
        member = self.member(data)
        if member.handles:
            del member.handles[data.draw(st.integers(0, len(member.handles) - 1), label="handle")]

    @rule(data=st.data())
    def give_up(self, data):
        member = self.member(data)
        if calls := member.calls():
            member.give_up(self.pick(data, calls, "call"))

    # -- what agents do -----------------------------------------------------------------------

    @precondition(lambda self: any(member.jobs.waiting for member in self.world.members))
    @rule(data=st.data())
    def finish(self, data):
        member = self.pick(data, [each for each in self.world.members if each.jobs.waiting], "member")
        member.finish(data.draw(st.integers(0, len(member.jobs.waiting) - 1), label="job"))

    @precondition(lambda self: any(member.jobs.waiting for member in self.world.members))
    @rule()
    def finish_all(self):
        self.world.finish_all()

    @precondition(lambda self: self.world.wire.flying)
    @rule(data=st.data())
    def deliver(self, data):
        self.world.deliver(self.message(data))

    def message(self, data):
        return data.draw(st.integers(0, len(self.world.wire.flying) - 1), label="message")

    @precondition(lambda self: self.world.wire.flying)
    @rule()
    def deliver_all_in_order(self):
        for _ in range(len(self.world.wire.flying)):
            self.world.deliver()

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def pass_time(self, seconds):
        self.world.pass_time(seconds)

    # -- what goes wrong ----------------------------------------------------------------------

    @rule(data=st.data())
    def go_wrong(self, data):
        kinds = [self.drop, self.deliver_twice, self.forget, self.crash, self.lose]
        data.draw(st.sampled_from(kinds), label="what")(data)

    def deliver_twice(self, data):
        if self.world.wire.flying:
            self.world.deliver_twice(self.message(data))

    def drop(self, data):
        if self.world.wire.flying:
            self.world.wire.flying.pop(self.message(data))

    def forget(self, data):
        """Somebody's ``__main__`` no longer has a definition."""
        if self.shared:
            _, name, _ = self.pick(data, self.shared, "definition")
            self.world.forget(name, self.member(data))

    def crash(self, data):
        """A process dies; perhaps another one takes its place, or joins although not all have noticed."""
        then = data.draw(st.sampled_from(["nothing", "replaced", "another"]), label="then")
        if len(self.world.members) == 1:
            return
        member = self.member(data)
        me = member.agent.me
        self.world.crash(member)
        self.shared = [known for known in self.shared if known[0] is not member]
        if then == "replaced":  # its name is free once all have noticed
            for other in self.world.members:
                other.lose(member)
            self.world.join(me.name, me.id)
        elif then == "another":
            number = len(self.world.all)
            self.world.join(f"worker{number}", number)

    def lose(self, data):
        """Somebody takes somebody else for dead, rightly or not."""
        member = self.member(data)
        others = [other for other in self.world.all.values() if other is not member and member.knows(other)]
        if data.draw(st.integers(0, 9), label="wrongly"):
            others = [other for other in others if self.world.are_parted({member.incarnation, other.incarnation})]
        if others:
            other = self.pick(data, others, "lost")
            self.world.part(member, other)
            member.lose(other)

    # -- the truth ----------------------------------------------------------------------------

    @invariant()
    def agents_and_truth_agree(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            with self.world.closing():
                self.world.check_end()


QUICK = quick(150, stateful_step_count=40)
LONG = long(QUICK, stateful_step_count=80)


@pytest.mark.timeout(900)  # passing takes seconds; a failing history takes minutes to shrink, where that is done
def test_any_history_neither_leaks_nor_drops_early():
    run_state_machine_as_test(Histories, settings=QUICK)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_very_many_histories_neither_leak_nor_drop_early():
    run_state_machine_as_test(Histories, settings=LONG)
