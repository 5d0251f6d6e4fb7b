"""What the directory of a swarm promises to its clients, near and far, held against it over each kind of channel."""

import contextlib
import itertools
import threading

import pytest
from helpers.models import swarm_models
from helpers.waiting import wait_until

from nbdist.rpc import api
from nbdist.swarm import connect, serve
from nbdist.swarm.directory.directory import Directory, Term
from nbdist.swarm.directory.entry import ServerEntry
from nbdist.swarm.server.neighbours import Address
from nbdist.testing import Faults, World


def inprocess():
    return World(4)


def local():
    return World(4, channel="local")


def faulty():
    return World(4, faults=Faults(drop={"*": 0.1}, duplicate={"*": 0.3}, reorder={"*": 0.5}, seed=7))


def entry(worker, number=1):
    """A server that nobody calls."""
    return ServerEntry(worker, number, Address(worker, f"server {number}"))


def new_directory():
    return Directory(Address("worker0", "swarm 1.1"), Term(1, 1))


def online(*blocks):
    return lambda now: now._replace(state="online", blocks=blocks)


def rested(*why):
    return lambda now: now.rested(*why)


class Place:
    """A swarm without workers: its directory, and its clients on three agents, of which the first has the directory."""

    def __init__(self, world, clients):
        self.world = world
        self.clients = clients
        self.placer = clients[0].crew.placing
        self.directory = self.placer._directory
        self.address = clients[0].address()

    def known(self, number):
        return [member.entry for member in self.clients[number].crew.members]

    def agree(self):
        """All clients come to know what the directory has."""
        for number in range(len(self.clients)):
            wait_until(lambda number=number: self.known(number) == self.directory.all())


@pytest.fixture(params=[inprocess, local, faulty])
def place(request):
    with request.param() as world, contextlib.ExitStack() as ending:
        with world[0].activate():
            clients = [serve(swarm_models.make("llama"), workers=[], spans=[])]
            address = clients[0].address()
        for number in (1, 2):
            with world[number].activate():
                clients.append(connect(address))
        for each in reversed(clients):
            ending.callback(each.close)
        with world[0].activate():
            yield Place(world, clients)


def test_all_clients_see_a_server_from_its_coming_to_its_end(place):
    place.directory.add(entry("worker3"))
    place.agree()
    assert all(swarm.states == {"worker3": "joining"} for swarm in place.clients)
    place.directory.change(entry("worker3"), online(1, 2))
    place.agree()
    assert all(swarm.blocks == {"worker3": [1, 2]} for swarm in place.clients)
    place.directory.change(entry("worker3"), rested("offline"))
    place.agree()
    assert all((swarm.states, swarm.blocks) == ({"worker3": "offline"}, {}) for swarm in place.clients)


def test_who_comes_later_knows_all(place):
    place.directory.add(entry("worker3"))
    place.directory.change(entry("worker3"), online(4))
    with place.world[3].activate():
        other = connect(place.address)
    assert other.blocks == {"worker3": [4]}
    place.directory.change(entry("worker3"), online(4, 5))
    wait_until(lambda: other.blocks, equals={"worker3": [4, 5]})
    other.close()


def test_no_client_goes_back_to_older_news(place):
    place.directory.add(entry("worker3"))
    place.agree()
    seen = [[] for _ in place.clients]
    for swarm, each in zip(place.clients, seen, strict=True):
        swarm.listen(lambda swarm=swarm, each=each: each.append(swarm.crew.member("worker3").entry.note))
    for number in range(10, 50):
        place.directory.change(entry("worker3"), lambda now, number=number: now._replace(note=str(number)))
    place.agree()
    for each in seen:
        assert each == sorted(each)
        assert each[-1] == "49"


def test_what_changes_nothing_is_no_news(place):
    place.directory.add(entry("worker3"))
    news = place.directory.news()
    assert news.entries == [entry("worker3")]
    assert place.directory.change(entry("worker3"), lambda now: now) == entry("worker3")
    assert place.directory.change(entry("worker2"), online(1)) is None  # it never came
    assert place.directory.news() == news


def test_a_newer_server_takes_the_place_and_keeps_what_the_older_had(place):
    place.directory.add(entry("worker3"))
    place.directory.add(entry("worker1"))
    place.directory.change(entry("worker3"), online(3))
    place.agree()
    for swarm in place.clients:
        swarm.crew.member("worker3").cache = 7
    place.directory.add(entry("worker3", 2))
    place.agree()
    assert [(each.name, each.incarnation, each.had) for each in place.directory.all()] == [
        ("worker1", 1, ()),
        ("worker3", 2, (3,)),
    ]
    assert [swarm.crew.member("worker3").cache for swarm in place.clients] == [0, 0, 0]  # those of the older
    assert place.directory.change(entry("worker3", 1), rested("gone")) is None  # the older one's death
    assert place.directory.find("worker3").state == "joining"
    assert place.directory.change(entry("worker3", 2), rested("gone", "killed")).had == (3,)
    place.agree()
    assert all(swarm.states == {"worker1": "joining", "worker3": "gone"} for swarm in place.clients)


@pytest.mark.parametrize("teller", [0, 1, 2])
def test_what_one_client_finds_missing_all_know(place, teller):
    place.directory.add(entry("worker3"))
    place.directory.change(entry("worker3"), online(1, 2, 3))
    place.agree()
    with place.world[teller].activate():
        place.clients[teller].crew.placing.lacks(entry("worker3"), [2])
    place.agree()
    assert all(swarm.blocks == {"worker3": [1, 3]} for swarm in place.clients)


def test_many_change_at_once_and_nothing_is_lost(place):
    for number in range(3):
        place.directory.add(entry(f"worker{number}"))
        place.directory.change(entry(f"worker{number}"), online(*range(6)))

    def lose(number):
        with place.world[number].activate():
            for block in range(4):
                place.clients[number].crew.placing.lacks(entry(f"worker{number}"), [block])

    threads = [threading.Thread(target=lose, args=(number,)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    place.agree()
    assert all(swarm.blocks == {f"worker{n}": [4, 5] for n in range(3)} for swarm in place.clients)


class Listener:
    """A client's agent calls it with news; at first it fails."""

    def __init__(self, name):
        self.heard = []
        api.current_agent().named.publish(name, self, "take")

    def take(self, news):
        self.heard.append(news.changes)
        if len(self.heard) < 3:
            raise ValueError("it cannot hear")


def test_a_watcher_that_fails_keeps_nothing_from_others_and_hears_what_follows(place, caplog):
    def near(news):
        heard.append(news.changes)
        raise ValueError("it cannot hear")

    heard = []
    place.directory.watch(near)
    with place.world[1].activate():
        far = Listener("far")
        place.clients[1].crew.placing.watch(Address("worker1", "far"))
    with place.world[2].activate():
        late = connect(place.address)  # it watches after them
    for number in range(5):
        place.directory.add(entry("worker3", number))
    place.agree()
    wait_until(lambda: [member.incarnation for member in late.crew.members], equals=[4])
    newest = place.directory.news().changes
    assert heard == list(range(heard[0], newest + 1))
    assert "it cannot hear" in caplog.text
    wait_until(lambda: newest in far.heard)
    late.close()


def test_who_is_gone_hears_no_more_and_others_do(place):
    watchers = len(place.directory._watchers)
    place.world.kill(2)
    for number in range(2):  # the first finds out
        place.directory.add(entry("worker3", number))
        wait_until(lambda number=number: place.known(1) == [entry("worker3", number)])
    newer = (entry("worker3", number) for number in itertools.count(2))
    wait_until(lambda: place.directory.add(next(newer)) or len(place.directory._watchers), equals=watchers - 1)


def test_who_closes_his_swarm_has_nothing_and_hears_no_more(place):
    with place.world[1].activate():
        place.clients[1].crew.note_usage(place.clients[1].crew.incarnation, {"sessions": 1})
    wait_until(lambda: len(place.directory.news().usage), equals=1)
    watchers = len(place.directory._watchers)
    with place.world[1].activate():
        place.clients[1].close()
    wait_until(lambda: len(place.directory.news().usage), equals=0)
    newer = (entry("worker3", number) for number in itertools.count(2))
    wait_until(lambda: place.directory.add(next(newer)) or len(place.directory._watchers), equals=watchers - 1)


# -- without clients ------------------------------------------------------------------------------


def test_a_watcher_hears_all_in_order_until_it_returns_false():
    directory, heard = new_directory(), []
    directory.watch(lambda news: heard.append(news) or len(heard) < 4)
    directory.add(entry("worker0"))
    directory.change(entry("worker0"), online(1, 2))
    assert heard[-1] == directory.news()
    for number in range(4):
        directory.add(entry(f"worker{number}"))
    assert [news.changes for news in heard] == [1, 2, 3, 4]
    assert [len(news.entries) for news in heard] == [0, 1, 1, 1]


def test_a_change_while_a_watcher_comes_is_heard():
    directory, heard = new_directory(), []

    def watcher(news):
        heard.append(news.changes)
        if news.changes == 1:
            directory.add(entry("worker0"))  # as another thread may

    directory.watch(watcher)
    assert 2 in heard
