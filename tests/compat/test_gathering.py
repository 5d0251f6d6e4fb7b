"""`all_gather` over a tree: what it returns, and who learns of a lost member, wherever in the tree that member was."""

import threading
import time

import pytest
from helpers.waiting import wait_until

from nbdist import Interrupted, RpcTimeout, UnknownWorker, WorkerLost
from nbdist.compat import gathering
from nbdist.rpc.futures import Future
from nbdist.rpc.options import RpcBackendOptions
from nbdist.testing import World

MANY = 40
"""Members of a group whose tree has three levels: 16 below the leader, and 23 below the first of those two."""
WITHIN = 60.0


@pytest.fixture(scope="module")
def names():
    return sorted(f"worker{number}" for number in range(MANY))


class Gatherings:
    """Calls of `all_gather` in threads, one for each member that takes part."""

    def __init__(self, world):
        self.agents = {agent.me.name: agent for agent in world}
        self.results = {}
        self.threads = {}

    def begin(self, names, group=None, timeout=0, objects=str.upper):
        for name in names:
            thread = threading.Thread(target=self._gather, args=(name, group, timeout, objects), daemon=True)
            self.threads[name] = thread
            thread.start()

    def _gather(self, name, group, timeout, objects):
        with self.agents[name].activate():
            try:
                self.results[name] = gathering.all_gather(objects(name), group, timeout)
            except (Exception, KeyboardInterrupt) as error:
                self.results[name] = error

    def ends(self):
        """Return the results by member, when all calls have ended."""
        until = time.monotonic() + WITHIN
        for name, thread in self.threads.items():
            thread.join(until - time.monotonic())
            assert not thread.is_alive(), f"{name} still waits"
        return self.results


def has_part_of(agent, name):
    """Return whether an agent has the object of a member."""
    return any(
        name in each.parts
        for (incarnation, _), each in list(gathering._rounds.items())
        if incarnation == agent.me.incarnation
    )


def left_behind(world):
    own = {agent.me.incarnation for agent in world}
    return [each for each in gathering._rounds if each[0] in own]


@pytest.mark.parametrize("size", [1, 2, 17, 18, 19, 273, 274, 1000])
def test_each_member_has_one_place(size):
    names = [f"{number:04}" for number in range(size)]
    places = {name: gathering.tree_place(names, name) for name in names}
    assert places[names[0]].above == []
    assert places[names[0]].below == set(names)
    for name, place in places.items():
        assert len(place.children) <= 16
        assert place.below == {name}.union(*(places[child].below for child in place.children))
        assert len(place.below) == 1 + sum(len(places[child].below) for child in place.children)
        assert all(places[child].above == [name, *place.above] for child in place.children)


def test_a_small_group_is_a_star():
    names = [f"{number:02}" for number in range(17)]
    assert gathering.tree_place(names, "00").children == names[1:]


def test_every_member_has_all_objects_again_and_again(names):
    with World(MANY) as world:
        expected = {name: name.upper() for name in names}
        for _ in range(3):
            gatherings = Gatherings(world)
            gatherings.begin(names)
            assert all(result == expected for result in gatherings.ends().values())
        assert left_behind(world) == []


def test_gatherings_of_other_groups_run_at_the_same_time(names):
    with World(MANY) as world:
        groups = [names, names[3:30], names[:5]]
        several = []
        for group in groups:
            for _ in range(2):
                several.append(Gatherings(world))
                several[-1].begin(group, group)
        for group, found in zip([group for group in groups for _ in range(2)], several, strict=True):
            assert all(result == {name: name.upper() for name in group} for result in found.ends().values())


@pytest.mark.parametrize("lost", [0, 1, 5, 20], ids=["leader", "inner", "below the leader", "leaf"])
@pytest.mark.parametrize("size", [12, MANY])
def test_all_members_learn_of_a_loss(lost, size):
    """One member never comes, and another one is lost: nobody waits for the first one."""
    names = sorted(f"worker{number}" for number in range(size))
    lost = min(lost, size - 2)
    with World(size) as world:
        gatherings = Gatherings(world)
        waiting = [name for name in names[:-1] if name != names[lost]]
        gatherings.begin(waiting, names)
        wait_until(lambda: has_part_of(gatherings.agents[names[max(lost - 1, 0) // 16]], names[lost - 1]) or not lost)
        world.kill(int(names[lost].removeprefix("worker")))
        for name, result in gatherings.ends().items():
            assert isinstance(result, WorkerLost), name
            assert names[lost] in str(result), name
        # Who comes later learns it, too.
        late = Gatherings(world)
        late.begin(names[-1:], names)
        assert isinstance(late.ends()[names[-1]], WorkerLost)


@pytest.mark.parametrize("size", [12, MANY])
def test_followers_do_not_wait_for_a_leader_that_has_failed(size):
    """A leader that alone has lost a member fails and lives: it tells the others, those that come later included."""
    names = sorted(f"worker{number}" for number in range(size))
    with World(size, dynamic=True) as world:
        gatherings = Gatherings(world)
        gatherings.begin(names[:-2], names)
        leader, lost = gatherings.agents[names[0]], gatherings.agents[names[-1]]
        leader.lose(lost.me.incarnation, "is behind a cut cable")
        results = gatherings.ends()
        late = Gatherings(world)
        late.begin(names[-2:-1], names)
        for name, result in {**results, **late.ends()}.items():
            assert isinstance(result, WorkerLost), name
            assert f"{names[-1]} is behind a cut cable" in str(result), name


def test_a_leader_that_does_not_come_is_told_of_a_loss(names):
    """Members that notice a loss apart from the leader tell it: the leader knows whether the lost one is needed."""
    with World(MANY, dynamic=True) as world:
        gatherings = Gatherings(world)
        gatherings.begin(names[1:30], names)
        lost = gatherings.agents[names[39]]
        gatherings.agents[names[5]].lose(lost.me.incarnation, "is behind a cut cable")
        for name, result in gatherings.ends().items():
            assert isinstance(result, WorkerLost), name
            assert f"{names[39]} is behind a cut cable" in str(result), name


def test_a_member_that_has_its_answer_may_leave_before_the_others_have_theirs(names, monkeypatch):
    """The members below one child of the leader are slow; one below the other child leaves."""
    slow, passed = threading.Event(), gathering.broadcast_to_followers
    second = names[2]

    def broadcast(sequence_id, objects):
        if gathering.api.current_agent().me.name == second:
            slow.wait(WITHIN)
        passed(sequence_id, objects)

    broadcast.__module__, broadcast.__qualname__ = gathering.__name__, "broadcast_to_followers"
    monkeypatch.setattr(gathering, "broadcast_to_followers", broadcast)
    with World(MANY, dynamic=True) as world:
        gatherings = Gatherings(world)
        gatherings.begin(names)
        leaver = names[17]  # below names[1]
        gatherings.threads[leaver].join(WITHIN)
        gatherings.threads[names[1]].join(WITHIN)  # it has heard that the leaver has the answer
        gatherings.agents[leaver].close("has shut down")
        time.sleep(4 * gathering._LOOK_FOR_LOST_EVERY)  # longer than a member looks before it tells the leader
        assert not {second, names[0]} & gatherings.results.keys()
        slow.set()
        expected = {name: name.upper() for name in names}
        assert {name: result for name, result in gatherings.ends().items() if result != expected} == {}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("interrupted", [0, 1], ids=["leader", "inner"])
def test_nobody_waits_for_a_member_that_is_interrupted(names, monkeypatch, interrupted, when):
    """Before it has all objects below it, all others fail; after that, all others have the objects."""
    who, wait = names[interrupted], Future.wait
    with World(MANY) as world:
        (own,) = [agent.me.incarnation for agent in world if agent.me.name == who]

        def interrupt(outcome, *args):
            rounds = [each for (incarnation, _), each in list(gathering._rounds.items()) if incarnation == own]
            if any(outcome is each.whole or (when == "before" and outcome is each.collected) for each in rounds):
                raise KeyboardInterrupt
            return wait(outcome, *args)

        monkeypatch.setattr(Future, "wait", interrupt)
        gatherings = Gatherings(world)
        gatherings.begin(names)
        results = gatherings.ends()
        if (interrupted, when) != (0, "after"):  # a leader waits only for the objects below it
            assert isinstance(results.pop(who), KeyboardInterrupt)
        expected = {name: name.upper() for name in names}
        for name, result in results.items():
            if when == "before":
                assert isinstance(result, Interrupted), name
                assert who in str(result), name
            else:
                assert result == expected, name
        assert not left_behind(world)


def test_what_comes_for_a_round_that_has_failed_is_dropped(names):
    """What comes for a round that the leader has not begun is kept."""
    with World(MANY) as world:
        agents = {agent.me.name: agent for agent in world}

        def gather_alone(name, timeout):
            with agents[name].activate(), pytest.raises(RpcTimeout):
                gathering.all_gather(name, names, timeout)

        leader, leaf = names[0], names[16]
        gather_alone(leader, 0.1)
        gather_alone(leaf, 1.0)
        assert not left_behind(world)
        gather_alone(leaf, 1.0)  # for the next round
        assert has_part_of(agents[leader], leaf)
        gather_alone(leader, 0.1)
        assert not left_behind(world)


def test_an_unknown_member_fails_all(names):
    with World(MANY) as world:
        gatherings = Gatherings(world)
        gatherings.begin(names, [*names, "worker99"])
        assert all(isinstance(result, UnknownWorker) for result in gatherings.ends().values())


def test_the_time_limit_counts_in_the_middle_of_the_tree(names):
    options = RpcBackendOptions(rpc_timeout=30)
    with World(MANY, options=options) as world:
        gatherings = Gatherings(world)
        gatherings.begin(names[:-1], names, timeout=1.0)
        assert all(isinstance(result, RpcTimeout) for result in gatherings.ends().values())
