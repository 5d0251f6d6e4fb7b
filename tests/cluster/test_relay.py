"""The relay between a kernel of another host and the notebook: what it costs, and what a flood of output does."""

import resource
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import zmq
from helpers.waiting import wait_until

from nbdist.cluster.hosts.hub import Hub
from nbdist.cluster.jupyter.relay import Relay

MB = 1 << 20


def seconds_of_cpu(during) -> float:
    """The processor time that this process uses while `during` runs."""
    begin = resource.getrusage(resource.RUSAGE_SELF)
    during()
    end = resource.getrusage(resource.RUSAGE_SELF)
    return end.ru_utime - begin.ru_utime + end.ru_stime - begin.ru_stime


def rest(*pids: int) -> bool:
    """Whether no thread of these processes runs, or waits for a processor, for a second."""
    for _ in range(20):
        for task in [each for pid in pids for each in Path(f"/proc/{pid}/task").glob("*/stat")]:
            if task.read_text().rpartition(")")[2].split()[0] == "R":
                return False
        time.sleep(0.05)
    return True


@pytest.fixture
def connection(tmp_path):
    ports = {"shell_port": 1, "iopub_port": 2, "stdin_port": 3, "control_port": 4}
    return {"ip": f"{tmp_path}/k", "key": "the key", **ports}


@pytest.fixture
def output():
    """The socket of a kernel's output."""
    context = zmq.Context()
    socket = context.socket(zmq.XPUB)
    socket.sndhwm = 0
    yield socket
    context.destroy(0)


def test_a_relay_without_work_uses_no_processor(connection):
    relay = Relay.before_notebook(connection, lambda batch: None)
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe(b"")
    subscriber.connect(f"ipc://{connection['ip']}-2")
    time.sleep(0.2)
    assert seconds_of_cpu(lambda: time.sleep(0.5)) < 0.25  # it would be 0.5
    context.destroy(0)
    time.sleep(0.2)
    assert seconds_of_cpu(lambda: time.sleep(0.5)) < 0.25
    relay.close()


def test_a_relay_that_has_no_room_uses_no_processor(connection, output):
    carried, let = [], threading.Event()

    def carry(batch) -> None:
        let.wait()
        carried.extend(batch)

    output.bind(f"ipc://{connection['ip']}-2")
    relay = Relay.before_kernel(connection, carry)
    output.recv()  # the relay's subscription
    for _ in range(100):
        output.send(bytes(MB))  # no text, so it must arrive
    time.sleep(0.5)
    assert seconds_of_cpu(lambda: time.sleep(0.5)) < 0.25
    let.set()
    wait_until(lambda: len(carried) == 100)
    relay.close()


FLOOD = """
import pathlib, sys
for number in range(3000):
    print(f"<{number}>" + "x" * 50_000)
    sys.stdout.flush()
pathlib.Path(PRINTED).touch()
"""


def test_a_worker_that_floods_a_notebook_that_stands_still_is_bounded(keepers, tmp_path, monkeypatch):
    """150 MB of output; the notebook takes none before all of it is printed."""
    takes, deliver, texts = threading.Event(), Hub.deliver, []

    def deliver_later(hub, worker, batch):
        takes.wait(60)
        texts.extend(bytes(frames[-1]).decode() for channel, frames in batch if channel == "iopub")
        deliver(hub, worker, batch)

    monkeypatch.setattr(Hub, "deliver", deliver_later)
    takes.set()
    with keepers.cluster(1, backend="none") as cluster:
        keeper = psutil.Process(keepers.processes[0].pid)
        before = keeper.memory_info().rss
        takes.clear()
        printed = tmp_path / "printed"
        cell = cluster.execute(f"PRINTED = {str(printed)!r}\n{FLOOD}", block=False)
        wait_until(printed.exists, within=60)
        # Nothing tells when the relay has read all of it.
        wait_until(partial(rest, keeper.pid, cluster.workers[0].pid), within=60)
        assert keeper.memory_info().rss - before < 120 * MB
        takes.set()
        cell.wait()
    found = "".join(texts)
    assert all(f"<{number}>" in found for number in (*range(50), *range(2950, 3000)))
    assert "<1500>" not in found
    assert found.count("of output are left out: they came faster than the notebook could read them") == 1
