"""Strangers at every TCP port of a cluster with a worker on another host (G6).

The crowd is on a host of its own. Which kinds of strangers there are stands in `stranger_crowd.py`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import statistics
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
import zmq
from helpers.abuse import stranger_crowd
from helpers.hosts.keepers import cluster_on
from helpers.hosts.other_hosts import can_make_hosts, hosts
from helpers.waiting import wait_until

from nbdist import rpc
from nbdist.channel import framing
from nbdist.channel.secret import Secret
from nbdist.rpc.world.shared_store import ENTRANCE
from nbdist.wire import codec
from nbdist.wire.messages import Call, Envelope, encode_envelope

pytestmark = pytest.mark.skipif(
    not can_make_hosts(), reason="only root can make hosts, and only where the kernel allows it"
)

MOST_OPEN = 300
"""Strangers that are open at a time."""
PER_SECOND = 120
MOST_GROWN = 16 << 20
"""The bytes by which the notebook may grow, whatever the number of strangers.

An open connection takes 16 KB for ZeroMQ's two buffers alone. If something stayed of each of 10,000 strangers, half of
whom come to the notebook, the notebook would grow by 80 MB or more.
"""
MARK = "/tmp/a-stranger-was-here"


class Recorder:
    """Passes one connection on to a door, and keeps what comes from the side that connects."""

    def __init__(self, door: str) -> None:
        host, _, port = door.removeprefix("tcp://").rpartition(":")
        self._door = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.recorded = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._door)
        answers = threading.Thread(target=self._copy, args=(far, near), daemon=True)
        answers.start()
        self.recorded = self._copy(near, far)
        answers.join(5)
        near.close()
        far.close()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> bytes:
        seen = b""
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        return seen

    def end(self) -> bytes:
        """Return what was recorded, once the connection has ended."""
        self._thread.join(10)
        self._listener.close()
        return self.recorded


def exploit(record) -> bytes:
    """A call that would make a folder, as a link of nbdist sends it."""
    payload, frames, *_ = codec.encode(("os:mkdir", (MARK,), {}))
    envelope = Envelope(1, record.incarnation, 1, 1, 0, [], Call(1, 0, "mkdir", payload))
    frames = [encode_envelope(envelope), *(bytes(frame) for frame in frames)]
    return framing.head([*map(len, frames)]) + b"".join(frames)


def record(door: str, secret: Secret, message: bytes) -> bytes:
    """Connect to a door as a member, send a message; return all that went there."""
    recorder = Recorder(door)
    with zmq.Context() as context, context.socket(zmq.PUSH) as sock:
        sock.curve_publickey, sock.curve_secretkey = secret.curve("member")
        sock.curve_serverkey = secret.curve("door").public
        sock.connect(recorder.address)
        sock.send(message)
    recorded = recorder.end()
    assert len(recorded) > 500
    return base64.b64encode(recorded).decode()


def doors_of(cluster) -> list[dict[str, str]]:
    """Return the TCP ports of the cluster, and what a stranger may know of each."""
    hub = cluster.lifecycle.launcher.hub
    secret, found = Secret(hub.secret.encode(), shared_off_host=True), []
    agents = [cluster.agent.me, hub.agent.me, hub.members[0].record]
    agents += [each for each in cluster.agent.members() if each.name == "worker0"]
    for agent in agents:
        for address in agent.addresses:
            if address.startswith("tcp://"):
                door, message = address.partition("#")[0], exploit(agent)
                found.append(
                    {
                        "address": door,
                        "key": secret.curve("door").public.decode(),
                        "socket": "PUSH",
                        "message": base64.b64encode(message).decode(),
                        "recorded": record(door, secret, message),
                    }
                )
    at_the_entrance = {
        "address": hub.entrance.address,
        "key": secret.curve(ENTRANCE).public.decode(),
        "socket": "DEALER",
    }
    return [*found, found[0] | at_the_entrance]


def send(host, doors, count: int) -> subprocess.Popen[bytes]:
    """Have so many strangers come from a host."""
    wanted = {"doors": doors, "count": count, "per_second": PER_SECOND, "open": MOST_OPEN}
    return host.start(stranger_crowd.__file__, stdin=json.dumps(wanted).encode(), stdout=subprocess.PIPE)


def latencies(so_long) -> list[float]:
    """Return the times of empty calls to worker0, in order of size, that were made while ``so_long()`` is true."""
    found = []
    while so_long():
        began = time.perf_counter()
        rpc.rpc_sync("worker0", os.getpid)
        found.append(time.perf_counter() - began)
        time.sleep(0.002)
    return sorted(found)


def refusals(cluster) -> list[int]:
    """Return the messages that reached an agent of nbdist and were refused: of the notebook, the hub and worker0."""
    there = "__import__('nbdist.rpc.api').rpc.api.current_agent().statistics()['messages_refused']"
    hub = cluster.lifecycle.launcher.hub
    return [cluster.agent.refused, hub.agent.refused, rpc.rpc_sync("worker0", eval, args=(there,))]


def footprints(cluster) -> list[int]:
    """Return the open files of the notebook and of worker0, and the notebook's memory in bytes."""
    files = rpc.rpc_sync("worker0", os.listdir, args=("/proc/self/fd",))
    return [len(os.listdir("/proc/self/fd")), len(files), psutil.Process().memory_info().rss]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_crowd_of_strangers_gets_nowhere(tmp_path, count):
    with hosts(2) as (address, (other, theirs)), cluster_on([other], address, tmp_path, timeout=60) as cluster:
        hub = cluster.lifecycle.launcher.hub
        doors = doors_of(cluster)
        assert len(doors) == 9
        first = send(theirs, doors, min(count, 400))
        with first.stdout:
            assert first.wait(60) == 0
        time.sleep(6)  # the doors close what has not shown a key within 5 seconds
        end = time.monotonic() + 2
        before = latencies(lambda: time.monotonic() < end)
        refused = refusals(cluster)
        assert min(refused) > 0, "as a member, the recorder came as far as the agents"
        members = cluster.agent.members(), hub.agent.members()
        files, worker_files, memory = footprints(cluster)

        attack = send(theirs, doors, count)
        during = latencies(lambda: attack.poll() is None)
        with attack.stdout:
            came = json.loads(attack.stdout.read())
        assert sum(came[kind] for kind in stranger_crowd.KINDS) == count

        def files_are_closed() -> bool:
            here, there, _ = footprints(cluster)
            return here <= files and there <= worker_files

        wait_until(files_are_closed, within=30)
        grown = footprints(cluster)[2] - memory
        for name, times in (("before", before), ("during", during)):
            tenth = times[len(times) * 9 // 10]
            print(f"{name}: median {statistics.median(times) * 1e6:.0f} µs, 9 of 10 below {tenth * 1e6:.0f} µs")
        print(f"{came}, the notebook has grown by {grown / 1e6:.1f} MB")
        assert grown < MOST_GROWN
        if count >= 10_000:  # else it is over before the 5 seconds are
            assert came["slow, turned away"] > came["slow"] / 2
        assert refusals(cluster) == refused
        assert (cluster.agent.members(), hub.agent.members()) == members
        assert not Path(MARK).exists()
        assert not rpc.rpc_sync("worker0", os.path.exists, args=(MARK,))
        assert cluster.evaluate("rank", 0) == 0
