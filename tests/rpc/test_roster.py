"""The list of members in a store: many joiners at once, twins, the dead, and stores that fail."""

import base64
import itertools
import os
import random
import subprocess
import threading
import time

import msgspec
import pytest

from nbdist import NotUnique, RendezvousError, SecurityError, VersionMismatch
from nbdist.channel.process_watch import started_at
from nbdist.channel.secret import Secret
from nbdist.rpc.futures import Future
from nbdist.rpc.world.roster import Roster
from nbdist.wire.messages import VERSION, Record

SOON = 20.0
SECRET = Secret(b"the secret of the tests", shared_off_host=True)
HERE = "this host"
KEY = "nbdist/roster"
incarnations = itertools.count(100)


class Store:
    """Compare-and-set in memory; it remembers how often that failed, and can fail itself."""

    def __init__(self):
        self.values = {}
        self.lost_races = 0
        self.calls = 0
        self.broken = 0
        self._lock = threading.Lock()
        self._random = random.Random(0)

    def compare_set(self, key, expected, desired):
        with self._lock:
            self.calls += 1
            if self.broken:
                self.broken -= 1
                raise ConnectionError("the store's server has gone")
            current = self.values.get(key, "")
            if current == expected:
                self.values[key] = current = desired
            elif desired:
                self.lost_races += 1
        return current.encode()


def roster(store, secret=SECRET, host=HERE):
    return Roster(lambda: store, secret, host)


def record(id, *, size=None, name=None, host=HERE, pid=None, started=None, version=VERSION):
    pid = pid or os.getpid()
    started = started_at(pid) if started is None else started
    name = name or f"worker{id}"
    return Record(name, id, next(incarnations), [f"x://{id}"], host, pid, started, size, version)


def deadline():
    return time.monotonic() + SOON


def at_once(actions):
    """Run all in threads; their outcomes: values or errors."""
    outcomes = [Future() for _ in actions]
    start = threading.Barrier(len(actions))

    def run(action, outcome):
        start.wait(SOON)
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(actions, outcomes, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert all(outcome.done() for outcome in outcomes)
    return [outcome.exception() or outcome.value() for outcome in outcomes]


def document(store):
    text = store.values[KEY]
    return msgspec.msgpack.decode(base64.b64decode(text)) if text else {}


# --- fixed worlds ---------------------------------------------------------------------------------


def test_many_joiners_at_once_see_the_same_world():
    store, records = Store(), [record(id, size=24) for id in range(24)]
    random.Random(1).shuffle(records)
    worlds = at_once([lambda me=me: roster(store).form(me, deadline()) for me in records])
    expected = sorted(records, key=lambda me: me.id)
    assert all(world == expected for world in worlds), worlds
    assert [len(part) for part in document(store).values()] == [0, 24, 0, 0]


def test_a_world_that_has_ended_makes_room_for_the_next():
    store = Store()
    for _ in range(3):
        records = [record(id, size=3) for id in range(3)]
        worlds = at_once([lambda me=me: roster(store).form(me, deadline()) for me in records])
        assert worlds == [records] * 3
        at_once([lambda me=me: roster(store).leave(me) for me in records])
        assert not any(document(store).values())


def test_a_world_of_one_needs_nobody():
    me = record(0, size=1)
    assert roster(Store()).form(me, deadline()) == [me]


def test_missing_ranks_are_named_and_nothing_stays_behind():
    store = Store()
    put(store, "gathering", record(2, size=4))
    with pytest.raises(RendezvousError, match=r"no sign of rank 1, 3; there were worker0 \(rank 0\), worker2"):
        roster(store).form(record(0, size=4), time.monotonic())
    put(store, "gathering")
    with pytest.raises(RendezvousError):
        roster(store).form(record(0, size=4), time.monotonic())
    assert not any(document(store).values())


def test_the_next_try_works_at_once():
    store = Store()
    with pytest.raises(RendezvousError):
        roster(store).form(record(0, size=2), time.monotonic())
    records = [record(id, size=2) for id in range(2)]
    assert at_once([lambda me=me: roster(store).form(me, deadline()) for me in records]) == [records] * 2


def test_a_name_that_two_have_taken_is_an_error_for_all():
    store, records = Store(), [record(id, size=3, name="twin" if id else "worker0") for id in range(3)]
    outcomes = at_once([lambda me=me: roster(store).form(me, deadline()) for me in records])
    for outcome in outcomes:
        assert isinstance(outcome, NotUnique), outcome
        assert "'twin'" in str(outcome)
        assert "ranks" in str(outcome)


def test_a_member_that_leaves_at_once_hides_no_twin_from_the_others():
    """One sees that the names clash and goes; who has not looked yet must still see it."""
    store, records = Store(), [record(id, size=3, name="twin" if id else "worker0") for id in range(3)]
    rosters = [roster(store) for _ in records]

    def join(index):
        try:
            rosters[index].form(records[index], deadline())
        finally:
            rosters[index].leave(records[index])

    outcomes = at_once([lambda index=index: join(index) for index in range(3)])
    assert [type(outcome) for outcome in outcomes] == [NotUnique] * 3


def test_a_rank_that_another_process_has_is_not_unique():
    store = Store()
    other = subprocess.Popen(["sleep", "60"])
    try:
        first = record(0, size=2, pid=other.pid)
        put(store, "gathering", first)
        with pytest.raises(NotUnique, match="rank 0 is not unique: 'worker0' has it, and 'other' wants it"):
            roster(store).form(record(0, size=2, name="other"), deadline())
    finally:
        other.kill()
        other.wait()


def put(store, part, *records):
    """Have the store list these already, in the form in which members write it."""
    encode = msgspec.msgpack.encode
    signed = [SECRET.sign(encode((one.version, encode(one)))) for one in records]
    store.values[KEY] = base64.b64encode(encode({part: signed})).decode()


def test_two_sizes_of_one_world_are_an_error():
    store = Store()
    put(store, "gathering", record(1, size=5))
    with pytest.raises(RendezvousError, match="worker1 expects a world of 5, worker0 one of 3"):
        roster(store).form(record(0, size=3), deadline())


def dead(id, **options):
    """The record of a process that has ended."""
    process = subprocess.Popen(["sleep", "60"])
    one = record(id, pid=process.pid, **options)
    process.kill()
    process.wait()
    return one


def test_the_dead_are_not_waited_for():
    store = Store()
    put(store, "gathering", dead(0, size=2), dead(1, size=7))
    records = [record(id, size=2) for id in range(2)]
    assert at_once([lambda me=me: roster(store).form(me, deadline()) for me in records]) == [records] * 2


def test_a_reused_pid_is_not_taken_for_the_dead():
    store = Store()
    put(store, "gathering", record(0, size=2, started=1))  # our pid, but somebody else's life
    records = [record(id, size=2) for id in range(2)]
    assert at_once([lambda me=me: roster(store).form(me, deadline()) for me in records]) == [records] * 2


def test_who_is_on_another_host_is_taken_to_live():
    store, far = Store(), record(0, size=2, host="elsewhere", pid=1, started=1)
    put(store, "gathering", far)
    me = record(1, size=2)
    assert roster(store).form(me, deadline()) == [far, me]


# --- dynamic worlds -------------------------------------------------------------------------------


def test_of_many_who_join_at_once_each_pair_meets():
    store, records = Store(), [record(id) for id in range(16)]
    present = at_once([lambda me=me: roster(store).join(me, deadline()) for me in records])
    for one, another in itertools.combinations(range(16), 2):
        meets = (records[one] in present[another]) + (records[another] in present[one])
        assert meets == 1, "exactly one of two finds the other there, and knocks"


@pytest.mark.parametrize(("id", "name"), [(1, "worker0"), (0, "other")])
def test_a_living_members_name_and_id_are_taken(id, name):
    store = Store()
    roster(store).join(record(0), deadline())
    with pytest.raises(NotUnique, match="'worker0'"):
        roster(store).join(record(id, name=name), deadline())
    assert len(document(store)["dynamic"]) == 1


def test_of_many_who_want_one_name_one_gets_it():
    store = Store()
    outcomes = at_once([lambda: roster(store).join(record(0), deadline()) for _ in range(8)])
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NotUnique"] * 7 + ["list"]


def test_a_name_can_be_taken_again():
    store = Store()
    put(store, "dynamic", dead(0))
    first = record(0)
    assert roster(store).join(first, deadline()) == []
    roster(store).leave(first)
    assert roster(store).join(record(0), deadline()) == []


def test_who_leaves_is_struck_off_whatever_the_others_do():
    store, records = Store(), [record(id) for id in range(16)]
    for me in records:
        roster(store).join(me, deadline())
    at_once([lambda me=me: roster(store).leave(me) for me in records[:-1]])
    assert roster(store).join(record(20), deadline()) == records[-1:]


def test_fixed_and_dynamic_members_do_not_mix():
    mixed = "mixes statically and dynamically"
    store = Store()
    roster(store).join(record(0), deadline())
    with pytest.raises(RendezvousError, match=mixed):
        roster(store).form(record(1, size=2), deadline())
    for part in ("gathering", "formed"):
        store = Store()
        put(store, part, record(0, size=2))
        with pytest.raises(RendezvousError, match=mixed):
            roster(store).join(record(1), deadline())


def test_dead_dynamic_members_are_in_nobodys_way():
    store = Store()
    put(store, "dynamic", dead(0))
    me = record(0, size=1)
    assert roster(store).form(me, deadline()) == [me]


# --- what is in a store ---------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["gathering", "dynamic"])
def test_another_secret_is_refused(part):
    store = Store()
    put(store, part, record(0))
    stranger = roster(store, Secret(b"x" * 16, shared_off_host=True))
    for join in (stranger.form, stranger.join):
        with pytest.raises(SecurityError):
            join(record(1, size=2), deadline())


@pytest.mark.parametrize(
    "text", ["garbage", "!!!", base64.b64encode(b"\xc1").decode(), base64.b64encode(b"\x93").decode()]
)
def test_garbage_is_not_taken_for_a_roster(text):
    store = Store()
    store.values[KEY] = text
    with pytest.raises(RendezvousError, match="is not a list of members"):
        roster(store).join(record(0), deadline())


def test_nothing_in_a_store_is_unpickled():
    import pickle

    class Bomb:
        def __reduce__(self):
            return os._exit, (1,)

    for text in (base64.b64encode(pickle.dumps(Bomb())).decode(), pickle.dumps(Bomb(), 0).decode()):
        store = Store()
        store.values[KEY] = text
        with pytest.raises(RendezvousError):
            roster(store).join(record(0), deadline())


def test_another_version_is_named_before_anything_else_is_read():
    store = Store()
    put(store, "dynamic", record(0, version=VERSION + 1))
    with pytest.raises(VersionMismatch, match=str(VERSION + 1)):
        roster(store).join(record(1), deadline())


def test_a_store_that_fails_for_a_while_is_asked_again():
    """Its server may be going, with the world that ends; the next one's is about to come."""
    first, second = Store(), Store()
    first.broken = 10**9
    stores = iter([first, first, second])
    mine = Roster(lambda: next(stores), SECRET, HERE)
    me = record(0, size=1)
    assert mine.form(me, deadline()) == [me]


def test_a_store_that_is_gone_is_an_error_and_not_a_hang():
    store = Store()
    mine = roster(store)
    store.broken = 10**9
    with pytest.raises(RendezvousError, match="cannot be reached"):
        mine.form(record(0, size=1), time.monotonic())
    mine.leave(record(0))  # and leaving it is no error


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("kind", ["form", "join"])
@pytest.mark.parametrize("call", range(4))
def test_a_store_that_fails_once_at_any_moment_is_asked_again(call, kind, applied):
    """Whether or not what it was asked to write has been written."""
    store = Store()
    calls, compare_set = itertools.count(), store.compare_set

    def failing(*arguments):
        if next(calls) != call:
            return compare_set(*arguments)
        if applied:
            compare_set(*arguments)
        raise ConnectionError("the store's server has gone")

    store.compare_set = failing
    me = record(0, size=1 if kind == "form" else None)
    assert getattr(roster(store), kind)(me, deadline()) == ([me] if kind == "form" else [])
    assert len(document(store)["formed" if kind == "form" else "dynamic"]) == 1
