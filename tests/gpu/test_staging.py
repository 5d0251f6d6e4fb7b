"""Large tensors between a GPU and the host's memory, in chunks by way of pinned memory."""

import threading

import pytest
import torch

import nbdist
from nbdist.gpus import order, pinned, staging
from nbdist.wire import tensors
from nbdist.wire.devices import Devices
from nbdist.wire.tensors import TensorPacker, unpack_tensors

MB = 1 << 20
GPU = "cuda:0"


@pytest.fixture(autouse=True)
def lanes():
    """Nothing is refused, and every large copy goes through pinned memory."""
    before = staging.statistics()["staged_bytes"]
    yield
    assert staging.refusal() == ""
    assert staging.statistics()["staged_bytes"] > before
    staging.free()


def values(length):
    return torch.randint(0, 256, (length,), dtype=torch.uint8, device=GPU)


def through_frames(*sent):
    packer = TensorPacker(Devices("other", {"cuda:0": GPU}))
    for each in sent:
        packer.add(each)
    metas, where, frames = packer.pack()
    found = unpack_tensors(metas, where, [bytes(frame) for frame in frames])
    assert all(each.device == torch.device(GPU) for each in found)
    return found


@pytest.mark.parametrize("length", [8 * MB, 8 * MB + 1, 12 * MB - 1, 12 * MB, 64 * MB + 17])
def test_bytes_arrive_as_they_were(length):
    sent = values(length)
    there = staging.fresh_host_copy(sent)
    assert torch.equal(there, sent.cpu())
    back = staging.to_gpu(there, GPU)
    assert back.device == sent.device
    assert torch.equal(back, sent)


@pytest.mark.parametrize("dtype", [dtype for dtype in tensors._DTYPES if dtype is not None], ids=str)
def test_all_dtypes_arrive_bit_equal(dtype):
    raw = values(20 * MB)
    (found,) = through_frames(raw.view(dtype))
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), raw)


def test_views_arrive_equal_and_share_memory():
    base = torch.randn(3000, 1000, device=GPU)
    large = torch.randn(10 * MB, device=GPU)
    sent = [base, base[5:2500], base.t(), base[::2, 3:], large[MB : 5 * MB], torch.empty(0, 5, device=GPU)]
    found = through_frames(*sent)
    for there, here in zip(found, sent, strict=True):
        assert there.shape == here.shape
        assert torch.equal(there, here)
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()
    (part,) = through_frames(large[MB : 5 * MB])
    assert torch.equal(part, large[MB : 5 * MB])


def test_a_tensor_leaves_after_the_stream_that_computes_it():
    """The stream is busy for a while when the copy is asked for."""
    side = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device=GPU)
    side.wait_stream(torch.cuda.current_stream())
    for n in range(5):
        with torch.cuda.stream(side):
            for _ in range(50):
                a = (a @ a).clamp(-1, 1)
            x = torch.full((16 * MB,), float(n), device=GPU) + 0 * a.sum()
            there = staging.fresh_host_copy(x.view(torch.uint8))
            x.fill_(-1)
        assert (there.view(torch.float32) == n).all()


def test_a_tensor_arrives_after_the_last_use_of_its_memory():
    """torch hands the memory of a tensor to the next one while kernels that read the old tensor still wait."""
    a = torch.randn(4096, 4096, device=GPU)
    sums = []
    sent = [torch.full((4 * MB,), float(n)) for n in range(10)]
    for each in sent:
        there = staging.to_gpu(each, GPU)
        for _ in range(20):
            a = (a @ a).clamp(-1, 1)
        sums.append(there.sum() + 0 * a.sum())
        del there
    assert [each.item() for each in sums] == [float(n) * 4 * MB for n in range(10)]


def test_what_has_arrived_can_be_used_on_any_stream():
    for n in range(20):
        there = staging.to_gpu(torch.full((8 * MB,), float(n)), GPU)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert (there == n).all().item()


def test_many_threads_at_once():
    found = []

    def work(seed):
        for n in range(20):
            sent = torch.full((2 * MB + seed,), float(seed * 100 + n), device=GPU)
            (there,) = through_frames(sent)
            found.append(torch.equal(there, sent))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 160
    assert staging.statistics()["pinned_bytes"] <= staging._MOST_LANES * staging.STAGED_BYTES


def test_the_buffers_are_pinned():
    staging.fresh_host_copy(values(8 * MB))
    lane = pinned.PinnedLane(staging.CHUNK_BYTES)
    assert len(lane.buffers) == order.BUFFERS
    assert all(buffer.is_pinned() for buffer in lane.buffers)
    with torch.inference_mode():
        assert torch.equal(
            staging.fresh_host_copy(values(9 * MB).fill_(3)), torch.full((9 * MB,), 3, dtype=torch.uint8)
        )


def test_a_cluster_sends_that_way_to_the_notebook_and_back():
    staging.fresh_host_copy(values(8 * MB))
    with nbdist.Cluster(1, gpu_ids=(0,)) as cluster:
        cluster.execute("from nbdist.gpus import staging\nx = torch.arange(float(1 << 24), device=device)")
        before = cluster.evaluate("staging.statistics()['staged_bytes']", 0)
        found = cluster.pull("x", 0)
        assert torch.equal(found, torch.arange(float(1 << 24)))
        assert cluster.evaluate("staging.statistics()['staged_bytes']", 0) == before + (64 << 20)
        assert cluster.evaluate("staging.refusal()", 0) == ""
