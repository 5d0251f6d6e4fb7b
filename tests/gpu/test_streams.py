"""Futures, and values of references on their owners, carry the CUDA streams that compute their values."""

import threading

import pytest
import torch

from nbdist import rpc
from nbdist.testing import World

GPU = torch.device("cuda:0")
SIZE = 1 << 20


def late(number):
    """Return a tensor at once that the GPU fills 0.2 s later, on the current stream."""
    x = torch.zeros(SIZE, device=GPU)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # counts cycles, of which a GPU has one to two in a nanosecond
    return x.fill_(number)


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("shape", ["alone", "in containers"])
def test_a_reader_on_another_stream_waits_on_the_gpu(shape):
    future, side = rpc.Future(), torch.cuda.Stream()

    def make():
        with torch.cuda.stream(side):
            x = late(3.0)
            future.set_result(x if shape == "alone" else {"x": [x, 1]})

    in_thread(make)
    assert not side.query(), "nobody has waited for the GPU"
    with torch.cuda.stream(torch.cuda.Stream()):
        found = future.wait()
        assert not side.query(), "the reader's thread has not waited either"
        x = found if shape == "alone" else found["x"][0]
        assert x.sum().item() == 3.0 * SIZE


def test_a_callback_computes_after_the_value():
    future, side = rpc.Future(), torch.cuda.Stream()
    doubled = future.then(lambda done: done.wait() * 2)

    def make():
        with torch.cuda.stream(side):
            future.set_result(late(3.0))

    in_thread(make)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert doubled.wait().sum().item() == 6.0 * SIZE


def test_the_value_of_a_reference_on_its_owner():
    with World(2) as world, world[0].activate():
        reference = rpc.remote("worker0", late, args=(5.0,))  # computed on the current stream of the call's thread
        with torch.cuda.stream(torch.cuda.Stream()):
            assert reference.local_value().sum().item() == 5.0 * SIZE
