"""Servers get the weights of their blocks, also on a host that does not see the client's file."""

import threading

import pytest
import torch
from helpers.hosts.keepers import cluster_on
from helpers.hosts.other_hosts import can_make_hosts, hosts
from helpers.models import swarm_models

from nbdist.rpc.named import NotOffered
from nbdist.swarm import adapter, serve
from nbdist.swarm.server import sources
from nbdist.swarm.server.sources import FarWeights, Source, offer
from nbdist.swarm.weight_file import WeightFile
from nbdist.testing import World


@pytest.fixture
def world():
    with World(3) as world, world[0].activate():
        yield world


@pytest.fixture
def asked(monkeypatch):
    """The names of the weights each time that a server asks the client for weights."""
    calls = []
    read = FarWeights.read

    def noted(weights, names):
        calls.append(names)
        return read(weights, names)

    monkeypatch.setattr(FarWeights, "read", noted)
    return calls


@pytest.fixture
def far(monkeypatch, asked):
    """Servers see no file of a client's, as on another host; what they ask for, as names."""
    monkeypatch.setattr("nbdist.swarm.placer.offer", lambda checkpoint: offer(checkpoint)._replace(folder="/nowhere"))
    return asked


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@torch.no_grad()
def test_servers_without_the_file_ask_the_client_for_their_blocks_alone(world, far, family):
    model = swarm_models.make(family)
    swarm = serve(model, workers=[1, 2], spans=[(0, 2), (2, 6)])
    layers = len(adapter.find_layers(model).split("."))
    blocks = [{int(name.split(".")[layers]) for name in names} for names in far]
    assert sorted(map(tuple, blocks)) == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert torch.equal(swarm_models.generate(swarm.causal_lm(), "one"), swarm_models.generate(model, "one"))
    swarm.move(0, 2, "worker2")
    assert torch.equal(swarm_models.generate(swarm.causal_lm(), "one"), swarm_models.generate(model, "one"))
    swarm.close()


def test_another_file_under_the_same_path_is_not_taken_for_the_clients(world, asked, tmp_path):
    adapter.write_checkpoint(swarm_models.make("llama"), tmp_path)
    checkpoint = adapter.Checkpoint(tmp_path)
    source = offer(checkpoint)
    assert isinstance(source.open().weights, WeightFile)
    (tmp_path / "model.safetensors").touch()  # as if it had been written at another time, with the same size
    assert isinstance(source.open().weights, FarWeights)
    assert not asked


def test_a_call_asks_for_one_part_or_for_one_weight(monkeypatch):
    sizes = {"a": 30, "b": 30, "c": 10, "large": 100, "d": 10}
    monkeypatch.setattr(sources, "_PART_BYTES", 64)
    calls = []

    def answer(source, method, names, timeout):
        calls.append(names)
        return dict.fromkeys(names, torch.ones(1))

    monkeypatch.setattr(Source, "ask", answer)
    assert list(FarWeights(Source("", (), "", ""), sizes).read(list(sizes))) == list(sizes)
    assert calls == [["a", "b"], ["c"], ["large"], ["d"]]


def test_weights_of_a_closed_swarm_are_not_to_be_had(world, tmp_path, monkeypatch):
    adapter.write_checkpoint(swarm_models.make("llama"), tmp_path)
    offered = []
    monkeypatch.setattr(
        "nbdist.swarm.placer.offer", lambda checkpoint: offered.append(offer(checkpoint)) or offered[-1]
    )
    swarm = serve(tmp_path, workers=[1])
    source = offered[0]._replace(folder="/nowhere")
    assert isinstance(source.open().weights, FarWeights)
    swarm.close()
    with pytest.raises(NotOffered, match="the swarm was closed"):
        source.open()


def test_what_is_no_file_of_weights_is_not_read(world, tmp_path):
    """The path may lead to something else on another host, such as a pointer of Git LFS."""
    adapter.write_checkpoint(swarm_models.make("llama"), tmp_path / "model")
    checkpoint = adapter.Checkpoint(tmp_path / "model")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    source = offer(checkpoint)._replace(folder=str(tmp_path / "other"))
    assert isinstance(source.open().weights, FarWeights)


@torch.no_grad()
def test_a_server_computes_and_drops_blocks_while_it_waits_for_others(world, far, monkeypatch):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2], spans=[(0, 4), (4, 6)])
    begun, go, read = threading.Event(), threading.Event(), FarWeights.read

    def slowly(weights, names):
        begun.set()
        assert go.wait(30)
        return read(weights, names)

    monkeypatch.setattr(FarWeights, "read", slowly)

    def join():
        with world[0].activate():
            swarm.join(1, 4, 6)

    joining = threading.Thread(target=join)
    joining.start()
    assert begun.wait(10)
    (member,) = [each for each in swarm.crew.there if each.name == "worker1"]
    with swarm.crew.working():
        assert swarm._placer._answer(member, "unload", [0, 1, 2]) == [0, 1, 2]
    go.set()
    joining.join(30)
    assert swarm.info()["worker1"].blocks == [0, 1, 2, 4, 5]
    swarm.close()


@pytest.mark.soak  # tests above have servers without the file, tests/swarm/test_killed.py kills workers
@pytest.mark.skipif(not can_make_hosts(), reason="only root can make hosts, and only where the kernel allows it")
@torch.no_grad()
def test_a_swarm_over_hosts_that_share_no_folder(tmp_path):
    model = swarm_models.make("llama")
    with hosts(2) as (address, others), cluster_on(others, address, tmp_path) as cluster:
        swarm = serve(model, workers=["worker0", "worker1"], spans=[(0, 3), (3, 6)])
        remote = swarm.causal_lm()
        assert torch.equal(swarm_models.generate(remote, "one"), swarm_models.generate(model, "one"))
        maps = "'model.safetensors' in open('/proc/self/maps').read()"
        assert cluster.evaluate(maps) == [False, False]
        others[0].kill()  # the worker of the other host takes its blocks: from here
        assert torch.equal(swarm_models.generate(remote, "one"), swarm_models.generate(model, "one"))
        assert list(swarm.blocks.values()) == [[0, 1, 2, 3, 4, 5]]
        swarm.close()
