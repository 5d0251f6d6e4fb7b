"""The reference protocol: every order of small scenarios, and a state machine for long ones."""

import itertools

import pytest
from examples_tried import long, quick
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulation import ManualClock, Node, Wire, settle

from nbdist.ids import GlobalId, IdSource
from nbdist.rpc.forks import Drop, Forks, Send, Standing
from nbdist.wire.messages import ChildAccept, Fork, ForkConfirm, ForkRequest, RRefState, State, UserDelete

OWNER, USER, OTHER, THIRD = 11, 22, 33, 44
INT = State("builtins", "int")


def forks(me):
    return Forks(me, IdSource(me, me))


def ids(agent):
    source = IdSource(agent, agent)
    return source.next(), source.next()


def is_empty(agent):
    tables = (agent._owned, agent._users, agent._children, agent._early)
    return (agent.owners, agent.forks, agent.users, agent.pending) == (0, 0, 0, 0) and not any(tables)


# --- one agent, by events -------------------------------------------------------------------------


def test_remote_creates_confirms_and_deletes():
    owner, user = forks(OWNER), forks(USER)
    rref, fork = ids(USER)
    user.begin(rref, fork, OWNER)
    assert user.standing(fork) is Standing.PENDING
    owner.create(rref, fork, USER)
    assert owner.set_state(rref, INT) == []  # the reply carries it to the creator
    assert owner.release_owned(rref) == []  # the user's fork remains
    assert (owner.owners, owner.forks, owner.forks_of(rref)) == (1, 1, 1)
    assert user.confirm(fork, INT) == []
    assert user.standing(fork) is Standing.CONFIRMED
    assert user.state(rref, fork) == INT
    (delete,) = user.release(fork)
    assert delete == Send(OWNER, UserDelete(rref, fork))
    assert owner.on_user_delete(delete.message, USER) == [Drop(rref)]
    assert is_empty(owner)
    assert is_empty(user)


def test_a_reference_released_before_its_confirmation_is_deleted_after_it():
    user = forks(USER)
    rref, fork = ids(USER)
    user.begin(rref, fork, OWNER)
    assert user.release(fork) == []
    assert user.confirm(fork, INT) == [Send(OWNER, UserDelete(rref, fork))]
    assert is_empty(user)


def test_a_delete_that_overtakes_the_creation_ends_it():
    owner = forks(OWNER)
    rref, fork = ids(USER)
    assert owner.on_user_delete(UserDelete(rref, fork), USER) == []
    owner.create(rref, fork, USER)
    assert owner.owns(rref)  # the call is running
    assert owner.release_owned(rref) == [Drop(rref)]
    assert is_empty(owner)


def test_a_timed_out_creation_tells_the_owner_and_a_failed_one_does_not():
    for may_exist, expected in ((True, 1), (False, 0)):
        user = forks(USER)
        rref, fork = ids(USER)
        user.begin(rref, fork, OWNER)
        assert user.fail(fork, may_exist=may_exist) == []
        assert user.standing(fork) is Standing.FAILED
        assert user.release(fork) == [Send(OWNER, UserDelete(rref, fork))] * expected
        assert is_empty(user)


def test_a_late_answer_revives_a_timed_out_reference():
    user = forks(USER)
    rref, fork = ids(USER)
    user.begin(rref, fork, OWNER)
    user.fail(fork, may_exist=True)
    user.confirm(fork, INT)
    assert user.standing(fork) is Standing.CONFIRMED


def test_an_owner_counts_a_fork_before_it_is_sent():
    owner, user = forks(OWNER), forks(USER)
    rref, _ = ids(OWNER)
    owner.retain(rref)
    owner.set_state(rref, INT)
    handed = owner.hand_over(rref, None, USER)
    assert (handed.owner, handed.parent, handed.state) == (OWNER, OWNER, INT)
    assert owner.release_owned(rref) == []
    assert user.accept(handed) == []
    assert user.standing(handed.fork) is Standing.CONFIRMED
    (delete,) = user.release(handed.fork)
    assert owner.on_user_delete(delete.message, USER) == [Drop(rref)]
    assert is_empty(owner)
    assert is_empty(user)


def test_a_reference_that_comes_home_is_a_handle():
    owner, user = forks(OWNER), forks(USER)
    rref, _ = ids(OWNER)
    owner.retain(rref)
    handed = owner.hand_over(rref, None, USER)
    user.accept(handed)
    back = user.hand_over(rref, handed.fork, OWNER)
    assert user.pending == 0  # who sends it keeps its own fork until the message has arrived
    assert owner.accept(back) == []
    assert owner.release_owned(rref) == []
    (delete,) = user.release(handed.fork)
    assert owner.on_user_delete(delete.message, USER) == []
    assert owner.release_owned(rref) == [Drop(rref)]
    assert is_empty(owner)
    assert is_empty(user)


def test_an_owner_that_hands_to_itself_counts_no_fork():
    owner = forks(OWNER)
    rref, _ = ids(OWNER)
    owner.retain(rref)
    handed = owner.hand_over(rref, None, OWNER)
    assert owner.forks == 0
    assert owner.accept(handed) == []
    assert owner.release_owned(rref) == []
    assert owner.release_owned(rref) == [Drop(rref)]


def shared_by_a_third():
    """An owner, a user with a confirmed fork, and another that has just been handed a child of it."""
    owner, user, other = forks(OWNER), forks(USER), forks(OTHER)
    rref, fork = ids(USER)
    user.begin(rref, fork, OWNER)
    owner.create(rref, fork, USER)
    owner.set_state(rref, INT)
    owner.release_owned(rref)
    user.confirm(fork, INT)
    handed = user.hand_over(rref, fork, OTHER)
    (request,) = other.accept(handed)
    assert request == Send(OWNER, ForkRequest(rref, handed.fork))
    return owner, user, other, rref, fork, handed, request.message


def test_a_parent_lives_until_its_child_is_confirmed():
    owner, user, other, rref, fork, handed, request = shared_by_a_third()
    assert user.release(fork) == []  # the child may not be known yet
    assert other.standing(handed.fork) is Standing.PENDING
    (confirm,) = owner.on_fork_request(request, OTHER)
    assert confirm == Send(OTHER, ForkConfirm(rref, handed.fork, INT))
    assert owner.forks_of(rref) == 2
    assert other.on_fork_confirm(confirm.message) == [Send(USER, ChildAccept(handed.fork))]
    (delete,) = user.on_child_accept(ChildAccept(handed.fork))
    assert delete == Send(OWNER, UserDelete(rref, fork))
    assert owner.on_user_delete(delete.message, USER) == []
    (last,) = other.release(handed.fork)
    assert owner.on_user_delete(last.message, OTHER) == [Drop(rref)]
    assert all(map(is_empty, (owner, user, other)))


def test_control_messages_twice_change_nothing():
    owner, user, other, rref, _fork, handed, request = shared_by_a_third()
    owner.on_fork_request(request, OTHER)
    owner.on_fork_request(request, OTHER)
    assert owner.forks_of(rref) == 2
    confirm = ForkConfirm(rref, handed.fork, INT)
    assert len(other.on_fork_confirm(confirm)) == 1
    assert other.on_fork_confirm(confirm) == []
    assert user.on_child_accept(ChildAccept(handed.fork)) == []
    assert user.on_child_accept(ChildAccept(handed.fork)) == []
    assert user.pending == 0


def test_a_child_that_was_never_sent_is_taken_back():
    owner, user = forks(OWNER), forks(USER)
    rref, _ = ids(OWNER)
    owner.retain(rref)
    handed = owner.hand_over(rref, None, USER)
    user.accept(handed)
    child = user.hand_over(rref, handed.fork, OTHER)
    assert user.release(handed.fork) == []
    assert user.take_back(child, OTHER) == [Send(OWNER, UserDelete(rref, handed.fork))]
    owner.release_owned(rref)
    assert owner.take_back(handed, USER) == [Drop(rref)]
    assert is_empty(owner)
    assert is_empty(user)


def test_users_that_were_confirmed_too_early_learn_what_the_value_is():
    owner, _user, other, rref, _fork, handed, request = shared_by_a_third()
    owner._owned[rref].state = None  # as if the value were still to come
    (confirm,) = owner.on_fork_request(request, OTHER)
    other.on_fork_confirm(confirm.message)
    assert other.state(rref, handed.fork) == INT  # it came along with the fork
    (told,) = owner.set_state(rref, State("builtins", "str"))
    assert told == Send(OTHER, RRefState(rref, State("builtins", "str")))
    assert other.on_state(told.message) == [handed.fork]
    assert other.state(rref, handed.fork) == State("builtins", "str")
    assert owner.set_state(rref, INT) == []  # once


# --- overtaking -----------------------------------------------------------------------------------


def test_a_request_that_overtakes_the_creation_is_not_refused():
    """The creator's call is slow; whom it gave the reference to asks first."""
    owner, user, other = forks(OWNER), forks(USER), forks(OTHER)
    rref, fork = ids(USER)
    user.begin(rref, fork, OWNER)
    handed = user.hand_over(rref, fork, OTHER)
    (request,) = other.accept(handed)
    (confirm,) = owner.on_fork_request(request.message, OTHER)
    assert not confirm.message.gone
    owner.create(rref, fork, USER)
    told = owner.set_state(rref, INT)
    assert told == [Send(OTHER, RRefState(rref, INT))]
    assert owner.release_owned(rref) == []
    assert owner.forks_of(rref) == 2


def test_a_request_for_what_its_creator_can_no_longer_create_is_refused():
    owner = forks(OWNER)
    rref, _fork = ids(USER)
    owner.on_lost(USER)
    child = GlobalId(USER, 7, USER)
    assert owner.on_fork_request(ForkRequest(rref, child), OTHER) == [Send(OTHER, ForkConfirm(rref, child, gone=True))]
    assert is_empty(owner)


def test_a_request_for_a_value_that_was_dropped_is_refused():
    """Its parent was lost before the owner heard of the child; the creator had let go."""
    owner = forks(OWNER)
    rref, fork = ids(USER)
    owner.create(rref, fork, USER)
    owner.on_fork_request(ForkRequest(rref, GlobalId(OTHER, 1, OTHER)), OTHER)
    owner.release_owned(rref)
    owner.on_user_delete(UserDelete(rref, fork), USER)
    assert owner.on_lost(OTHER) == [Drop(rref)]
    (refusal,) = owner.on_fork_request(ForkRequest(rref, GlobalId(OTHER, 2, OTHER)), THIRD)
    assert refusal.message.gone
    assert owner.on_lost(USER) == []
    assert is_empty(owner)


def test_a_call_that_is_to_be_repeated_leaves_nothing():
    owner = forks(OWNER)
    rref, fork = ids(USER)
    owner.create(rref, fork, USER)
    owner.uncreate(rref, fork)
    assert is_empty(owner)
    owner.create(rref, fork, USER)
    assert owner.forks_of(rref) == 1


# --- death ----------------------------------------------------------------------------------------


def test_what_a_lost_user_held_is_dropped():
    owner, _user, _other, rref, _fork, _handed, request = shared_by_a_third()
    owner.on_fork_request(request, OTHER)
    assert owner.on_lost(USER) == []
    assert owner.on_lost(OTHER) == [Drop(rref)]
    assert is_empty(owner)


def test_what_a_lost_owner_held_is_dead_at_once():
    _, user, other, _rref, fork, handed, _ = shared_by_a_third()
    assert user.on_lost(OWNER) == []
    assert other.on_lost(OWNER) == [Send(USER, ChildAccept(handed.fork))]  # whose parent may not know yet
    assert user.standing(fork) is Standing.DEAD
    assert other.standing(handed.fork) is Standing.DEAD
    assert user.release(fork) == []
    assert other.release(handed.fork) == []
    assert is_empty(user), "the child will never accept, for its owner is gone"
    assert is_empty(other)


def test_a_reference_to_an_owner_that_is_known_to_be_lost_is_dead_on_arrival():
    _, _user, _, rref, _fork, handed, _ = shared_by_a_third()
    late = forks(THIRD)
    late.on_lost(OWNER)
    instructions = late.accept(Fork(rref, handed.fork, OWNER, USER, INT))
    assert late.standing(handed.fork) is Standing.DEAD
    for instruction in instructions:  # its parent need not wait for it
        assert instruction == Send(USER, ChildAccept(handed.fork))
    assert late.release(handed.fork) == []
    assert is_empty(late)


def test_a_lost_child_frees_its_parent():
    _owner, user, _, rref, fork, _, _ = shared_by_a_third()
    assert user.release(fork) == []
    assert user.on_lost(OTHER) == [Send(OWNER, UserDelete(rref, fork))]
    assert is_empty(user)


def test_a_lost_parent_leaves_a_confirmed_child():
    owner, _, other, rref, _, handed, request = shared_by_a_third()
    (confirm,) = owner.on_fork_request(request, OTHER)
    assert owner.on_lost(USER) == []
    assert other.on_lost(USER) == []
    assert other.on_fork_confirm(confirm.message) == [Send(USER, ChildAccept(handed.fork))]
    assert other.standing(handed.fork) is Standing.CONFIRMED
    (delete,) = other.release(handed.fork)
    assert owner.on_user_delete(delete.message, OTHER) == [Drop(rref)]
    assert is_empty(owner)
    assert is_empty(other)


def test_a_child_that_its_parents_death_orphaned_is_told_so():
    owner, _, other, rref, _, handed, request = shared_by_a_third()
    assert owner.on_lost(USER) == [Drop(rref)]
    (refusal,) = owner.on_fork_request(request, OTHER)
    assert refusal == Send(OTHER, ForkConfirm(rref, handed.fork, gone=True))
    other.on_fork_confirm(refusal.message)
    assert other.standing(handed.fork) is Standing.DEAD
    assert other.release(handed.fork) == []
    assert is_empty(owner)
    assert is_empty(other)


def test_a_lost_user_leaves_no_memory_of_its_early_deletes():
    owner = forks(OWNER)
    rref, fork = ids(USER)
    owner.on_user_delete(UserDelete(rref, fork), USER)
    assert owner.on_lost(USER) == []
    assert is_empty(owner)


# --- every order of small scenarios ---------------------------------------------------------------


class Scene:
    """Three nodes on a wire whose messages a test delivers in the order it likes."""

    def __init__(self):
        self.wire, self.clock = Wire(), ManualClock()
        self.nodes = [
            Node(name, id, 100 + id, self.wire, self.clock) for id, name in enumerate(("owner", "user", "other"))
        ]
        for one, another in itertools.permutations(self.nodes, 2):
            one.connect(another)

    def deliver(self, index):
        to, frame = self.wire.flying.pop(index)
        next(node for node in self.nodes if node.incarnation == to).take(frame)

    def let_go(self):
        for node in self.nodes:
            while node.running:
                node.finish(0)
            node.handles.clear()
            node.reap()


def remote_and_forget(scene):
    _, user, _ = scene.nodes
    owner = scene.nodes[0]
    user.remote(owner)
    yield
    user.handles.clear()
    user.reap()


def share_before_confirmation(scene):
    owner, user, other = scene.nodes
    handle = user.remote(owner)
    user.share(handle, other)
    del handle
    yield
    user.handles.clear()
    user.reap()


def share_and_return(scene):
    owner, user, other = scene.nodes
    handle = owner.own()
    owner.share(handle, user)
    owner.share(handle, other)
    del handle
    yield
    owner.handles.clear()
    owner.reap()
    for node in (user, other):
        for handle in list(node.handles):
            node.share(handle, owner)
        del node.handles[:]
    handle = None


def time_out_while_it_runs(scene):
    owner, user, _ = scene.nodes
    user.remote(owner)
    yield
    user.handles.clear()
    user.reap()
    for id in list(user.pending):
        user.time_out(id)


def share_home_before_creation(scene):
    owner, user, other = scene.nodes
    handle = user.remote(owner)
    user.share(handle, owner)
    user.share(handle, other)
    del handle
    yield
    for id in list(user.pending):
        user.time_out(id)
    user.handles.clear()
    user.reap()


SCENARIOS = [
    remote_and_forget,
    share_before_confirmation,
    share_and_return,
    time_out_while_it_runs,
    share_home_before_creation,
]


def orders(scenario, depth):
    """Every way to interleave deliveries with the scenario's second half, to `depth` steps.

    Yields lists of choices: an index of a message under way, or None for the second half.
    """

    def go(prefix):
        scene, _ = play(scenario, prefix)
        choices = list(range(len(scene.wire.flying)))
        if None not in prefix:
            choices.append(None)
        if len(prefix) == depth or not choices:
            yield prefix
            return
        for choice in choices:
            yield from go([*prefix, choice])

    yield from go([])


def play(scenario, choices):
    scene = Scene()
    acts = scenario(scene)
    next(acts)
    for choice in choices:
        if choice is None:
            next(acts, None)
        else:
            scene.deliver(choice)
            for node in scene.nodes:
                while node.running:
                    node.finish(0)
    return scene, acts


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_in_every_order_nothing_is_dropped_early_and_nothing_leaks(scenario):
    count = 0
    for choices in orders(scenario, 5):
        count += 1
        scene, acts = play(scenario, choices)
        next(acts, None)
        for node in scene.nodes:
            assert not node.denied, choices
        settle(scene.wire, scene.nodes, scene.clock)
        for node in scene.nodes:
            assert not node.denied, choices
            for handle in node.handles:
                if handle.fork is not None:
                    assert node.forks.standing(handle.fork) is not Standing.DEAD, choices
        handle = None
        scene.let_go()
        settle(scene.wire, scene.nodes, scene.clock)
        scene.let_go()
        settle(scene.wire, scene.nodes, scene.clock)
        created = sorted(rref for node in scene.nodes for rref in node.created)
        dropped = sorted(rref for node in scene.nodes for rref in node.dropped)
        assert set(created) <= set(dropped), choices
        for node in scene.nodes:
            assert not node.leaks(), (choices, node)
    assert count > 2


# --- the state machine ----------------------------------------------------------------------------


class References(RuleBasedStateMachine):
    """Several agents on a bad network, against the plain truth of who holds what.

    Any agent may be lost by another at any time, as after a crash or a long silence; then what runs through
    that pair is excused. Nothing else is.
    """

    @initialize(size=st.integers(2, 4))
    def begin(self, size):
        self.wire, self.clock = Wire(), ManualClock()
        self.incarnations = iter(range(100, 10_000))
        self.nodes: list[Node] = []
        self.all: dict[int, Node] = {}
        self.parents = {}  # fork -> (holder's incarnation, parent fork or None)
        self.parted: set[frozenset[int]] = set()
        for id in range(size):
            self.join(id)

    def join(self, id):
        node = Node(f"worker{id}", id, next(self.incarnations), self.wire, self.clock)
        hand_over = node.forks.hand_over

        def remember(rref, fork, to):
            handed = hand_over(rref, fork, to)
            self.parents[handed.fork] = (node.incarnation, fork)
            return handed

        node.forks.hand_over = remember
        for other in self.all.values():
            if other.alive:
                node.connect(other)
                other.connect(node)
            else:
                self.part(node, other)
        self.nodes.append(node)
        self.all[node.incarnation] = node

    # -- steps --------------------------------------------------------------------------------

    def pick(self, data, items, label):
        return items[data.draw(st.integers(0, len(items) - 1), label=label)]

    @rule(data=st.data())
    def own(self, data):
        self.pick(data, self.nodes, "node").own()

    @rule(data=st.data())
    def remote(self, data):
        node, owner = self.pick(data, self.nodes, "node"), self.pick(data, self.nodes, "owner")
        if owner.incarnation in node.peers:
            node.remote(owner)

    @rule(data=st.data())
    def share(self, data):
        node, to = self.pick(data, self.nodes, "node"), self.pick(data, self.nodes, "to")
        if node.handles:
            node.share(self.pick(data, node.handles, "handle"), to)

    @rule(data=st.data())
    def release(self, data):
        node = self.pick(data, self.nodes, "node")
        if node.handles:
            del node.handles[data.draw(st.integers(0, len(node.handles) - 1), label="handle")]
            node.reap()

    @precondition(lambda self: any(node.running for node in self.nodes))
    @rule(data=st.data(), lacks=st.booleans())
    def finish(self, data, lacks):
        node = self.pick(data, [node for node in self.nodes if node.running], "node")
        index = data.draw(st.integers(0, len(node.running) - 1), label="call")
        caller = self.all[node.running[index][0]]
        if lacks and caller is not node and node.running[index][1].id in caller.pending:
            caller.refused.add(node.running[index][1].id)
            node.refuse_for_definitions(index)
        else:
            node.finish(index)

    @precondition(lambda self: any(self.can_time_out(node) for node in self.nodes))
    @rule(data=st.data())
    def time_out(self, data):
        node = self.pick(data, [node for node in self.nodes if self.can_time_out(node)], "node")
        node.time_out(self.pick(data, self.can_time_out(node), "call"))

    @staticmethod
    def can_time_out(node):
        # Not between its refusal and its repetition: then the owner would remember an early delete of a call
        # that never comes, a few bytes until its caller goes.
        return sorted(node.pending.keys() - node.refused)

    @precondition(lambda self: self.wire.flying)
    @rule(data=st.data())
    def deliver(self, data):
        to, frame = self.wire.flying.pop(data.draw(st.integers(0, len(self.wire.flying) - 1), label="message"))
        self.all[to].take(frame)

    @precondition(lambda self: self.wire.flying)
    @rule()
    def deliver_all_in_order(self):
        flying, self.wire.flying = self.wire.flying, []
        for to, frame in flying:
            self.all[to].take(frame)

    @precondition(lambda self: self.wire.flying)
    @rule(data=st.data())
    def deliver_twice(self, data):
        to, frame = self.wire.flying[data.draw(st.integers(0, len(self.wire.flying) - 1), label="message")]
        self.all[to].take(frame)

    @precondition(lambda self: self.wire.flying)
    @rule(data=st.data())
    def drop(self, data):
        self.wire.flying.pop(data.draw(st.integers(0, len(self.wire.flying) - 1), label="message"))

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def pass_time(self, seconds):
        self.clock.advance(seconds)
        for node in self.nodes:
            node.tick()

    @precondition(lambda self: len(self.nodes) > 1)
    @rule(data=st.data())
    def crash_and_restart(self, data):
        node = self.pick(data, self.nodes, "node")
        node.crash()
        self.nodes.remove(node)
        for other in self.nodes:
            self.part(node, other)
        if data.draw(st.booleans(), label="restart"):
            self.join(node.id)

    @rule(data=st.data())
    def lose(self, data):
        """Somebody takes somebody else for dead, rightly or not."""
        node = self.pick(data, self.nodes, "node")
        others = [other for other in node.peers if other != node.incarnation]
        wrongly = data.draw(st.integers(0, 9), label="wrongly") == 0
        if not wrongly:
            others = [other for other in others if frozenset((node.incarnation, other)) in self.parted]
        if others:
            other = self.all[self.pick(data, others, "lost")]
            self.part(node, other)
            node.lose(other.incarnation)

    def part(self, one, another):
        self.parted.add(frozenset((one.incarnation, another.incarnation)))

    # -- the truth ----------------------------------------------------------------------------

    def excused(self, node, rref, fork, owner):
        """Whether some pair of agents on the way of this fork from its origin has been parted."""
        way = [node.incarnation, owner]
        while fork is not None and fork in self.parents:
            holder, fork = self.parents[fork]
            way.append(holder)
        way.append(rref.incarnation)
        return any(frozenset(pair) in self.parted for pair in itertools.combinations(set(way), 2))

    @invariant()
    def nothing_is_dropped_early(self):
        for node in getattr(self, "nodes", []):
            for handle in node.handles:
                if handle.fork is None:
                    if handle.rref in node.created:
                        assert node.forks.owns(handle.rref), f"{node} dropped what it holds itself: {handle}"
                    continue
                user = node.forks._users[handle.fork]
                if self.excused(node, handle.rref, handle.fork, user.owner):
                    continue
                assert user.standing is not Standing.DEAD, f"{handle} is dead"
                if user.standing is Standing.CONFIRMED:
                    counted = self.all[user.owner].forks._owned
                    assert handle.rref in counted, f"{handle} is dropped by {user.owner}"
                    assert handle.fork in counted[handle.rref].forks, f"{handle} is not counted"
                    assert handle.rref not in self.all[user.owner].dropped, f"{handle} was dropped"

    @invariant()
    def the_forks_of_no_lost_agent_are_counted(self):
        for node in getattr(self, "nodes", []):
            for owned in node.forks._owned.values():
                assert not node.lost & set(owned.forks.values())

    def teardown(self):
        if not hasattr(self, "nodes"):
            return
        for pair in self.parted:  # all learn what happened
            for one, another in itertools.permutations(pair, 2):
                if self.all[one].alive:
                    self.all[one].lose(another)
        self.rest()
        self.nothing_is_dropped_early()
        for node in self.nodes:
            for handle in node.handles:
                if handle.fork is not None:
                    assert node.forks.standing(handle.fork) is not Standing.PENDING, f"{handle} pends for ever"
        handle = None
        for node in self.nodes:
            node.handles.clear()
            node.reap()
        self.rest()
        for node in self.nodes:
            assert not node.handles
            assert not node.leaks(), f"{node} leaks"
            assert node.created <= set(node.dropped), f"{node} keeps a value"
            for peer in node.peers.values():
                assert not peer._arrived.above

    def rest(self):
        """Let all that is under way come to its end."""
        for _ in range(50):
            settle(self.wire, self.nodes, self.clock)
            if not any(node.running for node in self.nodes):
                return
            for node in self.nodes:
                while node.running:
                    node.finish(0)
        raise AssertionError("calls go round in circles")


QUICK = quick(300, stateful_step_count=40)
LONG = long(QUICK, stateful_step_count=80)


@pytest.mark.timeout(900)  # passing takes seconds; a failing history takes minutes to shrink
def test_any_history_neither_leaks_nor_drops_early():
    run_state_machine_as_test(References, settings=QUICK)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_very_many_histories_neither_leak_nor_drop_early():
    run_state_machine_as_test(References, settings=LONG)
