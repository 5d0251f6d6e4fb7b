"""Memory after many calls is what it was after few (G4)."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
from helpers.processes import workers

from nbdist import rpc


def calls(count: int) -> tuple[float, float]:
    """Make them, half with tensors of 1 MB and half with references; memory here and there."""
    tensor, small = torch.ones(1 << 18), torch.ones(2)
    for _ in range(count // 2):
        rpc.rpc_sync("worker1", workers.identity, args=(tensor,))
        rpc.remote("worker1", torch.add, args=(small, 1)).to_here()
    time.sleep(1)  # let acknowledgements and deletions settle, which nothing else tells of
    return workers.resident(), rpc.rpc_sync("worker1", workers.resident)


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_memory_does_not_grow_with_calls(count):
    with workers.world(2):
        before = calls(1000)
        after = calls(count)
        print(f"MB after 1,000 calls {before}, after {count} more {after}")
        assert after[0] - before[0] < 5
        assert after[1] - before[1] < 5


def failing_calls(count: int) -> tuple[float, float]:
    """Make calls that fail, each with a large local beside it; memory here and there."""
    for number in range(count):
        large = bytearray(100_000)
        with contextlib.suppress(ValueError, RuntimeError):
            if number % 2:
                rpc.rpc_async("worker1", workers.fail, args=("on purpose",)).wait()
            else:
                rpc.remote("worker1", workers.fail, args=("on purpose",)).to_here()
        assert large
    time.sleep(1)
    return workers.resident(), rpc.rpc_sync("worker1", workers.resident)


@pytest.mark.parametrize("count", [1_500, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_memory_does_not_grow_with_failed_calls(count):
    with workers.world(2):
        before = failing_calls(1000)
        after = failing_calls(count)
        print(f"MB after 1,000 failed calls {before}, after {count} more {after}")
        assert after[0] - before[0] < 5
        assert after[1] - before[1] < 5
