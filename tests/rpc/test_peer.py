"""The protocol of one peer: two of them back to back, on a network that loses, doubles and reorders."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.ids import GlobalId
from nbdist.testing import ManualClock
from nbdist.wire.messages import Cast, Goodbye, Nothing, Payload, Ping, Pong, UserDelete, decode_envelope
from nbdist.wire.peer import Lost, Peer, PeerLimits, SeqSet, Standing, Suspect, Transmit, Undelivered

A, B = 101, 202


def word(text):
    return Cast(str(text), b"", Payload())


def delete(number):
    return UserDelete(GlobalId(0, 0, A), GlobalId(0, number, A))


class Ends:
    """Two peers and the messages between them, each as (receiver, first frame)."""

    def __init__(self, *, watch=False, **limits):
        self.clock = ManualClock()
        limits = PeerLimits(**limits)
        self.peers = {
            A: Peer(A, B, limits, self.clock.now(), watch_silence=watch),
            B: Peer(B, A, limits, self.clock.now(), watch_silence=watch),
        }
        self.flying: list[tuple[int, bytes]] = []
        self.heard = {A: [], B: []}
        self.events: list[tuple[int, object]] = []

    def put(self, sender, outgoing):
        self.flying.append((B if sender == A else A, bytes(outgoing.frames[0])))

    def say(self, sender, text, holds=None):
        outgoing = self.peers[sender].send(word(text), (), self.clock.now(), holds)
        self.put(sender, outgoing)
        return outgoing

    def deliver(self, index=0, *, keep=False):
        to, frame = self.flying[index] if keep else self.flying.pop(index)
        envelope = decode_envelope(frame)
        peer = self.peers[to]
        if not peer.receive(envelope, len(frame), self.clock.now()):
            return
        self.heard[to] += [f"delete {each.fork.local_id}" for each in envelope.deletes]
        match envelope.message:
            case Cast(topic=topic):
                self.heard[to].append(topic)
            case UserDelete(fork=fork):
                self.heard[to].append(f"delete {fork.local_id}")
            case Ping(number=number):
                self.put(to, peer.send(Pong(number), (), self.clock.now()))
            case Pong():
                self.follow(to, peer.ponged(envelope.message, self.clock.now()))

    def follow(self, me, actions):
        for action in actions:
            if isinstance(action, Transmit):
                self.put(me, action.outgoing)
            else:
                self.events.append((me, action))

    def tick(self, *, who=(A, B)):
        for me in who:
            self.follow(me, self.peers[me].tick(self.clock.now()))

    def pass_time(self, seconds):
        self.clock.advance(seconds)
        self.tick()

    @property
    def next_tick(self):
        return min(peer.next_tick() for peer in self.peers.values())

    def settle(self):
        """A good network from now on, until both sides have nothing left to do."""
        for _ in range(1000):
            while self.flying:
                self.deliver()
            if self.next_tick == math.inf:
                return
            self.clock.advance(max(self.next_tick - self.clock.now(), 0.0))
            self.tick()
        raise AssertionError("the peers talk for ever")

    def assert_at_rest(self):
        for peer in self.peers.values():
            assert peer.outstanding == 0
            assert not peer.arrived.above
            assert peer.next_tick() == math.inf


# --- numbers --------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 12), max_size=40), st.integers(0, 12))
def test_a_seqset_is_a_set(numbers, mark):
    fast, plain = SeqSet(), set()
    for number in numbers:
        assert fast.add(number) == (number not in plain)
        plain.add(number)
    fast.advance(mark)
    plain |= set(range(1, mark + 1))
    assert set(range(1, fast.mark + 1)) | fast.above == plain
    assert fast.mark + 1 not in fast.above
    assert all(number > fast.mark for number in fast.above)


def test_a_seqset_takes_nothing_below_one():
    numbers = SeqSet()
    assert not numbers.add(0)
    assert not numbers.add(-5)
    assert numbers.mark == 0
    assert not numbers.above


# --- every order of a few messages ----------------------------------------------------------------


@pytest.mark.parametrize("lost", [*itertools.combinations(range(4), 0), *itertools.combinations(range(4), 1), (1, 2)])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_in_any_order_each_message_comes_once(order, lost):
    ends = Ends()
    for number in range(4):
        ends.say(A, number)
    first, ends.flying = ends.flying, []
    ends.flying = [first[number] for number in order if number not in lost]
    while ends.flying:
        ends.deliver(keep=True)
        ends.deliver()  # twice
    assert sorted(ends.heard[B]) == [str(number) for number in range(4) if number not in lost]
    ends.settle()
    assert sorted(ends.heard[B]) == ["0", "1", "2", "3"]
    assert ends.peers[B].duplicates >= 4 - len(lost)
    assert ends.peers[A].resent == (len(lost) if lost else 0)
    ends.assert_at_rest()


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))))
def test_pings_and_messages_may_overtake_each_other(order):
    """Three messages, a ping in their midst, and the ping's answer whenever it comes."""
    ends = Ends()
    for number in range(2):
        ends.say(A, number)
    ends.put(A, ends.peers[A].ping(ends.clock.now()))
    ends.say(A, 2)
    ends.put(A, ends.peers[A].ping(ends.clock.now()))
    first = ends.flying
    ends.flying = [first[index] for index in order]
    ends.settle()
    assert sorted(ends.heard[B]) == ["0", "1", "2"]
    ends.assert_at_rest()


# --- long runs ------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["say", "delete"]), st.sampled_from([A, B])),
        st.tuples(st.sampled_from(["deliver", "drop", "double"]), st.integers(0, 1 << 16)),
        st.tuples(st.just("wait"), st.sampled_from([0.01, 0.06, 0.6, 3.0, 30.0])),
        st.tuples(st.just("refuse"), st.sampled_from([A, B])),
    ),
    max_size=80,
)


@settings(max_examples=400, deadline=None)
@given(STEPS)
def test_on_any_network_each_message_comes_once_and_nothing_is_kept(steps):
    ends, said = Ends(retries=10_000), {A: [], B: []}
    for number, (step, what) in enumerate(steps):
        if step == "say":
            ends.say(what, number)
            said[what].append(str(number))
        elif step == "delete":
            ends.peers[what].send_later(delete(number), ends.clock.now())
            said[what].append(f"delete {number}")
        elif step == "refuse":  # the channel does not take it
            outgoing = ends.peers[what].send(word(number), (), ends.clock.now())
            ends.peers[what].failed(outgoing.seq, ends.clock.now())
            said[what].append(str(number))
        elif step == "wait":
            ends.pass_time(what)
        elif ends.flying:
            index = what % len(ends.flying)
            if step == "drop":
                ends.flying.pop(index)
            else:
                ends.deliver(index, keep=step == "double")
        for me in (A, B):
            assert len(set(ends.heard[me])) == len(ends.heard[me]), "a message came twice"
    ends.settle()
    assert sorted(ends.heard[B]) == sorted(said[A])
    assert sorted(ends.heard[A]) == sorted(said[B])
    assert not ends.events
    ends.assert_at_rest()


@settings(max_examples=200, deadline=None)
@given(STEPS, st.sets(st.integers(0, 80)))
def test_withdrawn_messages_leave_no_gap(steps, withdrawn):
    """What the sender gives up is skipped by the receiver, which must not remember around the gap for ever."""
    ends = Ends(retries=10_000)
    for number, (step, what) in enumerate(steps):
        if step in ("say", "refuse"):
            outgoing = ends.peers[what].send(word(number), (), ends.clock.now())
            if number in withdrawn:
                ends.peers[what].withdraw(outgoing.seq)
            else:
                ends.put(what, outgoing)
        elif step == "wait":
            ends.pass_time(what)
        elif ends.flying:
            ends.deliver(what % len(ends.flying))
    ends.settle()
    for me in (A, B):
        ends.say(me, "last")  # tells the other what it need not wait for
    ends.settle()
    assert all("last" in heard for heard in ends.heard.values())
    ends.assert_at_rest()


def test_a_hundred_thousand_messages_leave_nothing():
    ends = Ends()
    for number in range(100_000):
        ends.say(A, number)
        ends.deliver()
        if number % 1000 == 0:
            ends.settle()
    ends.settle()
    assert len(ends.heard[B]) == 100_000
    ends.assert_at_rest()


# --- acknowledging --------------------------------------------------------------------------------


def test_what_was_kept_is_let_go_when_it_has_arrived():
    class Kept:
        pass

    import weakref

    ends, kept = Ends(), Kept()
    gone = weakref.ref(kept)
    ends.say(A, "x", holds=kept)
    del kept
    assert gone() is not None
    ends.settle()
    assert gone() is None


def test_an_acknowledgement_rides_on_what_goes_the_other_way():
    ends = Ends()
    ends.say(A, "question")
    ends.deliver()
    ends.say(B, "answer")
    ends.deliver()
    assert ends.peers[A].outstanding == 0
    ends.settle()
    assert ends.peers[A].resent == ends.peers[B].resent == 0


def test_an_acknowledgement_goes_alone_after_a_moment():
    ends = Ends()
    ends.say(A, "x")
    ends.deliver()
    assert not ends.flying
    due = ends.peers[B].next_tick()
    assert ends.clock.now() < due < ends.clock.now() + 0.1
    ends.pass_time(due - ends.clock.now())
    ((to, frame),) = ends.flying
    envelope = decode_envelope(frame)
    assert to == A
    assert (envelope.seq, envelope.ack) == (0, 1)
    assert isinstance(envelope.message, Nothing)
    ends.deliver()
    ends.assert_at_rest()
    assert not ends.flying, "an acknowledgement is not acknowledged"


def test_many_bytes_are_acknowledged_at_once():
    ends = Ends()
    outgoing = ends.say(A, "x")
    ends.flying.clear()
    ends.peers[B].receive(decode_envelope(bytes(outgoing.frames[0])), 2 << 20, ends.clock.now())
    assert ends.peers[B].next_tick() <= ends.clock.now()


def test_a_duplicate_is_acknowledged_again():
    """Its sender cannot have heard of the first time."""
    ends = Ends()
    ends.say(A, "x")
    ends.deliver(keep=True)
    ends.pass_time(0.06)
    ends.flying.pop()  # the acknowledgement
    ends.deliver()
    assert ends.heard[B] == ["x"]
    ends.tick()
    ends.deliver()
    assert ends.peers[A].outstanding == 0


def test_what_a_message_gives_back_is_resent_with_it_and_counts_once():
    ends = Ends()
    peer = ends.peers[A]
    ends.put(A, peer.send(word("lost"), (), ends.clock.now(), None, [(1, 0), (2, 65536)]))
    ends.flying.clear()
    ends.say(A, "next")
    ends.deliver()
    ends.pass_time(1)  # a ping asks, and its answer lacks the first
    while ends.flying and decode_envelope(ends.flying[0][1]).back == []:
        ends.deliver()
    ends.deliver(keep=True)
    envelope = decode_envelope(ends.flying[0][1])
    assert envelope.back == [(1, 0), (2, 65536)]
    assert envelope.message.topic == "lost"
    assert not ends.peers[B].receive(envelope, 1, ends.clock.now())  # nobody acts on it a second time
    assert ends.heard[B] == ["next", "lost"]


def test_a_delete_rides_on_the_next_message_that_must_arrive():
    ends = Ends()
    peer = ends.peers[A]
    for number in (1, 2):
        peer.send_later(delete(number), ends.clock.now())
    assert peer.outstanding == 2
    ends.put(A, peer.send(Nothing(), (), ends.clock.now()))  # which may be lost, and so takes nothing along
    ends.say(A, "word")
    assert len(ends.flying) == 2
    ends.settle()
    assert ends.heard[B] == ["delete 1", "delete 2", "word"]
    ends.assert_at_rest()


def test_deletes_go_alone_after_a_moment():
    ends = Ends()
    peer, due = ends.peers[A], ends.clock.now() + 0.05
    for number in (1, 2, 3):
        assert peer.send_later(delete(number), ends.clock.now()) == due == peer.next_tick()
        ends.pass_time(0.01)
    assert not ends.flying
    ends.pass_time(0.03)
    assert len(ends.flying) == 1
    ends.settle()
    assert sorted(ends.heard[B]) == ["delete 1", "delete 2", "delete 3"]
    ends.assert_at_rest()


def test_a_delete_stays_when_the_message_that_took_it_along_is_refused_or_given_up():
    ends = Ends(retries=1)
    peer = ends.peers[A]
    peer.send_later(delete(1), ends.clock.now())
    peer.refused(peer.send(word("refused"), (), ends.clock.now()), ends.clock.now())
    assert peer.outstanding == 1
    outgoing = peer.send(word("given up"), (), ends.clock.now())
    while not ends.events:
        peer.failed(outgoing.seq, ends.clock.now())
        ends.clock.advance(max(peer.next_tick() - ends.clock.now(), 0.0))
        ends.tick(who=[A])
        ends.flying.clear()
    assert peer.outstanding == 1
    ends.events.clear()
    ends.settle()
    assert ends.heard[B] == ["delete 1"]
    ends.assert_at_rest()


def test_messages_nobody_waits_for_have_no_number():
    peer = Peer(A, B, PeerLimits(), 0.0, watch_silence=False)
    assert peer.send(Goodbye("x"), (), 0.0).seq == 0
    assert peer.outstanding == 0
    assert peer.send(word("x"), (), 0.0).seq == 1


def test_nothing_is_resent_on_suspicion():
    """Only the answer to a ping that went behind it shows that a message was lost."""
    ends = Ends()
    ends.say(A, "x")
    ends.flying.clear()
    ends.pass_time(0.6)
    ((_, frame),) = ends.flying
    assert isinstance(decode_envelope(frame).message, Ping)
    assert ends.peers[A].resent == 0
    ends.settle()
    assert ends.heard[B] == ["x"]
    assert ends.peers[A].resent == 1


def test_a_ping_that_went_before_a_message_says_nothing_about_it():
    ends = Ends()
    ends.put(A, ends.peers[A].ping(ends.clock.now()))
    ends.say(A, "x")
    ends.flying.pop()
    ends.deliver()  # the ping
    ends.deliver()  # its answer
    assert ends.peers[A].resent == 0
    ends.settle()
    assert ends.heard[B] == ["x"]


def test_a_peer_that_answers_is_asked_again_soon():
    """The wait between pings grows while a peer keeps silent, not while messages are lost."""
    ends = Ends()
    ends.say(A, "x")
    ends.flying.clear()
    for _ in range(6):
        ends.clock.advance(ends.peers[A].next_tick() - ends.clock.now())
        ends.tick(who=[A])
        ends.flying.clear()
    silent = ends.peers[A].next_tick() - ends.clock.now()
    ends.clock.advance(silent)
    ends.tick(who=[A])
    ends.deliver()  # the ping arrives
    ends.deliver()  # its answer, too
    assert ends.flying, "the message goes again"
    ends.flying.clear()  # and is lost again
    assert ends.peers[A].next_tick() - ends.clock.now() < silent / 4


# --- giving up ------------------------------------------------------------------------------------


def test_a_message_is_given_up_after_so_many_tries():
    ends = Ends(retries=3)
    ends.say(A, "x")
    ends.flying.clear()
    tries = 1
    for _ in range(200):
        ends.pass_time(0.5)
        while ends.flying:
            to, frame = ends.flying[0]
            if to == B and isinstance(decode_envelope(frame).message, Cast):
                tries += 1
                ends.flying.pop(0)  # whatever else arrives, this never does
            else:
                ends.deliver()
    assert ends.events == [(A, Undelivered(word("x")))]
    assert tries == 1 + 3
    assert not ends.heard[B]
    ends.say(A, "y")
    ends.settle()
    assert ends.heard[B] == ["y"]
    ends.assert_at_rest()


def test_a_message_that_the_channel_refuses_is_tried_again_and_given_up():
    clock, limits = ManualClock(), PeerLimits(retries=4)
    peer = Peer(A, B, limits, clock.now(), watch_silence=False)
    outgoing = peer.send(word("x"), (), clock.now())
    tries, given_up = 1, []
    while not given_up:
        peer.failed(outgoing.seq, clock.now())
        clock.advance(max(peer.next_tick() - clock.now(), 0.0))
        actions = peer.tick(clock.now())
        tries += Transmit(outgoing) in actions
        given_up = [action for action in actions if isinstance(action, Undelivered)]
        assert clock.now() < 1100
    assert given_up == [Undelivered(word("x"))]
    assert tries == 1 + 4
    assert peer.outstanding == 0


# --- silence --------------------------------------------------------------------------------------


def silence(ends):
    """What A notices, and when, if nothing reaches it any more."""
    start = ends.clock.now()
    while ends.peers[A].next_tick() != math.inf:
        ends.clock.advance(max(ends.peers[A].next_tick() - ends.clock.now(), 0.0))
        ends.tick(who=[A])
        assert ends.clock.now() - start < 100
        ends.flying.clear()
    return start


def test_a_silent_remote_peer_is_suspect_and_then_lost():
    ends = Ends(watch=True, suspect_after=5.0, lost_after=12.0)
    silence(ends)
    assert ends.events == [(A, Suspect(5.0)), (A, Lost(12.0))]
    assert ends.peers[A].standing is Standing.LOST


def test_a_suspect_that_speaks_is_live_and_may_become_suspect_again():
    ends = Ends(watch=True)
    for _ in range(2):
        ends.clock.advance(5.0)
        ends.tick(who=[A])
        ends.flying.clear()
        assert ends.peers[A].standing is Standing.SUSPECT
        ends.say(B, "here")
        ends.deliver()
        assert ends.peers[A].standing is Standing.LIVE
    assert [action for _, action in ends.events] == [Suspect(5.0), Suspect(5.0)]


@pytest.mark.parametrize("limits", [{}, {"suspect_after": 0.5, "lost_after": 0.9}], ids=["usual", "impatient"])
def test_a_peer_that_answers_pings_is_never_suspect(limits):
    ends = Ends(watch=True, **limits)
    for _ in range(600):
        ends.clock.advance(max(ends.next_tick - ends.clock.now(), 0.0))
        ends.tick()
        while ends.flying:
            ends.deliver()
    assert ends.clock.now() > (180 if limits else 1100)
    assert not ends.events


def test_a_local_peer_is_never_lost_by_its_silence():
    ends = Ends(watch=False)
    ends.say(A, "x")
    for _ in range(100):
        ends.pass_time(60.0)
        ends.flying.clear()
    assert ends.peers[A].standing is Standing.LIVE
    assert not ends.events
    assert ends.peers[A].outstanding == 1
    ends.settle()
    assert ends.heard[B] == ["x"]


def test_a_lost_peer_asks_for_nothing_more():
    ends = Ends()
    ends.say(A, "x")
    ends.peers[A].failed(1, ends.clock.now())
    ends.peers[A].lose()
    assert ends.peers[A].outstanding == 0
    assert ends.peers[A].next_tick() == math.inf
    assert ends.peers[A].tick(ends.clock.now() + 1000) == []


def test_whenever_a_tick_was_due_it_is_over():
    """A driver that sleeps until `next_tick` must not spin."""
    ends = Ends(watch=True, lost_after=30.0)
    ends.say(A, "x")
    ends.peers[A].failed(1, ends.clock.now())
    ends.say(A, "y")
    ends.say(B, "z")
    ends.deliver(1)
    for _ in range(60):
        due = ends.peers[A].next_tick()
        if due == math.inf:
            break
        ends.clock.advance(max(due - ends.clock.now(), 0.0))
        ends.tick(who=[A])
        ends.flying.clear()
        assert ends.peers[A].next_tick() > ends.clock.now()
    assert ends.peers[A].standing is Standing.LOST


def test_ctrl_c_while_a_message_is_written_leaves_no_number_without_a_message(monkeypatch):
    """The clock of the peer raised at such a number, and its agent read nothing more."""
    ends = Ends()
    ends.peers[A].send_later(delete(1), ends.clock.now())
    with monkeypatch.context() as interrupted:
        interrupted.setattr("nbdist.wire.peer.encode_envelope", Interrupt())
        with pytest.raises(KeyboardInterrupt):
            ends.say(A, "lost")
    assert ends.peers[A].outstanding == 1  # the delete waits as before
    ends.say(A, "said")
    ends.clock.advance(10)
    ends.peers[A].tick(ends.clock.now())
    ends.deliver()
    assert ends.heard[B] == ["delete 1", "said"]
    assert ends.peers[B].receive(decode_envelope(ends.say(A, "more").frames[0]), 1, ends.clock.now())
    assert ends.peers[A].next_seq == 3


class Interrupt:
    """A function that Ctrl-C cuts short."""

    def __call__(self, *_):
        raise KeyboardInterrupt
