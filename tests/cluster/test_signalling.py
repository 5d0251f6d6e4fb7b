"""When a worker is signalled whose next cell has not begun: after a while, and only once."""

import asyncio
import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nbdist.cluster import interrupting
from nbdist.cluster.kernels.cells import CellPart


@pytest.mark.parametrize(
    ("began", "ended", "times"),
    [
        (None, None, 1),  # it holds the GIL, or the worker does something else
        (0.02, 0.03, 0),  # it was skipped
        (0.02, None, 1),  # it began before the worker was told
        (0.2, 0.21, 1),  # the worker did something else, and skipped it afterwards
        (0.2, None, 1),  # it held the GIL; a second signal would hit its cleanup
    ],
)
def test_a_next_cell_is_called_off_and_signalled_if_it_does_not_end(began, ended, times, monkeypatch):
    monkeypatch.setattr(interrupting, "_SIGNAL_ANYWAY_AFTER", 0.1)
    monkeypatch.setattr(interrupting, "_SKIP_CONFIRMED_WITHIN", 0.1)
    signals, told = [], []
    kernel = SimpleNamespace(send=lambda *_: None)
    part = CellPart("worker0", "1")
    cell: Any = SimpleNamespace(parts={"worker0": part})
    team = SimpleNamespace(find=lambda name: SimpleNamespace(kernel=kernel, cells=[cell]))
    output = SimpleNamespace(call=lambda method, *args, timeout: told.append((method, *args)))
    agent = SimpleNamespace(at=lambda name, object: {("worker0", "output"): output}[name, object])
    launcher = SimpleNamespace(signal=lambda name, number: signals.append((name, number)))
    interrupts: Any = interrupting.Interrupts(team, Mock(), agent, launcher)

    async def interrupt():
        interrupting = asyncio.ensure_future(interrupts.interrupt([(cell, part)]))
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        if began is not None:
            loop.call_later(began, part.begin)
        if ended is not None:
            loop.call_later(ended, setattr, part, "done", True)
        await asyncio.sleep(0.3)  # a worker that has not stopped after 0.4 s is asked to leave its collective
        interrupting.cancel()

    asyncio.run(interrupt())
    assert told == [("call_off", "1")]
    assert signals == [("worker0", signal.SIGINT)] * times
