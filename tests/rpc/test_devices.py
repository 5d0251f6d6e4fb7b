"""Where tensors arrive, by device maps and by the receiver's own device; and which device maps are refused.

The second device is ``meta``, which every machine has: what arrives there has no numbers, but its place can be seen.
What needs a GPU is in tests/gpu.
"""

import subprocess
import sys

import pytest
import torch
from helpers.processes.listening import free_port

from nbdist import rpc
from nbdist.errors import EncodeError, UsageError
from nbdist.rpc import devices
from nbdist.rpc.options import RpcBackendOptions
from nbdist.testing import World
from nbdist.wire.devices import Devices
from nbdist.wire.messages import Record

CPU, GPU, GPU1 = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


def member(name, id=0, *, size=2, device="", maps=None, own=(), gpus=0):
    return Record(
        name, id, id + 1, [], "host", 1, 1, size, device_maps=maps or {}, device=device, devices=list(own), gpus=gpus
    )


def test_without_a_map_a_tensor_on_a_gpu_is_refused():
    me, to = member("worker0"), member("worker1", 1)
    assert devices.for_call(me, to).of(CPU) is None
    with pytest.raises(EncodeError, match="set_device_map") as caught:
        devices.for_call(me, to).of(GPU)
    assert caught.value.unmapped == "argument"
    with pytest.raises(EncodeError, match=r"the options of worker1, which made the call") as caught:
        devices.for_result(me, to).of(GPU)
    assert caught.value.unmapped == "result"
    with pytest.raises(EncodeError):
        devices.for_result(me, None).of(GPU)
    assert not devices.takes_gpu_tensors(me, to)


def test_a_map_holds_for_arguments_and_backwards_for_results_and_gradients():
    caller = member("worker0", maps={"worker1": {"cuda:0": "cuda:1", "cpu": "cuda:0"}})
    callee = member("worker1", 1)
    assert devices.for_call(caller, callee).of(GPU) == "cuda:1"
    assert devices.for_call(caller, callee).of(CPU) == "cuda:0"
    assert devices.for_result(callee, caller).of(GPU1) == "cuda:0"
    assert devices.for_result(callee, caller).of(GPU) == "cpu"
    assert devices.for_gradients(callee, caller).of(GPU1) == "cuda:0"
    assert devices.for_gradients(caller, callee).of(GPU) == "cuda:1"
    assert devices.takes_gpu_tensors(caller, callee)


def test_in_a_cluster_a_tensor_arrives_on_the_receivers_own_device():
    notebook, one, other = (
        member("notebook", 2, size=None, device="cpu"),
        member("worker0", 0, size=None, device="cuda:0"),
        member("worker1", 1, size=None, device="cuda:1"),
    )
    assert devices.for_call(one, other).of(GPU) == "cuda:1"
    assert devices.for_call(one, other).of(CPU) is None
    assert devices.for_result(one, notebook).of(GPU) == "cpu"
    assert devices.for_call(other, other).of(GPU) == "cuda:0"  # to itself: where it is
    assert devices.takes_gpu_tensors(one, notebook)


def test_cpu_tensors_are_left_alone_unless_a_map_names_the_cpu():
    assert Devices("worker1", {"cuda:0": "cuda:1"}).leave_cpu
    assert Devices("worker1", {"cpu": "cpu"}).leave_cpu
    assert not Devices("worker1", {"cpu": "cuda:0"}).leave_cpu


def whereabouts(*tensors):
    return [tensor.device.type for tensor in tensors]


def joined(a, b):
    return whereabouts(a, b), a.untyped_storage()._cdata == b.untyped_storage()._cdata, b.storage_offset()


@pytest.mark.parametrize("size", [3, 100_000, 200_000])
def test_a_mapped_cpu_tensor_arrives_on_the_other_device(size):
    options = RpcBackendOptions(device_maps={"worker1": {"cpu": "meta"}})
    with World(2, options=options) as world, world[0].activate():
        x = torch.ones(size)
        assert rpc.rpc_sync("worker1", whereabouts, args=(x,)) == ["meta"]
        assert rpc.rpc_sync("worker1", whereabouts, args=(x, x[1:], x.view(1, -1).t())) == ["meta"] * 3
        assert rpc.rpc_sync("worker1", joined, args=(x, x[1:])) == (["meta"] * 2, True, 1)
        assert rpc.remote("worker1", whereabouts, args=(x,)).to_here() == ["meta"]
        assert rpc.rpc_sync("worker0", whereabouts, args=(x,)) == ["cpu"]
        # the other worker's map for this one is empty, and this one's is read backwards for results
        assert rpc.rpc_sync("worker1", torch.ones, args=(size,)).device.type == "cpu"


@pytest.mark.parametrize(
    ("members", "text"),
    [
        (
            [{"maps": {"nobody": {"cuda:0": "cuda:0"}}, "gpus": 1}, {}],
            "invalid target node names in its device maps: n",
        ),
        (
            [{"maps": {"worker1": {"cuda:1": "cuda:0"}}, "gpus": 1}, {"gpus": 1}],
            "source devices with invalid indices in",
        ),
        (
            [{"maps": {"worker1": {"cuda:0": "cuda:1"}}, "gpus": 1}, {"gpus": 1}],
            "target devices with invalid indices in",
        ),
        ([{"maps": {"worker1": {"cuda": "cuda:0"}}, "gpus": 1}, {"gpus": 1}], "source devices with invalid indices in"),
        (
            [{"maps": {"worker1": {"cpu": "cuda:0"}}}, {}],
            r"indices in its device map for worker1: cuda:0; worker1 has no G",
        ),
        (
            [{"maps": {"worker1": {"cpu": "cuda:0", "cuda:0": "cuda:0"}}, "gpus": 1}, {"gpus": 1}],
            "duplicated target dev",
        ),
        (
            [{"maps": {"worker1": {"cuda:0": "cuda:0"}}, "own": ["cuda:1"], "gpus": 2}, {"gpus": 1}],
            "unexpected source de",
        ),
        (
            [{"maps": {"worker1": {"cuda:0": "cuda:0"}}, "gpus": 1}, {"gpus": 2, "own": ["cuda:1"]}],
            "unexpected target de",
        ),
        ([{"own": ["cuda:0", "cuda:0"], "gpus": 1}, {}], "duplicated devices"),
        (
            [{"own": ["cuda:3"], "gpus": 1}, {}],
            "devices with invalid indices: cuda:3; worker0 has 1 GPU, numbered from 0",
        ),
    ],
)
def test_impossible_maps_are_refused_with_torchs_words(members, text):
    with pytest.raises(UsageError, match=f"^Node worker0 has .*{text}"):
        devices.check([member(f"worker{id}", id, **each) for id, each in enumerate(members)])


def test_maps_that_are_possible():
    one = member("worker0", maps={"worker1": {"cuda:0": "cuda:1", "cpu": "cpu"}}, gpus=1)
    devices.check([one, member("worker1", 1, gpus=2)])
    later = member("worker0", size=None, maps={"later": {"cuda:0": "cuda:7"}}, gpus=1)
    devices.check([later, member("worker1", 1, size=None)])  # a world that grows: "later" is not here yet


def test_init_rpc_refuses_an_impossible_map(tmp_path):
    options = RpcBackendOptions(
        init_method=f"file://{tmp_path}/meeting", device_maps={"worker0": {"cuda:99": "cuda:0"}}
    )
    with pytest.raises(UsageError, match="Node worker0 has source devices with invalid indices"):
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    rpc.init_rpc(
        "worker0", rank=0, world_size=1, rpc_backend_options=RpcBackendOptions(init_method=f"file://{tmp_path}/again")
    )
    rpc.shutdown()


@pytest.mark.parametrize("method", ["file", pytest.param("tcp", marks=pytest.mark.soak)])
def test_every_member_of_a_fixed_world_is_told_of_an_impossible_map(tmp_path, method):
    """Each begins at another moment: those that are late must not be told only that the others have left."""
    where = f"file://{tmp_path}/meeting" if method == "file" else f"tcp://127.0.0.1:{free_port()}"
    program = (
        "import sys, time\n"
        "from nbdist import rpc\n"
        "rank = int(sys.argv[1])\n"
        "time.sleep(0.3 * rank)\n"
        "maps = {'worker1': {'cuda:99': 'cuda:0'}} if rank == 0 else {}\n"
        "options = rpc.RpcBackendOptions(init_method=sys.argv[2], device_maps=maps)\n"
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=3, rpc_backend_options=options)\n"
    )
    ran = [
        subprocess.Popen([sys.executable, "-c", program, str(rank), where], stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    for process in ran:
        said = process.communicate(timeout=60)[1]
        assert "UsageError: Node worker0 has source devices with invalid indices in its device map for worker1" in said
