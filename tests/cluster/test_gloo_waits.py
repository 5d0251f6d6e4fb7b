"""Waits of gloo that nothing else would end are ended, and no others.

How workers are freed by that is in `test_member_lost` and `test_interrupts_everywhere`.
"""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nbdist.cluster.worker import gloo_waits
from nbdist.cluster.worker.gloo_waits import CutTransfers


@pytest.fixture
def fresh():
    """Have the symbols looked up anew in this test, and after it."""
    gloo_waits._functions.cache_clear()
    yield
    gloo_waits._functions.cache_clear()


def test_a_wait_in_a_group_with_connections_goes_on(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    groups = [None, None]

    def form(rank):
        groups[rank] = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, 2, timedelta(seconds=60))

    forming = [threading.Thread(target=form, args=(rank,)) for rank in range(2)]
    for thread in forming:
        thread.start()
    for thread in forming:
        thread.join()
    got = torch.zeros(3)
    waiting = threading.Thread(target=lambda: groups[1].recv([got], 0, 7).wait())
    waiting.start()
    time.sleep(0.3)
    cut = CutTransfers()
    assert [cut.end() for _ in range(3)] == [0, 0, 0]
    groups[0].send([torch.ones(3)], 1, 7).wait()
    waiting.join(30)
    assert got.tolist() == [1, 1, 1]


def test_a_torch_without_the_symbols_is_left_alone(monkeypatch, fresh):
    monkeypatch.setattr(gloo_waits, "torch_library", raise_os_error)
    assert CutTransfers().end() == 0


def test_groups_that_connect_lazily_are_left_alone(monkeypatch, fresh):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    assert gloo_waits._functions() is None


def raise_os_error():
    raise OSError("no such file")
