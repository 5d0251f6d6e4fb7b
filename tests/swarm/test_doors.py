"""Clients on other hosts, by an invitation: what they can do, and what they cannot."""

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from unittest import mock

import pytest
import torch
import zmq
from helpers.hosts.other_hosts import can_make_hosts, hosts
from helpers.models import swarm_models
from helpers.processes import swarm_clients
from helpers.suite.python_path import TESTS, python_path
from helpers.waiting import wait_until

import nbdist
from nbdist.channel.contract import ChannelError
from nbdist.channel.secret import Secret
from nbdist.errors import EncodeError, SecurityError, UsageError, WorkerLost
from nbdist.rpc import api
from nbdist.swarm import connect, serve
from nbdist.swarm.doors import doorkeeper, outside
from nbdist.swarm.history import Step
from nbdist.swarm.server.server import CALLED, FOR_CLIENTS

_PROGRAM = """
import os, sys, torch
from helpers.models import swarm_models
from nbdist.swarm import connect
from nbdist.swarm.doors.outside import Outside
if not os.path.exists(file := sys.argv[1]):  # on another host
    descriptor = os.open(file := "/tmp/invitation", os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, sys.stdin.buffer.read())
    os.close(descriptor)
if len(sys.argv) > 3:
    record, take = open(sys.argv[3], "wb", 0), Outside._take
    Outside._take = lambda self, data: (record.write(data), take(self, data))[1]
swarm = connect(file)
model = swarm.causal_lm()
for _ in range(int(sys.argv[2])):
    print(swarm_models.generate(model, "greedy", 30).tolist(), flush=True)
    if sys.stdin.isatty() or len(sys.argv) > 3 and sys.stdin.readline() == "":
        break
print(swarm.states, flush=True)
swarm.close()
"""
_TOKENS = 30


def members():
    """The members of the world, as each of them knows them."""
    names = [each.name for each in api.current_agent().members()]
    return {name: api.rpc_sync(name, swarm_clients.members) for name in names}


def client(*arguments, piped=("stdin", "stdout")):
    pipes = dict.fromkeys(piped, subprocess.PIPE)
    environment = {**os.environ, **python_path(TESTS)}
    return subprocess.Popen([sys.executable, "-c", _PROGRAM, *map(str, arguments)], text=True, env=environment, **pipes)


def next_text(process):
    process.stdin.write("on\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@pytest.fixture
def served(three, tmp_path):
    """A swarm on three workers, its model, and an invitation."""
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[0, 1, 2], step_timeout=20.0)
    yield swarm, model, swarm.invite(tmp_path / "invitation.json")
    swarm.close()


# -- what clients can do --------------------------------------------------------------------------


@pytest.mark.skipif(not can_make_hosts(), reason="only root can make hosts, and only where the kernel allows it")
def test_a_client_on_another_host_writes_while_a_worker_is_killed(three, tmp_path):
    model = swarm_models.make("llama")
    expected = swarm_models.generate(model, "greedy", _TOKENS).tolist()
    before = members()
    with hosts(1) as (address, [other]):
        swarm = serve(model, workers=[0, 1, 2])
        file = swarm.invite(tmp_path / "invitation.json", host=address)
        process = other.start(
            *("-c", _PROGRAM, "no file", "4"),
            stdin=file.read_bytes(),
            stdout=subprocess.PIPE,
            environment=python_path(TESTS),
        )
        texts = [json.loads(process.stdout.readline())]
        wait_until(lambda: api.rpc_sync("worker1", swarm_clients.open_sessions))  # in the middle of the second text
        os.kill(three.workers[1].pid, signal.SIGKILL)
        *more, states = process.stdout.read().decode().splitlines()
        assert [*texts, *map(json.loads, more)] == [expected] * 4
        assert "'worker1': 'gone'" in states
        assert process.wait(60) == 0
        assert before.keys() - members().keys() == {"worker1"}
        assert not [each for info in swarm.info().values() for each in range(info.sessions)]
        swarm.close()


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_texts_are_equal_in_all_ways_of_writing(three, tmp_path, family):
    model = swarm_models.make(family)
    swarm = serve(model, workers=[0, 1], chunk=4)
    own = connect(swarm.invite(tmp_path / "file"))
    remote = own.causal_lm()
    for mode in ("greedy", "sampling", "beams", "prompt lookup"):
        assert torch.equal(swarm_models.generate(remote, mode), swarm_models.generate(model, mode))
    assert own.blocks == swarm.blocks
    assert own.states == {"worker0": "online", "worker1": "online"}
    swarm.move(3, 4, 0)  # a client hears of it
    wait_until(lambda: own.blocks == swarm.blocks)
    assert torch.equal(swarm_models.generate(remote, "greedy"), swarm_models.generate(model, "greedy"))
    own.close()
    swarm.close()


def test_maps_show_what_clients_have_and_not_their_names(served):
    swarm, model, file = served
    own = connect(file)
    cache = swarm_models.model_cache.new_cache(model.config)
    swarm_models.generate(own.causal_lm(), "one", past_key_values=cache)
    reserved = sum(info.cache for info in swarm.info().values())
    wait_until(lambda: [each["cache"] for each in swarm.snapshot()["clients"]], equals=[reserved])
    assert [(each["name"], each["sessions"]) for each in swarm.snapshot()["clients"]] == [("an invited client", 1)]
    assert own.snapshot()["clients"][0]["cache"] == reserved
    del cache
    wait_until(lambda: not swarm.snapshot()["clients"])
    kept = swarm_models.model_cache.new_cache(model.config)
    swarm_models.generate(own.causal_lm(), "one", past_key_values=kept)
    wait_until(lambda: swarm.snapshot()["clients"])
    swarm.revoke_invitations()
    wait_until(lambda: not swarm.snapshot()["clients"])
    own.close()


def test_a_session_moves_with_its_caches(served):
    swarm, model, file = served
    own = connect(file)
    remote, ids = own.causal_lm(), swarm_models.one()["input_ids"]
    cache = swarm_models.model_cache.new_cache(model.config)
    with torch.no_grad():
        remote(ids[:, :-1], past_key_values=cache)
        swarm.leave(1)
        wait_until(lambda: own.blocks == swarm.blocks)
        last = remote(ids[:, -1:], past_key_values=cache).logits[:, -1]
        assert torch.allclose(last, model(ids).logits[:, -1], atol=1e-5)
    own.close()


def test_a_server_that_is_gone_while_its_worker_lives_is_replaced(served):
    _, model, file = served
    own = connect(file)
    remote = own.causal_lm()
    address = own.crew.member("worker1").address
    api.rpc_sync("worker1", swarm_clients.withdraw, (address.name,))  # as if the worker had been restarted
    assert torch.equal(swarm_models.generate(remote, "one"), swarm_models.generate(model, "one"))
    assert own.states["worker1"] == "gone"
    own.close()


def test_a_client_cannot_change_who_serves_nor_train(served, monkeypatch):
    swarm, _, file = served
    before = swarm.blocks, members()
    own = connect(file)
    for change in (
        lambda: own.join("worker1", 0, 1),
        lambda: own.leave("worker0"),
        lambda: own.move(0, 1, "worker2"),
        lambda: own.kill("worker0"),
    ):
        with pytest.raises(SecurityError, match=r"a client of a swarm may not call swarm\.\w+: only a member"):
            change()
    remote = own.causal_lm()
    with pytest.raises(SecurityError, match="a client on another host can only write texts"):
        remote(torch.tensor([[4, 5]]), use_cache=False)
    for invite in (own.address, lambda: own.invite("file")):
        with pytest.raises(UsageError, match="this process is a client by an invitation"):
            invite()
    with pytest.raises(EncodeError, match="a function cannot be sent to or by a client"):
        own.crew.ask(own.crew.member("worker0"), "push", "a", 0, 1, members)
    with pytest.raises(UsageError, match="a client on another host needs a cache of the model's own"):
        swarm_models.model_cache.description(
            swarm_models.model_cache.new_cache(swarm_models.CONFIGS["gemma2"]()), own.checkpoint.config
        )
    monkeypatch.setattr(outside, "LARGEST", 9)
    with pytest.raises(UsageError, match="a client's message has at most 9 bytes"):
        own.info()
    monkeypatch.undo()
    # None of this has ended its link.
    assert torch.equal(swarm_models.generate(remote, "one"), swarm_models.generate(swarm.causal_lm(), "one"))
    own.close()
    assert (swarm.blocks, members()) == before


def test_what_clients_may_call_is_published_and_checked():
    assert set(FOR_CLIENTS) < set(CALLED)
    assert set(FOR_CLIENTS) | {"news", "mend", "texts", "read", "note_usage"} == doorkeeper.ARGUMENTS.keys()


# -- the ends of clients and doors ----------------------------------------------------------------


def test_a_client_that_is_silent_frees_its_caches_and_hears_of_it(served):
    swarm, _, file = served
    process = client(file, 2, os.devnull, piped=("stdin", "stdout", "stderr"))
    json.loads(process.stdout.readline())
    own = connect(file)
    cache = swarm_models.model_cache.new_cache(own.checkpoint.config)
    with torch.no_grad():
        own.causal_lm()(torch.tensor([[4, 5]]), past_key_values=cache)
    assert all(each.sessions for each in swarm.info().values())
    process.stdin.write("on\n"), process.stdin.flush()
    wait_until(lambda: any(each.sessions == 2 for each in swarm.info().values()))
    try:
        process.send_signal(signal.SIGSTOP)  # it says no goodbye
        own.close()  # and this one does
        wait_until(lambda: not any(each.sessions for each in swarm.info().values()))
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=60)
    finally:  # a stopped process would not notice the end of the tests
        process.kill()
    assert "WorkerLost: the swarm's door at tcp://" in said
    assert "this client was silent for 12 s. Connect again" in said


def test_the_end_of_the_swarm_reaches_clients(served):
    swarm, _, file = served
    own = connect(file)
    remote = own.causal_lm()
    swarm.close()
    # At once, also while the client sends: without a wait, the system may drop the news with the connection.
    wait_until(lambda: own.crew.ended)
    with pytest.raises(WorkerLost, match="the swarm was closed"):
        swarm_models.generate(remote, "one")
    own.close()
    own.close()


def test_a_client_that_nobody_uses_ends(served):
    _, _, file = served
    before = set(threading.enumerate())
    own = connect(file)
    (link,) = {each for each in threading.enumerate() if each.name == "nbdist-door"} - before
    folder, crew = own.checkpoint.folder, weakref.ref(own.crew)
    swarm_models.generate(own.causal_lm(), "one")
    assert folder.exists()
    del own
    gc.collect()
    wait_until(lambda: not folder.exists())
    assert crew() is None
    wait_until(lambda: not link.is_alive())


def test_two_calls_of_one_number_end_the_link(served):
    swarm, _, file = served
    own = connect(file)
    session = swarm_models.model_cache.new_cache(own.checkpoint.config)
    with torch.no_grad():
        own.causal_lm()(torch.tensor([[4, 5]]), past_key_values=session)
    member, id = own.crew.member("worker0"), session.nbdist[1].id
    nothing = Step((), torch.zeros(0), ())
    with mock.patch.object(own.crew._agent, "_numbers", itertools.repeat(10**6)):
        waits = [own.crew.send(member, "step", id, 0, 9, nothing, pushed=True) for _ in range(2)]  # for its input
    for each in waits[1:]:
        with pytest.raises(WorkerLost, match="what no client sends: a call with the number of another one"):
            each.wait(30)
    wait_until(lambda: not any(each.sessions for each in swarm.info().values()))
    own.close()


# -- invitations ----------------------------------------------------------------------------------


def test_a_revoked_invitation(served, tmp_path):
    swarm, _, file = served
    later = swarm.invite(tmp_path / "second")
    remote = connect(file).causal_lm()
    swarm_models.generate(remote, "greedy", 2)
    assert swarm.revoke_invitations() == 2
    with pytest.raises(WorkerLost, match="the invitation was revoked"):
        swarm_models.generate(remote, "greedy", 2)
    for each in (file, later):
        with pytest.raises(WorkerLost, match=r"has not answered|has ended"):
            connect(each)
    assert swarm.revoke_invitations() == 0
    connect(swarm.invite(tmp_path / "third")).close()


def test_invitations_that_are_none(served, tmp_path, monkeypatch):
    swarm, _, file = served
    assert file.stat().st_mode & 0o077 == 0
    said = json.loads(file.read_text())
    assert said.keys() == {"address", "key", "secret"}
    assert json.loads(swarm.invite(tmp_path / "second").read_text())["secret"] != said["secret"]
    file.chmod(0o644)
    with pytest.raises(SecurityError, match=r"others may read or write .*, and whoever reads it can use the swarm"):
        connect(file)
    file.chmod(0o600)
    file.write_text("{}")
    with pytest.raises(UsageError, match=r"cannot be read, or is no invitation of Swarm\.invite"):
        connect(str(file))
    for wrong in ({"secret": "another one"}, {"secret": ""}):
        file.write_text(json.dumps({**said, **wrong}))
        with pytest.raises(WorkerLost, match="its invitation is not of this door"):
            connect(file)
    with pytest.raises(ChannelError, match="cannot listen at 203"):
        swarm.invite(tmp_path / "third", host="203.0.113.77")
    with pytest.raises(UsageError, match="the invitation cannot be written to /nowhere"):
        swarm.invite("/nowhere/file")
    swarm.close()
    with pytest.raises(UsageError, match="this swarm is closed"):
        swarm.invite(tmp_path / "fourth")


def test_a_door_that_does_not_answer(served, monkeypatch):
    _, _, file = served
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "key": zmq.curve_keypair()[0].decode()}))
    monkeypatch.setattr("nbdist.swarm.doors.outside.SILENT_SECONDS", 1.0)
    with pytest.raises(WorkerLost, match="has not answered for 1 s: its process has ended, or cannot be reached"):
        connect(file)


# -- forged messages ------------------------------------------------------------------------------


def test_forged_messages_of_a_client_do_nothing(served, tmp_path):
    swarm, model, file = served
    expected = swarm_models.generate(model, "greedy", _TOKENS).tolist()
    marker, record, victims_record = (tmp_path / name for name in ("marker", "record", "victim"))
    before = members(), swarm.blocks
    victim = client(file, 10_000, victims_record)
    assert json.loads(victim.stdout.readline()) == expected
    # A second client is in the middle of a text, and the forger knows the name of its session.
    second, ids = connect(file), swarm_models.one()["input_ids"]
    caches = [swarm_models.model_cache.new_cache(model.config) for _ in range(2)]
    writers = list(zip((remote := second.causal_lm(), model), caches, strict=True))
    with torch.no_grad():
        first = [each(ids[:, :-3], past_key_values=cache).logits for each, cache in writers]
        assert torch.equal(*first)
    victims = api.rpc_sync("worker0", swarm_clients.open_sessions)
    assert len(victims) == 1
    assert victims[0].endswith(f"/{caches[0].nbdist[1].id}")
    arguments = ("-m", "helpers.abuse.forged_client", file, 1, 1000, marker, record, *victims)
    environment = {**os.environ, **python_path(TESTS)}
    forger = subprocess.Popen(
        [sys.executable, *map(str, arguments)], text=True, env=environment, stdout=subprocess.PIPE
    )
    texts = 0
    while forger.poll() is None:
        assert next_text(victim) == expected
        texts += 1
    assert texts
    assert forger.returncode == 0
    sent, values, errors = json.loads(forger.stdout.read())
    assert sum(sent.values()) == 1000
    # Nothing has run, nobody has become a member, no block has moved, and all are alive.
    assert not marker.exists()
    assert (members(), swarm.blocks) == before
    assert all(errors[kind] for kind in sent), errors
    # Of forged messages, only those about the forger's own session, or right but for some bits, have got a value.
    assert set(values) <= {"own_session", "damage"}, values
    assert not [value for each in values.values() for value in each if "StepReply" in value]
    assert next_text(victim) == expected
    with torch.no_grad():
        for at in range(ids.shape[1] - 3, ids.shape[1]):
            assert torch.equal(*(each(ids[:, at : at + 1], past_key_values=cache).logits for each, cache in writers))
    assert second.log == []  # no step had to be done again
    del remote, writers, caches
    second.close()
    victim.communicate(timeout=60)
    wait_until(lambda: not any(each.sessions for each in swarm.info().values()))
    # The members' secret, and the keys that are made of it, have gone nowhere.
    secret = Secret.find(api.current_agent().options.secret)
    keys = [secret.derive("sign"), secret.derive("curve door"), secret.derive("curve member")]
    keys += [key for role in ("door", "member") for key in secret.curve(role)]
    keys += [(nbdist.channel.secret.runtime_directory() / "secret").read_bytes()]
    for data in (file.read_bytes(), record.read_bytes(), victims_record.read_bytes()):
        assert len(data) > 100
        assert not [key for key in keys if key in data or key.hex().encode() in data]
