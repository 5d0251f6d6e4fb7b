"""When a worker is signalled: once, as soon as its cell has begun, or after a while where it cannot say so."""

import asyncio
import signal
from types import SimpleNamespace

import pytest

from nbdist.cluster import interrupting
from nbdist.cluster.kernels.cells import CellPart


@pytest.mark.parametrize("says_so", [0.0, 0.1, None])
def test_a_cell_that_has_not_begun_is_signalled_once(says_so, monkeypatch):
    monkeypatch.setattr(interrupting, "_SIGNAL_ANYWAY_AFTER", 0.05)
    signals = []
    kernel = SimpleNamespace(send=lambda *_: None)
    cluster = SimpleNamespace(
        signal=lambda name, number: signals.append((name, number)), find=lambda name: SimpleNamespace(kernel=kernel)
    )

    async def interrupt():
        part = CellPart("worker0", "1")
        interrupting._signal(cluster, part)
        if says_so is not None:
            await asyncio.sleep(says_so)
            for call in part.when_begun:
                call()
        await asyncio.sleep(0.3)

    asyncio.run(interrupt())
    assert signals == [("worker0", signal.SIGINT)]
