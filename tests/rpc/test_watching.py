"""Who watches whom in a large world, and who learns of a loss there (G3)."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter

import pytest
import torch
from helpers.models import autograd_functions
from helpers.processes import workers
from helpers.waiting import wait_until

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.compat import gathering
from nbdist.rpc.core.watching import ALL_WATCH_ALL, EACH_SIDE, watched_by
from nbdist.rpc.start import start_agent
from nbdist.testing import Faults, ManualClock, World
from nbdist.wire.messages import GiveBack, Ping, Record, Refused, decode_envelope
from nbdist.wire.peer import Lost, Peer, PeerLimits, Standing, Suspect, Transmit

MANY = ALL_WATCH_ALL + 4
QUICK = rpc.RpcBackendOptions(suspect_after=1.5, lost_after=4.0)


# --- the ring -------------------------------------------------------------------------------------


def records(hosts, seed=0):
    chance = random.Random(seed)
    return [Record(f"w{i}", i, chance.getrandbits(62), ["x"], host, 1, 0, None) for i, host in enumerate(hosts)]


def watchers_of(member, ring):
    """Return the nearest members on both sides of one that are on other hosts, straight from the definition."""
    place = ring.index(member)
    others = ring[place + 1 :] + ring[:place]
    apart = [each.incarnation for each in others if each.host != member.host]
    return set(apart[:EACH_SIDE]) | set(apart[-EACH_SIDE:])


@pytest.mark.parametrize(
    "hosts",
    [
        [str(number) for number in range(40)],
        [str(number // 8) for number in range(48)],
        ["a"] * 30 + ["b"],
        ["a"] * 30 + ["b"] * 10 + ["c"] * 2,
        ["a"] * 5 + ["b"] * 5,
        ["a", "b"],
        ["a", "a"],
        ["a"],
    ],
    ids=len,
)
@pytest.mark.parametrize("seed", range(5))
def test_each_member_has_its_watchers_on_other_hosts(hosts, seed):
    members = records(hosts, seed)
    ring = sorted(members, key=lambda record: record.incarnation)
    expected = {each.incarnation: watchers_of(each, ring) for each in ring}
    for me in members:
        watched = {incarnation for incarnation, watchers in expected.items() if me.incarnation in watchers}
        assert watched_by(me, members) == watched
    for each in members:
        apart = sum(other.host != each.host for other in members)
        assert len(expected[each.incarnation]) == min(apart, 2 * EACH_SIDE)


@pytest.mark.parametrize("per_host", [1, 8])
def test_no_agent_watches_many(per_host):
    members = records([str(number // per_host) for number in range(1000)])
    counts = [len(watched_by(me, members)) for me in members]
    assert sum(counts) == 2 * EACH_SIDE * len(members)
    assert max(counts) <= 4 * EACH_SIDE


# --- one peer -------------------------------------------------------------------------------------


class OnePeer:
    def __init__(self):
        self.clock = ManualClock()
        self.peer = Peer(1, 2, PeerLimits(), self.clock.now(), watch_silence=True)

    def after(self, seconds):
        """Let time pass; return what the peer asks for meanwhile, with the moments."""
        began, found = self.clock.now(), []
        while (passed := self.clock.now() - began) < seconds:
            found += [(passed, action) for action in self.peer.tick(self.clock.now())]
            self.clock.advance(0.25)
        return found


def test_a_peer_at_rest_is_not_asked_and_not_lost():
    one = OnePeer()
    one.peer.rest()
    assert one.after(1000) == []
    assert one.peer.next_tick() == float("inf")


def test_silence_counts_from_the_moment_at_which_a_peer_is_watched():
    one = OnePeer()
    one.peer.rest()
    one.after(1000)
    one.peer.watch(one.clock.now())
    found = one.after(20)
    pings = [at for at, action in found if isinstance(action, Transmit) and isinstance(action.outgoing.message, Ping)]
    assert pings == [float(second) for second in range(12)]
    assert [(at, action) for at, action in found if not isinstance(action, Transmit)] == [
        (5.0, Suspect(5.0)),
        (12.0, Lost(12.0)),
    ]


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_doubt_counts_the_silence_that_another_agent_has_seen(is_watched):
    one = OnePeer()
    one.peer.rest()
    one.after(1000)
    if is_watched:  # since a moment ago
        one.peer.watch(one.clock.now())
    one.peer.doubt(5.0, one.clock.now())
    one.peer.rest()  # not while it is doubted
    assert [(at, type(action)) for at, action in one.after(20) if not isinstance(action, Transmit)] == [
        (0.0, Suspect),
        (7.0, Lost),
    ]


def test_a_doubted_peer_is_watched_until_it_speaks_and_no_longer():
    one = OnePeer()
    one.peer.heard(one.clock.now())
    one.clock.advance(1.0)
    one.peer.doubt(5.0, one.clock.now())
    one.peer.rest()
    assert one.after(3.0)  # asked, though it was heard a second ago
    one.peer.heard(one.clock.now())
    one.peer.rest()
    assert one.after(100) == []
    assert one.peer.standing is Standing.LIVE


# --- worlds ---------------------------------------------------------------------------------------


class Cuts:
    """A world of agents on hosts of their own, whose messages a test cuts, by sender and receiver."""

    def __init__(self, size, options=QUICK, **how):
        self.cut = lambda sender, receiver: False
        self.sent = Counter()
        self.asked = set()
        """The pairs of an agent and one that it has asked for a sign of life, by incarnation."""
        self.world = World(
            size, faults=Faults(match=self._match, drop={"cut": 1.0}), options=options, apart=True, dynamic=True, **how
        )
        self.names = {agent.me.incarnation: agent.me.name for agent in self.world}

    def _match(self, kind, frames):
        envelope = decode_envelope(frames[0])
        self.sent[envelope.sender, kind] += 1
        if kind == "ping":
            self.asked.add((envelope.sender, envelope.receiver))
        return "cut" if self.cut(envelope.sender, envelope.receiver) else kind

    def freeze(self, agent):
        """Have one agent neither send nor receive, as far as others can see."""
        frozen = agent.me.incarnation
        self.cut = lambda sender, receiver: frozen in (sender, receiver)

    def members(self):
        return [{record.name for record in agent.members()} for agent in self.world]


def test_an_agent_of_a_large_world_watches_few():
    cuts = Cuts(MANY)
    with cuts.world as world:
        wait_until(lambda: all(len(watched(agent)) <= 2 * EACH_SIDE for agent in world))
        for agent in world:
            assert watched(agent) == watched_by(agent.me, [each.me for each in world])
        cuts.sent.clear()
        time.sleep(3.0)
        for agent in world:
            assert cuts.sent[agent.me.incarnation, "ping"] <= 3 * 4 * EACH_SIDE


def watched(agent):
    """Return the agents that one watches, by incarnation."""
    return {incarnation for incarnation, each in list(agent.links.connections.items()) if each.peer.is_watched}


def test_an_agent_of_a_small_world_watches_all():
    with World(ALL_WATCH_ALL, options=QUICK, apart=True, dynamic=True) as world:
        time.sleep(1.0)
        assert all(len(watched(agent)) == ALL_WATCH_ALL - 1 for agent in world)
        late = world.add()
        wait_until(lambda: all(len(watched(agent)) == 2 * EACH_SIDE for agent in world))
        late.close("has left")
        wait_until(lambda: all(len(watched(agent)) == ALL_WATCH_ALL - 1 for agent in list(world)[:-1]))


def test_all_members_learn_that_one_is_frozen_though_few_watch_it():
    cuts = Cuts(MANY)
    with cuts.world as world:
        wait_until(lambda: all(len(watched(agent)) <= 2 * EACH_SIDE for agent in world))
        frozen = world[7]
        cuts.freeze(frozen)
        others = [agent for agent in world if agent is not frozen]
        wait_until(lambda: all(len(agent.members()) == MANY - 1 for agent in others))
        assert all(re.search(r"has been silent for \d", agent.fate(frozen.me.incarnation)) for agent in others)
        # Once it runs again, it learns that all others have given it up.
        cuts.cut = lambda sender, receiver: False
        wait_until(lambda: len(frozen.members()) == 1)


def test_a_member_is_watched_whose_watchers_have_died_with_it():
    cuts = Cuts(MANY)
    with cuts.world as world:
        wait_until(lambda: all(len(watched(agent)) <= 2 * EACH_SIDE for agent in world))
        dead = watchers_of(world[3].me, sorted((agent.me for agent in world), key=lambda record: record.incarnation))
        dead = {world[3].me.incarnation, *dead}
        cuts.cut = lambda sender, receiver: sender in dead or receiver in dead
        others = [agent for agent in world if agent.me.incarnation not in dead]
        wait_until(lambda: all(len(agent.members()) == len(others) for agent in others))


def test_a_frozen_member_that_goes_on_in_time_is_not_lost():
    cuts = Cuts(MANY, rpc.RpcBackendOptions(suspect_after=1.5, lost_after=60.0))
    with cuts.world as world:
        wait_until(lambda: all(len(watched(agent)) <= 2 * EACH_SIDE for agent in world))
        cuts.freeze(world[7])
        wait_until(lambda: all(agent.statistics()["suspects"] for agent in world if agent is not world[7]))
        cuts.cut = lambda sender, receiver: False
        wait_until(lambda: not any(agent.statistics()["suspects"] for agent in world))
        assert all(len(agent.members()) == MANY for agent in world)
        wait_until(lambda: all(len(watched(agent)) <= 2 * EACH_SIDE for agent in world))


def test_a_goodbye_that_only_some_hear_is_noticed_by_all():
    cuts = Cuts(MANY)
    with cuts.world as world:
        wait_until(lambda: all(len(watched(agent)) <= 2 * EACH_SIDE for agent in world))
        leaver, others = world[7], [agent for agent in world if agent is not world[7]]
        told = watchers_of(leaver.me, sorted((agent.me for agent in world), key=lambda record: record.incarnation))
        away = leaver.me.incarnation
        cuts.cut = lambda sender, receiver: sender == away and receiver not in told
        leaver.close("has left")
        wait_until(lambda: all(len(agent.members()) == MANY - 1 for agent in others))
        assert sum(agent.fate(away) == "has left" for agent in others) == 2 * EACH_SIDE


def test_an_agent_that_is_refused_by_one_asks_all_others():
    cuts = Cuts(MANY)
    with cuts.world as world:
        wait_until(lambda: all(len(watched(agent)) <= 2 * EACH_SIDE for agent in world))
        cuts.asked.clear()
        world[0].handshake.on_refused(Refused(world[1].me.incarnation, "it was silent"))
        others = {agent.me.incarnation for agent in world} - {world[0].me.incarnation, world[1].me.incarnation}
        # One of a pair that watch each other asks, and both hear each other.
        wait_until(lambda: others <= {each for pair in cuts.asked if world[0].me.incarnation in pair for each in pair})


def test_a_message_for_which_nobody_waits_shows_a_cut():
    cuts = Cuts(MANY)
    with cuts.world as world:
        one, other = pair(world, neighbours=False)
        wait_until(lambda: other.me.incarnation not in watched(one))
        cut_pair(cuts, one, other)
        one.post(other.me.incarnation, GiveBack([]))
        wait_until(lambda: len(one.members()) == len(other.members()) == MANY - 1)


def test_an_agent_that_alone_meets_all_others_watches_all():
    with World(MANY, options=QUICK, apart=True, dynamic=True) as world:
        world[0].links.meets_all = False
        world.add()  # it chooses again when an agent comes
        wait_until(lambda: len(watched(world[0])) == MANY)


def test_keepers_and_their_hub_do_not_meet_each_other():
    """Each keeper of a cluster is connected to the hub only, so the hub watches all of them."""
    agent = start_agent("hub", rank=0, world_size=None, options=rpc.RpcBackendOptions(), present=[])
    try:
        assert not agent.links.meets_all
    finally:
        agent.close("test is over")


def pair(world, *, neighbours):
    """Return two agents that watch each other, or that do not."""
    for one in world:
        for other in world:
            if (
                one is not other
                and (other.me.incarnation in watched_by(one.me, [each.me for each in world])) == neighbours
            ):
                return one, other
    raise AssertionError


def cut_pair(cuts, one, other):
    both = {one.me.incarnation, other.me.incarnation}
    cuts.cut = lambda sender, receiver: {sender, receiver} == both


def test_a_cut_between_two_neighbours_is_no_loss_for_the_others():
    cuts = Cuts(MANY)
    with cuts.world as world:
        one, other = pair(world, neighbours=True)
        cut_pair(cuts, one, other)
        wait_until(lambda: len(one.members()) == len(other.members()) == MANY - 1)
        assert all(len(agent.members()) == MANY for agent in world if agent not in (one, other))


@pytest.mark.parametrize("when", ["before the call", "while it runs"])
def test_who_waits_for_a_member_learns_of_a_cut_to_it(when):
    cuts = Cuts(MANY)
    with cuts.world as world:
        one, other = pair(world, neighbours=False)
        wait_until(lambda: other.me.incarnation not in watched(one))
        if when == "before the call":
            cut_pair(cuts, one, other)
            with one.activate(), pytest.raises(nbdist.WorkerLost, match="silent"):
                rpc.rpc_sync(other.me.name, workers.sleep, args=(0,), timeout=0)
        else:
            with one.activate():
                call = rpc.rpc_async(other.me.name, workers.sleep, args=(20,), timeout=0)
            wait_until(lambda: other.statistics()["running_calls"] == 1 and not one.links.outstanding())
            cut_pair(cuts, one, other)
            with pytest.raises(nbdist.WorkerLost, match="silent"):
                call.wait(30)
        # The other one, which does not wait for the first, learns of it by way of others.
        wait_until(lambda: len(other.members()) == MANY - 1)
        assert all(len(agent.members()) == MANY for agent in world if agent not in (one, other))


@pytest.mark.parametrize(
    ("apart", "place"),
    [((1, 2), 1), ((1, 2), 2), ((0, 2), 2)],
    ids=["before a gradient goes to the third", "before it comes back", "before the third reports to the first"],
)
def test_a_backward_pass_ends_if_two_of_its_workers_are_cut_off_from_each_other(apart, place, monkeypatch):
    """The pass goes from the first worker to the second and the third, and back."""
    cuts = Cuts(MANY)
    with cuts.world as world:
        one, other = pair(world, neighbours=False)
        chain = [agent for agent in world if agent not in (one, other)][:1]
        for at, agent in zip(apart, (one, other), strict=True):
            chain.insert(at, agent)
        names = [agent.me.name for agent in chain]
        wait_until(lambda: other.me.incarnation not in watched(one))
        x = torch.ones(3, requires_grad=True)
        with chain[0].activate(), dist_autograd.context() as context_id:
            loss = autograd_functions.through(names[1:], x).sum()
            monkeypatch.setitem(autograd_functions.hooks, names[place], lambda _: cut_pair(cuts, one, other))
            with pytest.raises(nbdist.WorkerLost, match=r"silent|given") as lost:
                dist_autograd.backward(context_id, [loss])
            assert str(lost.value).split()[0] in {one.me.name, other.me.name}
            assert x not in context_id.gradients()
        for agent in world:
            with agent.activate():
                wait_until(autograd_functions.contexts_here, equals=0)


def test_a_backward_pass_ends_if_it_reaches_a_worker_that_its_root_has_lost(monkeypatch):
    cuts = Cuts(3)
    with cuts.world as world:
        root, second, third = world
        x = torch.ones(3, requires_grad=True)

        def lose(_):
            """Hold the pass up on the second worker, which has not named the third one to the root."""
            cut_pair(cuts, root, third)
            wait_until(lambda: len(root.members()) == len(third.members()) == 2)

        with root.activate(), dist_autograd.context() as context_id:
            loss = autograd_functions.through([second.me.name, third.me.name], x).sum()
            monkeypatch.setitem(autograd_functions.hooks, second.me.name, lose)
            with pytest.raises(nbdist.WorkerLost, match=f"^{third.me.name} has.* needed it"):
                dist_autograd.backward(context_id, [loss])
        for agent in world:
            with agent.activate():
                wait_until(autograd_functions.contexts_here, equals=0)


def test_a_gathering_ends_if_a_member_and_its_parent_are_cut_off_from_each_other():
    cuts = Cuts(MANY)
    with cuts.world as world:
        names = sorted(agent.me.name for agent in world)
        by_name = {agent.me.name: agent for agent in world}
        errors = {}

        def gather(name):
            with by_name[name].activate():
                try:
                    gathering.all_gather(None, names, 0)
                except nbdist.WorkerLost as error:
                    errors[name] = str(error)

        waiting = [threading.Thread(target=gather, args=(name,), daemon=True) for name in names[:-2]]
        for thread in waiting:
            thread.start()
        time.sleep(1.0)
        on_ring = watched_by(by_name[names[0]].me, [agent.me for agent in world])
        child = next(name for name in names[1:15] if by_name[name].me.incarnation not in on_ring)
        cut_pair(cuts, by_name[names[0]], by_name[child])
        for thread in waiting:
            thread.join(60)
        assert errors.keys() == set(names[:-2])
        assert names[0] in errors[child]
        assert child in errors[names[0]]
        assert child in errors[names[16]]
