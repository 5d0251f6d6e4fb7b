"""Measures calls between two hosts, with nbdist and with torch's RPC over TCP: small calls, large tensors, or both.

The hosts are two network and mount namespaces of this machine, so only root can run it: ``make bench BENCH=hosts``. It
prints its tables and writes nothing. "plain" is nbdist without encryption, which no option of nbdist's allows: the two
processes of this benchmark replace the functions that set the keys.

Each round runs torch, plain and encrypted calls one after the other, each with two processes of its own. The process
that is called runs on one core and the caller on another, if there are two. With ``--free``, the system places the
threads of both, as it does for a notebook's workers.

``--delay`` measures something else: how long 100 calls that begin together take over a line of 50 ms, in round trips.
The delay is that of the tests' relay, a process that holds each packet for 25 ms. A round trip is one message and its
echo over a plain TCP connection through the same relay, in the same processes. 100 such messages at once stand beside
the calls: they say what the relay itself costs. Both hosts use TCP with Reno: BBR spreads out bursts. Where the cores
are chosen, ZeroMQ's thread shares the caller's core, and sends the first call only when the caller has made all of its
100 calls, 2 ms later.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

SIDES = ("torch", "plain", "curve")
BESIDE = "small call beside 64 MB both ways"
SLOWEST = f"{BESIDE}: 9 of 10 take less than"
LIMITS = {"small call": (0.9, 1.2), "64 MB": (1.2, 5.0)}
"""By case: the limits of plain and of encrypted calls, beside torch."""
LIMIT_BESIDE = 3.0
"""The limit of a small call beside large ones, in times of a small call without them."""
DELAYED_SIDES = ("plain TCP", *SIDES)
ONE_WAY = 0.025
"""Seconds of delay for each way."""
TOGETHER = 100
"""Calls that begin together."""
LIMIT_DELAYED, AIM_DELAYED = 1.2, 1.05
"""The limit and the aim of nbdist's calls that begin together, in round trips."""
ECHO_PORT = 29600
"""The port of the callee at which bytes come back."""
FREE = "NBDIST_BENCH_FREE"
"""If this variable is set, the system places the threads of the processes."""
LARGE = 1 << 24
"""Elements of a tensor of 64 MB."""

_over = threading.Event()


def echo(x: torch.Tensor) -> torch.Tensor:
    """Return what came."""
    return x


def end() -> None:
    """The callee is no longer needed."""
    _over.set()


def nothing() -> None:
    """Do nothing."""


def spent(run: Any, times: int) -> list[float]:
    """Return the seconds of each of so many calls, in order of size, after a few to warm up."""
    found = []
    for _ in range(times + times // 5 + 2):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return sorted(found[-times:])


def join(side: str, rank: int, master: str, host: str, interface: str) -> Any:
    """Become agent ``rank`` of two; return the library's rpc module."""
    torch.set_num_threads(1)
    if FREE not in os.environ:
        os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    if side == "torch":
        import torch.distributed.rpc as rpc

        os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = interface
        options: Any = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://{master}:29500", rpc_timeout=300, _transports=["uv"], _channels=["basic"]
        )
    else:
        from nbdist import rpc  # type: ignore[no-redef]
        from nbdist.channel import zeromq

        if side == "plain":
            link = zeromq.ZeroMqChannel._link
            zeromq.ZeroMqChannel._secured = lambda self, sock: None  # type: ignore[method-assign]
            zeromq.ZeroMqChannel._link = lambda self, address, curve, is_large: link(
                self, address, curve=False, is_large=is_large
            )  # type: ignore
        options = rpc.RpcBackendOptions(
            init_method=f"tcp://{master}:29500", rpc_timeout=300, host=host, secret="a secret of this benchmark"
        )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    return rpc


def call(side: str, master: str, host: str, interface: str, streams: bool) -> dict[str, float]:
    """Be the caller: measure, and return seconds by case."""
    rpc = join(side, 0, master, host, interface)
    small, large = torch.ones(2), torch.ones(LARGE)
    found = {
        "small call": statistics.median(spent(lambda: rpc.rpc_sync("worker1", echo, args=(small,)), 300)),
        "64 MB": statistics.median(spent(lambda: rpc.rpc_sync("worker1", echo, args=(large,)), 5)),
    }
    if streams:
        busy = threading.Event()

        def stream() -> None:
            while not busy.is_set():
                rpc.rpc_sync("worker1", echo, args=(large,))

        threads = [threading.Thread(target=stream) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        beside = spent(lambda: rpc.rpc_sync("worker1", echo, args=(small,)), 150)
        found[BESIDE], found[SLOWEST] = statistics.median(beside), beside[int(0.9 * len(beside))]
        busy.set()
        for thread in threads:
            thread.join()
    rpc.rpc_sync("worker1", end)
    rpc.shutdown()
    return found


def measure(side: str, streams: bool) -> dict[str, float]:
    """Run one side on two new hosts; return seconds by case."""
    from helpers.hosts.other_hosts import hosts

    with hosts(2) as (_, (first, second)):
        sides = []
        for rank, host in enumerate((first, second)):
            arguments = [str(Path(__file__)), "--side", side, str(rank), first.address, host.address, host.interface]
            arguments += ["--streams"] if streams else []
            sides.append(host.start(*arguments, stdout=subprocess.PIPE, environment=_environment()))
        assert sides[0].stdout is not None
        said = sides[0].stdout.read()
        for each in sides:
            each.wait(60)
        found: dict[str, float] = json.loads(said.decode().splitlines()[-1])
        return found


def _environment() -> dict[str, str]:
    """Return the variables for a process of this benchmark."""
    return {"OMP_NUM_THREADS": "1"} | ({FREE: "1"} if FREE in os.environ else {})


def serve_echoes(host: str) -> None:
    """Send back what comes at the echo port; return at once."""
    listener = socket.create_server((host, ECHO_PORT))

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := connection.recv(65536):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()


def echoes(connection: socket.socket, messages: int) -> None:
    """Send so many messages of 100 bytes, one by one, and wait until all have come back."""
    for _ in range(messages):
        connection.sendall(bytes(100))
    missing = 100 * messages
    while missing:
        missing -= len(connection.recv(65536))


def connect_to_echoes(host: str) -> socket.socket:
    """Connect to the echo port of a host, once it listens; TCP sends each message at once."""
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection((host, ECHO_PORT))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


def call_far(side: str, master: str, host: str, interface: str, callee: str) -> dict[str, float]:
    """Be the caller over a line with delay: return seconds of a round trip, and of calls that begin together."""
    rpc = None if side == "plain TCP" else join(side, 0, master, host, interface)
    with connect_to_echoes(callee) as connection:
        found = {"trip": statistics.median(spent(lambda: echoes(connection, 1), 20))}

        def together() -> None:
            if rpc is None:
                echoes(connection, TOGETHER)
                return
            calls = [rpc.rpc_async("worker1", nothing) for _ in range(TOGETHER)]
            for each in calls:
                each.wait()

        times = spent(together, 20)
        found |= {"together": statistics.median(times), "slowest": times[-1]}
    if rpc is not None:
        rpc.rpc_sync("worker1", end)
        rpc.shutdown()
    return found


def measure_far(side: str) -> dict[str, float]:
    """Run one side on two new hosts with 50 ms between them; return seconds."""
    from helpers.hosts.other_hosts import hosts
    from helpers.hosts.relay import relay

    with hosts(2) as (_, (first, second)), relay(second, ONE_WAY):
        sides = []
        for rank, host in enumerate((first, second)):
            host.use_reno()
            arguments = [str(Path(__file__)), "--side", side, str(rank), first.address, host.address, host.interface]
            arguments += ["--delay", "--callee", second.address]
            sides.append(host.start(*arguments, stdout=subprocess.PIPE, environment=_environment()))
        assert sides[0].stdout is not None
        found: dict[str, float] = json.loads(sides[0].stdout.read().decode().splitlines()[-1])
        if side == "plain TCP":
            second.kill()
        for each in sides:
            each.wait(60)
        return found


def report_far(count: int) -> None:
    """Measure calls over a line with delay in so many rounds, and print a table."""
    rounds = [{side: measure_far(side) for side in DELAYED_SIDES} for _ in range(count)]
    where = "the system places the threads" if FREE in os.environ else "one core for each process"
    print(f"{TOGETHER} empty calls that begin together, on a line of {2 * ONE_WAY * 1e3:g} ms; {where}")
    print(f"{'side':12}{'a round trip':>16}{'all calls':>16}{'in round trips':>16}{'the slowest':>16}")
    for side in DELAYED_SIDES:
        trip, together = (statistics.median(each[side][name] for each in rounds) for name in ("trip", "together"))
        ratio, slowest = (
            statistics.median(each[side][name] / each[side]["trip"] for each in rounds)
            for name in ("together", "slowest")
        )
        print(f"{side:12}{trip * 1e3:>13.2f} ms{together * 1e3:>13.2f} ms{ratio:>16.3f}{slowest:>16.3f}", flush=True)
    print(f"limit of plain and encrypted calls: {LIMIT_DELAYED} round trips; aim {AIM_DELAYED}")


def main() -> None:
    """Measure in rounds, and print a table of medians and of ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay", action="store_true", help="calls that begin together, on a line of 50 ms")
    parser.add_argument("--free", action="store_true", help="let the system place the threads of the processes")
    parser.add_argument("--streams", action="store_true", help="also small calls while large tensors go both ways")
    parser.add_argument("--side", nargs=5)
    parser.add_argument("--callee", help="with --side, the address of the callee")
    given = parser.parse_args()
    if given.free:
        os.environ[FREE] = "1"
    if given.side:
        side, rank, master, host, interface = given.side
        if given.delay and rank == "1":
            serve_echoes(host)
        if side == "plain TCP" and rank == "1":
            _over.wait()
        elif given.delay and rank == "0":
            print(json.dumps(call_far(side, master, host, interface, given.callee)), flush=True)
        elif rank == "0":
            print(json.dumps(call(side, master, host, interface, given.streams)), flush=True)
        else:
            rpc = join(side, 1, master, host, interface)
            _over.wait()
            rpc.shutdown()
        return
    if given.delay:
        report_far(given.rounds)
        return
    rounds = [{side: measure(side, given.streams) for side in SIDES} for _ in range(given.rounds)]
    print(f"{'case':58}{'torch':>12}{'plain':>12}{'curve':>12}{'plain/torch':>14}{'curve/torch':>14}  limits")
    for case in rounds[0]["plain"]:
        medians = {side: statistics.median(each[side][case] for each in rounds) for side in SIDES}
        ratios = {
            side: statistics.median(each[side][case] / each["torch"][case] for each in rounds) for side in SIDES[1:]
        }
        shown = "".join(f"{medians[side] * 1e6:>9,.0f} µs" for side in SIDES)
        limits = " and ".join(map(str, LIMITS.get(case, ())))
        print(f"{case:58}{shown}{ratios['plain']:>14.2f}{ratios['curve']:>14.2f}  {limits}", flush=True)
    if given.streams:
        times = {
            side: statistics.median(each[side][BESIDE] / each[side]["small call"] for each in rounds) for side in SIDES
        }
        shown = ", ".join(f"{side} {ratio:.1f}" for side, ratio in times.items())
        print(f"{BESIDE}, in times of one alone: {shown}; limit {LIMIT_BESIDE:g}")


if __name__ == "__main__":
    main()
