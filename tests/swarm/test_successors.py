"""The swarm outlives the process that has served it, as long as others use it: a server's process takes its place."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from helpers.models import swarm_models
from helpers.processes import swarm_clients, workers
from helpers.suite.python_path import TESTS, python_path
from helpers.waiting import wait_until

from nbdist import rpc
from nbdist.errors import NbdistError, UsageError, WorkerLost
from nbdist.rpc import api
from nbdist.swarm import connect, model_cache, placer, serve
from nbdist.swarm.client.crew import Gone
from nbdist.swarm.directory.directory import Directory, Term
from nbdist.swarm.directory.entry import ServerEntry
from nbdist.swarm.directory.placing import PlacerReplaced
from nbdist.swarm.directory.succession import settled, successors
from nbdist.swarm.server.neighbours import Address
from nbdist.swarm.server.server import Server
from nbdist.testing import World

# -- the choice, and what it begins with ----------------------------------------------------------


def entry(number, state="online", blocks=()):
    name = f"worker{number}"
    return ServerEntry(name, number, Address(name, f"server 1.{number}"), state, blocks=tuple(blocks))


def names(entries):
    return [each.name for each in entries]


def test_the_first_that_lives_and_can_read_the_weights_follows():
    entries = [entry(0, "draining"), entry(1), entry(2), entry(3), entry(4, "joining"), entry(5, "gone"), entry(6)]
    hosts = {0: "one", 1: "two", 2: "one", 4: "one", 5: "one", 6: "one"}  # worker3 is lost
    assert names(successors(entries, hosts, "one")) == ["worker2", "worker6", "worker1", "worker0"]
    assert names(successors(entries, hosts, "nowhere")) == ["worker1", "worker2", "worker6", "worker0"]
    assert successors(entries, {}, "one") == []


def test_a_successor_begins_with_what_is_loaded():
    entries = [
        entry(0, blocks=[0, 1, 2]),
        entry(1, "draining", [2, 3]),
        entry(2, "joining"),
        entry(3, "gone"),
        entry(4, blocks=[5]),
    ]
    # worker1 has loaded blocks 0 and 4 that nobody has heard of, worker0 has lost block 2; worker4 does not answer.
    loaded = {entries[0].address: [0, 1], entries[1].address: [0, 2, 3, 4]}
    found = settled(entries, loaded)
    assert [each.state for each in found] == ["online", "online", "gone", "gone", "online"]
    assert [each.blocks for each in found] == [(0, 1), (2, 3, 4), (), (), (5,)]


def test_news_of_a_later_term_are_newer_whatever_has_changed_before():
    first, second = (Directory(Address("worker0", "swarm"), Term(number, 7)) for number in (1, 2))
    for _ in range(5):
        first.add(entry(1))
    assert second.news().is_newer(first.news())
    assert not first.news().is_newer(first.news())
    assert Term(2, 1) < Term(2, 2) < Term(3, 1)


# -- in one process -------------------------------------------------------------------------------


@pytest.fixture
def world():
    with World(4) as world, world[0].activate():
        yield world


def deputies(world, swarm):
    agents = {agent.me.name: agent for agent in world}
    return [agents[each.name].named.find(each.address.deputy.name) for each in swarm.crew.members]


def loaded(world, swarm):
    return {each._address.worker: each.server.info().blocks for each in deputies(world, swarm)}


@pytest.mark.parametrize("larger_first", [True, False])
def test_of_two_successors_the_servers_obey_one(world, larger_first):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2])
    old = swarm.crew.placing
    news, facts = old.news(), old.facts()
    by_term = sorted((1, 2), key=lambda number: world[number].me.incarnation, reverse=larger_first)
    made = []
    for number in by_term:
        with world[number].activate(), contextlib.suppress(PlacerReplaced):
            made.append(placer.succeed(facts, news, Term(2, world[number].me.incarnation)))
    assert len(made) == (1 if larger_first else 2)
    kept = made[-1].placing
    wait_until(lambda: swarm.crew.placing.address == kept.address)
    for refused in [old, *(each.placing for each in made[:-1] if each.placing is not kept)]:
        if isinstance(refused, placer.Placer):
            with pytest.raises(PlacerReplaced, match="call again"):
                refused._answer(kept.crew.member("worker1"), "unload", [])
    swarm.move(0, 1, "worker2")
    wait_until(lambda: loaded(world, swarm) == {"worker1": [1, 2], "worker2": [0, 3, 4, 5]})
    kept.close()


def test_a_load_of_a_placer_that_is_replaced_meanwhile_leaves_nothing(world, monkeypatch):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2])
    old, load, made = swarm.crew.placing, Server.load, []

    def late(server, begin, end):
        with world[2].activate():
            made.append(placer.succeed(old.facts(), old.news(), Term(2, world[2].me.incarnation)))
        return load(server, begin, end)

    monkeypatch.setattr(Server, "load", late)
    with pytest.raises(PlacerReplaced):
        old.shift(3, 5, "worker1")
    assert loaded(world, swarm) == {"worker1": [0, 1, 2], "worker2": [3, 4, 5]}
    made.pop().placing.close()


def test_a_member_of_another_host_that_was_lost_and_awakes_reaches_nobody():
    model = swarm_models.make("llama")
    with World(4, apart=True) as world:
        with world[0].activate():
            swarm = serve(model, workers=[1, 2])
            address, folder = swarm.address(), swarm.checkpoint.folder
        with swarm_clients.another(world, address) as other:
            for agent in world.agents[1:]:
                agent.lose(world[0].me.incarnation, "has been silent for 12 s")
            wait_until(lambda: other.crew.placing.address.worker in ("worker1", "worker2"))
            with world[0].activate(), pytest.raises((Gone, UsageError), match="worker1"):
                swarm.move(0, 6, "worker1")
            # Those whom it has not called have told it. RPC never takes a lost member back.
            wait_until(lambda: names(world[0].members()) == ["worker0"])
            wait_until(lambda: set(swarm.states.values()) == {"gone"})
            other.move(0, 1, "worker2")
            assert other.blocks == {"worker1": [1, 2], "worker2": [0, 3, 4, 5]}
            with world[0].activate():
                swarm.close()
            assert folder.exists()
            assert torch.equal(
                swarm_models.generate(other.causal_lm(), "greedy"), swarm_models.generate(model, "greedy")
            )
        wait_until(lambda: not folder.exists())
        # Errors of lost members refer to the frames of their calls until garbage is collected.
        wait_until(lambda: gc.collect() >= 0 and not swarm_models.servers_here())


def test_a_server_that_joins_a_placer_which_is_replaced_is_closed(world, monkeypatch):
    swarm = serve(swarm_models.make("llama"), workers=[1])
    old, load, made = swarm.crew.placing, Server.load, []

    def late(server, begin, end):
        if not made:
            with world[1].activate():
                made.append(placer.succeed(old.facts(), old.news(), Term(2, world[1].me.incarnation)))
        return load(server, begin, end)

    monkeypatch.setattr(Server, "load", late)
    with pytest.raises(NbdistError):
        old.join("worker2", 0, 1)
    (joined,) = [each for each in swarm.crew.members if each.name == "worker2"]
    wait_until(lambda: world[2].named.find(joined.address.deputy.name) is None)
    swarm.join("worker2", 0, 1)
    assert swarm.blocks == {"worker1": [0, 1, 2, 3, 4, 5], "worker2": [0]}
    made.pop().placing.close()


def test_neither_placer_nor_server_is_left(world):
    swarm = serve(swarm_models.make("llama"), workers=[1])
    with swarm_clients.another(world, swarm.address()) as other:
        world.kill(1)
        world.kill(0)
        with pytest.raises(WorkerLost, match="no server is known that goes on without it"):
            other.join("worker2")


# -- real processes -------------------------------------------------------------------------------


class Processes:
    """Members of one world, which may come and go. This process is ``client``."""

    def __init__(self, store):
        self._store = store
        self._started = 0
        self.all = workers.Workers()

    def start(self, name):
        """A process that runs what it is asked, until its standard input ends or it is killed."""
        self._started += 1
        then = "import sys; from helpers.processes import swarm_clients; sys.stdin.read(1)"
        code = workers.member(name, self._started, None, self._store, then=then).replace("rpc.shutdown()", "")
        process = self.all.processes[name] = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **python_path(TESTS), "OMP_NUM_THREADS": "1"},
            text=True,
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
        )
        return process

    def serve(self, name, on):
        """Let a new process serve; the process, the swarm as this process uses it, and the folder of its weights."""
        process = self.start(name)
        self.wait_for(name)
        address, folder = rpc.rpc_sync(name, swarm_clients.serve_here, (on,), timeout=120)
        return process, connect(address), Path(folder)

    def wait_for(self, *members):
        wait_until(lambda: {each.name for each in api.current_agent().members()}.issuperset(members))


@pytest.fixture(scope="module")
def processes():
    store = tempfile.mktemp(prefix="nbdist-test-")
    found = Processes(store)
    options = rpc.RpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc("client", rank=100, rpc_backend_options=options)
    try:
        found.start("worker1"), found.start("worker2")
        found.wait_for("worker1", "worker2")
        yield found
    finally:
        rpc.shutdown(graceful=False)
        found.all.end()
        Path(f"{store}.rpc").unlink(missing_ok=True)


MODEL = swarm_models.make("llama")


def begin_to_write(swarm):
    """Read the beginning of a text; return a function that writes its next token, and compares it with one process."""
    remote, cache = swarm.causal_lm(), model_cache.new_cache(swarm.checkpoint.config)
    own, last = model_cache.new_cache(MODEL.config), [swarm_models.one()["input_ids"]]

    def go_on():
        with torch.no_grad():
            theirs = remote(last[0], past_key_values=cache).logits[:, -1:]
            assert torch.equal(theirs, MODEL(last[0], past_key_values=own).logits[:, -1:])
        last[0] = theirs.argmax(-1)

    go_on()
    return go_on


def held():
    """The blocks in the memory of each worker."""
    found = {each: rpc.rpc_sync(each, swarm_clients.servers) for each in ("worker1", "worker2")}
    return {worker: blocks for worker, each in found.items() for blocks in each.values()}


def wait_for_the_end(folder):
    wait_until(lambda: not held())
    wait_until(lambda: not folder.exists())


def third(address):
    code = (
        "import sys; from helpers.models import swarm_models; from nbdist.swarm import connect\n"
        "swarm = connect(sys.argv[1]); print(swarm_models.generate(swarm.causal_lm(), 'greedy').tolist())\n"
        "swarm.close()"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, address],
        env={**os.environ, **python_path(TESTS)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


@pytest.mark.timeout(240)
def test_a_text_goes_on_when_who_serves_is_killed(processes):
    serving, swarm, folder = processes.serve("one", ["worker1", "worker2"])
    before, go_on = swarm.address(), begin_to_write(swarm)
    go_on()
    writing = threading.Thread(target=lambda: [go_on() for _ in range(20)])
    writing.start()
    serving.kill()
    writing.join()
    go_on()
    wait_until(lambda: swarm.address() != before)
    swarm.move(0, 2, "worker2")
    go_on()
    swarm.leave("worker1")
    go_on()
    swarm.join("worker1", 0, 3)
    assert swarm.blocks == {"worker2": list(range(6)), "worker1": [0, 1, 2]}
    assert third(swarm.address()) == str(swarm_models.generate(MODEL, "greedy").tolist())
    processes.start("worker3")
    processes.wait_for("worker3")
    swarm.join("worker3")
    swarm.move(0, 6, "worker3")
    go_on()
    processes.all.kill("worker3")
    go_on()
    assert swarm.states["worker3"] == "gone"
    assert folder.exists()
    swarm.close()
    wait_for_the_end(folder)


@pytest.mark.timeout(240)
def test_one_successor_after_the_other(processes):
    processes.start("worker3")
    processes.wait_for("worker3")
    serving, swarm, folder = processes.serve("two", ["worker3", "worker1", "worker2"])
    go_on = begin_to_write(swarm)
    serving.kill()
    wait_until(lambda: swarm.address().split("#")[1] == "worker3")
    processes.all.kill("worker3")  # it had blocks, too, which the next placer gives to others before anybody asks
    wait_until(lambda: sorted(number for blocks in swarm.blocks.values() for number in blocks) == list(range(6)))
    go_on()
    assert swarm.address().split("#")[1] == "worker1"
    swarm.close()
    wait_for_the_end(folder)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("who", ["the placer's process", "another"])
def test_a_move_in_the_middle_of_which_the_placer_is_killed(processes, who):
    _, swarm, folder = processes.serve(f"moving-{who[0]}", ["worker1", "worker2"])
    go_on = begin_to_write(swarm)
    serving = swarm.address().split("#")[1]
    assert held() == {"worker1": [0, 1, 2], "worker2": [3, 4, 5]}
    if who == "another":  # the blocks are given to worker2, and worker1 has not freed them
        rpc.rpc_sync(serving, swarm_clients.die_at, ("unload",))
        swarm.move(0, 2, "worker2")
        expected = {"worker1": [2], "worker2": [0, 1, 3, 4, 5]}
    else:  # nobody hears that worker2 has loaded them
        with pytest.raises(WorkerLost):
            rpc.rpc_sync(serving, swarm_clients.move_and_die, (0, 2, "worker2"))
        wait_until(lambda: swarm.address().split("#")[1] != serving)
        expected = {"worker1": [0, 1, 2], "worker2": [3, 4, 5]}
    wait_until(lambda: held() == expected)
    go_on()
    assert swarm.blocks == held() == expected
    swarm.close()
    wait_for_the_end(folder)


@pytest.mark.timeout(240)
def test_who_was_frozen_and_awakes_gives_no_orders(processes):
    serving, swarm, folder = processes.serve("frozen", ["worker1", "worker2"])
    go_on = begin_to_write(swarm)
    workers.stop(serving.pid)
    try:
        go_on()  # nobody needs it
        swarm.move(0, 2, "worker2")  # a process of this host is not lost by its silence: a server finds it frozen
        go_on()
        assert swarm.address().split("#")[1] == "worker1"
    finally:
        os.kill(serving.pid, signal.SIGCONT)
    found, blocks = rpc.rpc_sync("frozen", swarm_clients.give_old_orders, ("worker1",))
    assert found == ["PlacerReplaced"] * 4
    expected = {"worker1": [2], "worker2": [0, 1, 3, 4, 5]}
    assert blocks == swarm.blocks == held() == expected
    rpc.rpc_sync("frozen", swarm_clients.move, (1, 2, "worker1"))  # its swarm asks the successor
    assert swarm.blocks == held() == {"worker1": [1, 2], "worker2": [0, 3, 4, 5]}
    go_on()
    serving.communicate("", timeout=60)  # it exits, and is a client like any other
    go_on()
    swarm.close()
    wait_for_the_end(folder)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("end", ["it exits", "it is killed"])
def test_the_swarm_ends_without_clients(processes, end):
    serving, swarm, folder = processes.serve(f"alone-{end[-2:]}", ["worker1", "worker2"])
    swarm.close()
    assert held()
    serving.kill() if end == "it is killed" else serving.communicate("", timeout=60)
    wait_for_the_end(folder)


@pytest.mark.timeout(240)
def test_who_exits_hands_the_weights_on(processes):
    serving, swarm, folder = processes.serve("exits", ["worker1", "worker2"])
    go_on = begin_to_write(swarm)
    serving.communicate("", timeout=60)
    assert serving.returncode == 0
    swarm.move(0, 3, "worker2")  # which reads the file
    go_on()
    assert folder.exists()
    swarm.close()
    wait_for_the_end(folder)
    with pytest.raises(UsageError, match="this swarm is closed"):
        swarm.join("worker1")
