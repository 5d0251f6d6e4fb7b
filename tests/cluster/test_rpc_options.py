"""Options of RPC for a cluster: for its workers and for the notebook."""

import math
import time

import pytest
import torch

import nbdist
from nbdist.cluster.spec import Spec, rpc_arguments
from nbdist.errors import UsageError
from nbdist.magics.lines import parse_init
from nbdist.rpc import RpcBackendOptions


def test_workers_and_the_notebook_have_them():
    options = RpcBackendOptions(rpc_timeout=33, num_worker_threads=3, arena_bytes=0, lost_after=9)
    options.set_device_map("worker1", {"cpu": "cpu"})
    with nbdist.Cluster(2, rpc=options) as cluster:
        shown = (
            "(agent := __import__('nbdist').rpc.api.current_agent()) and (agent.rpc_timeout, "
            "agent.options.num_worker_threads, agent.options.arena_bytes, agent.options.lost_after, "
            "agent.me.device_maps)"
        )
        first, second = cluster.evaluate(shown)
        assert first == (33.0, 3, 0, 9.0, {"worker1": {"cpu": "cpu"}})
        assert second == (33.0, 3, 0, 9.0, {}), "a map for messages to itself is left out"
        mine = cluster.agent
        assert (mine.rpc_timeout, mine.options.num_worker_threads, mine.options.arena_bytes) == (33.0, 3, 0)
        assert mine.me.device_maps == {}
        assert torch.equal(nbdist.rpc.rpc_sync("worker0", torch.ones, args=(200_000,)), torch.ones(200_000))
        cluster.restart(1)
        assert cluster.evaluate(shown, 1) == second


def test_a_map_of_a_device_that_is_not_there_ends_the_start():
    options = RpcBackendOptions(device_maps={"worker1": {"cuda:0": "cuda:5"}})
    with pytest.raises(nbdist.NbdistError, match=r"invalid indices"):
        nbdist.Cluster(2, rpc=options, backend="none").start()
    assert nbdist.Cluster.current is None


@pytest.mark.parametrize(
    "option", [{"init_method": "file:///tmp/x"}, {"secret": "s" * 40}, {"host": "10.0.0.1"}, {"devices": ["cpu"]}]
)
def test_what_the_cluster_sets_itself_is_refused(option):
    with pytest.raises(UsageError, match=rf"a cluster sets {next(iter(option))} of its RPC itself"):
        nbdist.Cluster(2, rpc=RpcBackendOptions(**option))


def test_numbers_that_json_cannot_hold():
    options = RpcBackendOptions(lost_after=math.inf, arena_bytes=10**20)
    assert rpc_arguments(options) == {"lost_after": 1e8, "arena_bytes": (1 << 63) - 1}


@pytest.mark.parametrize("options", [{"rpc_timeout": 5}, 5, "rpc"])
def test_what_are_no_options(options):
    with pytest.raises(TypeError, match="rpc must be an RpcBackendOptions of nbdist, not"):
        nbdist.Cluster(2, rpc=options)


def test_a_map_for_a_worker_that_is_not_there():
    options = RpcBackendOptions(device_maps={"worker0": {"cpu": "cpu"}, "worker2": {"cpu": "cpu"}})
    with pytest.raises(UsageError, match=r"does not have: worker2$"):
        nbdist.Cluster(2, rpc=options)
    with pytest.raises(UsageError, match=r"does not have: worker0$"):
        nbdist.Cluster(2, rpc=options, driver="master")


def test_a_program_may_ask_for_the_maps_that_the_cluster_has():
    maps = {"worker0": {"cpu": "cpu"}, "worker1": {"cpu": "cpu"}}
    program = (
        "options = rpc.RpcBackendOptions(device_maps={'worker1': {'cpu': 'cpu'}})\n"
        "rpc.init_rpc(f'worker{rank}', rpc_backend_options=options)\n"
    )
    with nbdist.Cluster(2, rpc=RpcBackendOptions(device_maps=maps), backend="none") as cluster:
        cluster.execute(program)
        with pytest.raises(nbdist.NbdistError, match="cannot take on device_maps now"):
            cluster.execute(program.replace("'worker1': {'cpu'", "'worker1': {'cuda:0'"), 0)


def test_a_short_time_limit_is_for_calls_only():
    with nbdist.Cluster(2, rpc=RpcBackendOptions(rpc_timeout=0.01, lost_after=6), backend="none") as cluster:
        cluster.execute("import time, threading; threading.Thread(target=time.sleep, args=(0.1,)).start()")
        with pytest.raises(nbdist.RpcTimeout):
            nbdist.rpc.rpc_sync("worker0", time.sleep, args=(1,))
        cluster.restart(1)
        assert cluster.evaluate("rank") == [0, 1]


def test_usual_options_are_none():
    assert rpc_arguments(None) == rpc_arguments(RpcBackendOptions()) == {}
    assert nbdist.Cluster(2, rpc=RpcBackendOptions()).spec.same_as(Spec(2))
    assert not nbdist.Cluster(2, rpc=RpcBackendOptions(rpc_timeout=5)).spec.same_as(Spec(2))
    again = nbdist.Cluster.of(nbdist.Cluster(2, rpc=RpcBackendOptions(rpc_timeout=5)).spec)
    assert again.spec.rpc == {"rpc_timeout": 5.0}


@pytest.mark.parametrize(
    ("line", "maps"),
    [
        ("--device-map worker1:0=1", {"worker1": {"cuda:0": "cuda:1"}}),
        ("--device-map worker1:0=1,1=0", {"worker1": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}}),
        (
            "--device-map worker1:cuda:0=cpu --device-map worker0:cpu=0",
            {"worker1": {"cuda:0": "cpu"}, "worker0": {"cpu": "cuda:0"}},
        ),
    ],
)
def test_device_maps_of_a_line(line, maps):
    assert parse_init(f"-n 2 {line}").rpc == {"device_maps": maps}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("worker1", "'worker1' is not a device map such as worker1:0=1,1=0"),
        ("worker1:0", "is not a device map"),
        ("worker1:0=", "is not a device map"),
        (":0=1", "is not a device map"),
        ("worker1:0=1=2", "is not a device map"),
        ("worker1:0=1,0=2", "is not a device map"),
        ("worker1:0=1,1=1", "two devices here would share one"),
        ("worker1:gpu0=1", "--device-map worker1: "),
    ],
)
def test_lines_that_are_no_device_map(line, says):
    with pytest.raises(UsageError) as raised:
        parse_init(f"-n 2 --device-map {line}")
    assert says in str(raised.value)
