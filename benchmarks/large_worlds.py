"""Counts what each agent sends in worlds of 2 to 1,000 agents: to join, to wait, to tell all, to stay, to lose one.

The agents are the ones that ship (`nbdist.rpc.agent.Agent`), on the in-process channel, without sockets. One thread
works at a time, with a clock that stands still until all is quiet, so the counts are the same in every run::

    Crowd ── makes ──> Agent, Agent, ...      each on a host of its own, as far as the agents know
      │                  │ send
      │                  v
      │               CountedLink ── counts ──> Inbox of the receiver
      └── settle: the receivers read, one message after the other, until no message is left

A world of n agents has n * n / 2 pairs. Up to `FULL` agents all pairs meet. In larger worlds only the three *watched*
agents meet everybody: the first one, which keeps the list of members as a notebook does, the second one, which is near
the root of the tree of a barrier, and one in the middle. What an agent sends depends on its own pairs only, so the
counts of these three are right. ``tests/rpc/test_large_worlds.py``
compares them with worlds in which all meet.

It also measures, with real sockets on this machine, the open files of a connection between two hosts, and with one and
three real workers the open files and threads that a notebook needs for each worker.

    make bench BENCH=large_worlds                  prints the tables, and draws docs/large_worlds.svg
    make bench BENCH=large_worlds ARGS=--no-plot   prints the tables only
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nbdist.channel.inprocess import InProcessChannel, InProcessLink, Network
from nbdist.channel.secret import Secret
from nbdist.channel.zeromq import ZeroMqChannel, host_identity
from nbdist.cluster.cluster import Cluster
from nbdist.cluster.hosts.losses import Losses
from nbdist.compat import gathering
from nbdist.compat.gathering import _FAN_OUT, all_gather
from nbdist.rpc.agent import Agent
from nbdist.rpc.asking import ask_each
from nbdist.rpc.here import here
from nbdist.rpc.options import RpcBackendOptions
from nbdist.rpc.waits import set_blocking_hook
from nbdist.rpc.world import roster
from nbdist.rpc.world.roster import Roster
from nbdist.testing import ManualClock
from nbdist.wire.messages import Goodbye, Record

SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
FULL = 16
"""The largest world of the table in which all pairs of agents meet."""
STEP = 1 / 16
"""Seconds by which the clock moves at a time. Exact in binary, so that no heartbeat is late by a rounding error."""
INTERVALS = 3
"""Heartbeat intervals, of one second, over which heartbeats are counted."""
TALKING = 4
"""Pairs of agents that talk to each other while the others are idle."""
COMPETING = 128
"""Agents that join at the same moment, where requests to the list of members are counted."""
REQUEST = 1 / 256
"""Seconds that a request to the list of members takes, where agents join at the same moment."""
HEARTBEATS = ("ping", "pong")
PATIENCE = 1e6
"""Seconds, by the clock of the simulation, within which everything ends."""
PICTURE = Path(__file__).parent.parent / "docs" / "large_worlds.svg"


# --- the agents -----------------------------------------------------------------------------------


class Inbox(InProcessChannel):
    """The channel of one agent, which announces each message to the crowd."""

    def __init__(self, crowd: Crowd, index: int) -> None:
        super().__init__(crowd.network, f"inprocess://{index}")
        crowd.network._open[self.address] = self
        self._crowd, self._index = crowd, index

    def connect(self, addresses: Sequence[str], is_large: bool = False) -> InProcessLink:
        return CountedLink(self._crowd, self._index, addresses[0])

    def deliver(self, frames: list[bytes]) -> None:
        super().deliver(frames)
        self._crowd.ready.append((self._index, None))


class CountedLink(InProcessLink):
    """A link that counts what its agent sends."""

    def __init__(self, crowd: Crowd, sender: int, address: str) -> None:
        super().__init__(crowd.network, address)
        self._crowd, self._sender = crowd, sender

    def send(self, frames: Sequence[Any], kind: str) -> None:
        self._crowd.sent[self._sender][kind] += 1
        self._crowd.sent_bytes[self._sender][kind] += sum(map(len, frames))
        super().send(frames, kind)


class Jobs:
    """Stands in for the pool of an agent: its jobs wait until the crowd takes its next step."""

    threads = 0

    def __init__(self, crowd: Crowd, index: int) -> None:
        self._crowd, self._index = crowd, index

    def start(self) -> None:
        pass

    def submit(self, job: Callable[[], None]) -> None:
        self._crowd.ready.append((self._index, job))

    @property
    def active(self) -> int:
        return sum(index == self._index for index, _ in self._crowd.ready)

    def close(self, timeout: float) -> bool:
        return True


class Pausing:
    """Stands in for a condition on which a program waits: meanwhile the other agents work."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        self._crowd.sleeps = True
        self._crowd.pause()
        return True

    def notify_all(self) -> None:
        pass


class Blocked:
    """Stands around a wait for a call: the other agents do their work at its beginning."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd

    def __enter__(self) -> None:
        self._crowd.pause()

    def __exit__(self, *error: object) -> None:
        pass


class Memory:
    """A store for the list of members, in memory; it counts the requests of each agent."""

    def __init__(self) -> None:
        self.text = ""
        self.requests = 0
        self.bytes = 0

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.text == expected:
            self.text = desired
        self.requests += 1
        self.bytes += len(expected) + len(desired) + len(self.text)
        return self.text.encode()


class Program(threading.Thread):
    """A program of one agent. It runs only while the crowd waits for it, until it pauses."""

    def __init__(self, crowd: Crowd, index: int, action: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._crowd, self._index, self._action = crowd, index, action
        self._turn = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.is_over = False

    def run(self) -> None:
        self._turn.acquire()
        set_blocking_hook(lambda: Blocked(self._crowd))
        try:
            with self._crowd.agents[self._index].activate():
                self._action()
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._crowd.baton.release()

    def go_on(self) -> None:
        """Let the program run until it pauses or ends."""
        with self._crowd.at_work(self._index):
            self._turn.release()
            self._crowd.baton.acquire()

    def pause(self) -> None:
        """Let the crowd go on until it is this program's turn again."""
        self._crowd.baton.release()
        self._turn.acquire()


def name_of(index: int) -> str:
    """Return the name of the agent in this place."""
    return "notebook" if index == 0 else f"worker{index - 1}"


class Crowd:
    """A world of agents of which one thread at a time does the work."""

    def __init__(self, size: int, *, full: bool | None = None) -> None:
        self.size = size
        self.watched = sorted({0, min(1, size - 1), size // 2})
        """The places of the agents that meet everybody."""
        self.full = size <= FULL if full is None else full
        """True if all pairs of agents meet."""
        self.clock = ManualClock()
        self.network = Network()
        self.ready: deque[tuple[int, Callable[[], None] | None]] = deque()
        """What is to do next: an agent, by its place, reads a message (None) or runs a job."""
        self.sent: list[Counter[str]] = [Counter() for _ in range(size)]
        """The number of messages that each agent has sent, by kind."""
        self.sent_bytes: list[Counter[str]] = [Counter() for _ in range(size)]
        self.cpu = [0.0] * size
        """Seconds of CPU time that each agent has used."""
        self.baton = threading.Semaphore(0)
        self.agents: list[Agent] = []
        self.gone: set[int] = set()
        self.sleeps = False
        """True if a program wants time to pass until it looks again."""
        self.turn = 0.0
        """Seconds that pass while each program has its turn once."""

    def __enter__(self) -> Crowd:
        self._monotonic = time.monotonic
        time.monotonic = self.clock.now
        set_blocking_hook(lambda: Blocked(self))
        return self

    def __exit__(self, *error: object) -> None:
        for agent in self.agents:
            agent.links.close(None)  # so that nobody says goodbye to a thousand others
            agent.processes.close()
        set_blocking_hook(None)
        time.monotonic = self._monotonic

    def make(self, index: int, world_size: int | None = None) -> Agent:
        """Make and start the next agent, on a host of its own."""
        channel = Inbox(self, index)
        name = name_of(index)
        # As long as the record of a worker on another host, whose bytes go into greetings and the list of members.
        folder = f"/run/user/1000/nbdist/cluster-{index:08}/agent-{10_000 + index}-{index:011x}"
        tcp = f"tcp://10.0.{index // 256}.{index % 256}"
        local = [f"unix://{folder}/socket", f"ipc://{folder}/in", f"ipc://{folder}/large#large"]
        addresses = [*channel.addresses, *local, f"{tcp}:40001", f"{tcp}:40002#large"]
        host = f"{host_identity()}/{index}"
        me = Record(name, index, 1000 + index, addresses, host, os.getpid(), 0, world_size)
        agent = Agent(me, channel, RpcBackendOptions(arena_bytes=0, rpc_timeout=0))
        agent.pool = Jobs(self, index)  # type: ignore[assignment]
        agent.handshake._changed = Pausing(self)  # type: ignore[assignment]
        agent.ending._changed = Pausing(self)  # type: ignore[assignment]
        if not self.full:
            agent.links._members = self.living  # type: ignore[method-assign]  # those that it would have met
        agent.start()
        self.agents.append(agent)
        return agent

    def know_each_other(self, one: int, other: int) -> bool:
        """Return whether two agents meet in this simulation: one is watched, or is above the other in a barrier."""
        if self.full or one == other or one in self.watched or other in self.watched:
            return True
        above, below = sorted((self._places[one], self._places[other]))
        while below > above:
            below = (below - 1) // _FAN_OUT
        return below == above

    def living(self) -> list[Record]:
        """Return the records of all agents that are not gone."""
        return [agent.me for index, agent in enumerate(self.agents) if index not in self.gone]

    def changed(self) -> None:
        """Let all agents choose again whom they watch: those that do not meet all others would not notice a change."""
        for agent in self.agents:
            agent.links._is_stale = True

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        """The place of each agent among all agents, sorted by name."""
        ordered = sorted(range(self.size), key=name_of)
        return {index: place for place, index in enumerate(ordered)}

    # -- steps --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def at_work(self, index: int) -> Iterator[None]:
        """Count the CPU time of the block as that of one agent."""
        began = time.process_time()
        try:
            yield
        finally:
            self.cpu[index] += time.process_time() - began

    def settle(self) -> bool:
        """Let all messages arrive and all jobs run, until nothing is left; return whether there was anything."""
        worked = bool(self.ready)
        while self.ready:
            index, job = self.ready.popleft()
            if index in self.gone:
                continue
            agent = self.agents[index]
            with self.at_work(index):
                before, here.agent = here.agent, agent
                try:
                    if job is None:
                        job = agent.read(0)
                    if job is not None:
                        job()
                finally:
                    here.agent = before
        return worked

    def pause(self) -> None:
        """Let the others work while a program waits."""
        thread = threading.current_thread()
        if isinstance(thread, Program):
            thread.pause()
        else:
            self.settle()

    def run(self, actions: Mapping[int, Callable[[], object]]) -> None:
        """Run a program in each of several agents, at the same time; return when all have ended."""
        programs = [Program(self, index, action) for index, action in actions.items()]
        for program in programs:
            program.start()
        waiting = programs
        while waiting:
            self.sleeps = False
            self.clock.advance(self.turn)
            for program in waiting:
                program.go_on()
            if not self.settle() and self.sleeps:
                self.pass_time(STEP)
            waiting = [program for program in waiting if not program.is_over]
        for program in programs:
            program.join()
            if program.error is not None:
                raise program.error

    def pass_time(self, seconds: float) -> None:
        """Move the clock, and let all agents do what is due."""
        for _ in range(round(seconds / STEP)):
            now = self.clock.advance(STEP)
            for index, agent in enumerate(self.agents):
                if index not in self.gone and agent.links.due <= now:
                    self.ready.append((index, None))  # it finds no message, and does what is due
                    self.settle()

    # -- what happens in a world ------------------------------------------------------------------

    def join_as_a_cluster(self) -> Memory:
        """Let the agents join one after the other, as those of a notebook's cluster; return the store."""
        store = Memory()
        secret = Secret(b"the secret of this simulation", shared_off_host=True)
        for index in range(self.size):
            agent = self.make(index)
            with self.at_work(index):
                present = Roster(lambda: store, secret, agent.me.host).join(agent.me, PATIENCE)
            met = [record for record in present if self.know_each_other(index, record.id)]
            with self.at_work(index):
                dead = agent.handshake.join_dynamic(met, PATIENCE)
            assert not dead
            self.settle()
        self.changed()
        self.losses = Losses(self.agents[0])
        return store

    def join_as_a_program(self) -> None:
        """Let the agents join together, as those of a program with a fixed ``world_size``."""
        for index in range(self.size):
            self.make(index, self.size)
        records = [agent.me for agent in self.agents]

        def join(index: int) -> None:
            known = [record for record in records if self.know_each_other(index, record.id)]
            self.agents[index].handshake.join_fixed(known, PATIENCE)

        self.run({index: partial(join, index) for index in range(self.size)})

    def wait_for_all(self) -> None:
        """Let all agents wait for each other (``_barrier`` of torch.distributed.rpc)."""
        names = [agent.me.name for agent in self.agents]
        # The first one by name comes last, so that it finds all parts; so does each one that collects them.
        order = sorted(range(self.size), key=self._places.__getitem__, reverse=True)
        pause, gathering._LOOK_FOR_LOST_EVERY = gathering._LOOK_FOR_LOST_EVERY, 0.0  # else each wait takes real time
        try:
            self.run({index: partial(all_gather, None, names, 0) for index in order})
        finally:
            gathering._LOOK_FOR_LOST_EVERY = pause

    def shut_down(self) -> None:
        """Let all agents of a fixed world end it together, up to the moment at which each closes its channel."""
        self.run({index: partial(agent.ending.end, 0) for index, agent in enumerate(self.agents)})

    def tell_all(self) -> None:
        """Let the first agent call a function on all others, with the same arguments."""
        names = [agent.me.name for agent in self.agents[1:]]
        self.run({0: partial(ask_each, self.agents[0], abs, dict.fromkeys(names, (-1,)))})

    def talk(self) -> None:
        """Let the notebook and each of a few other agents call each other once."""
        callers = range(1, min(TALKING + 1, self.size))
        self.run({index: partial(self.agents[index].ask, "notebook", abs, -1) for index in callers})

    def lose(self, index: int) -> None:
        """Let one agent die, and the first one hear of it: the keeper of its host tells the notebook."""
        victim = self.agents[index]
        self.gone.add(index)
        victim.channel.close()
        with self.at_work(0):
            self.agents[0].lose(victim.me.incarnation, "died")
        self.changed()
        self.settle()

    def leave(self, index: int) -> None:
        """Let one agent leave in order."""
        with self.at_work(index):
            self.agents[index].links.close(Goodbye("has shut down", orderly=True))
        self.gone.add(index)
        self.changed()
        self.settle()


# --- what is measured -----------------------------------------------------------------------------


@dataclass
class Use:
    """What the busiest agent and the median agent of a world send for one thing."""

    busiest: float
    """Messages."""
    median: float
    busiest_bytes: float
    median_bytes: float
    busiest_cpu: float
    """Seconds of CPU time, on this machine and without sockets."""


CASES = {
    "join": "join a notebook's cluster",
    "join fixed": "join a program's fixed world",
    "barrier": "wait for all (`_barrier`)",
    "shutdown": "`rpc.shutdown()` of a fixed world",
    "broadcast": "call a function on all",
    "idle": "heartbeats, a second, idle",
    "talk": "the same, of an agent that talks with 4 others",
    "loss": "one agent dies",
    "leave": "one agent leaves",
}


def use_of(
    crowd: Crowd, event: Callable[[], object], kinds: Callable[[str], bool], per: int = 1, only: int | None = None
) -> Use:
    """Let something happen; return what the agents sent for it, of messages whose kind is in ``kinds``.

    The numbers are divided by ``per``. With ``only``, they are those of this one agent.
    """
    for counts in (*crowd.sent, *crowd.sent_bytes):
        counts.clear()
    crowd.cpu = [0.0] * crowd.size
    event()
    there = [index for index in range(crowd.size) if crowd.full or index in crowd.watched]
    there = there if only is None else [only]
    sent = [sum(n for kind, n in crowd.sent[index].items() if kinds(kind)) / per for index in there]
    size = [sum(n for kind, n in crowd.sent_bytes[index].items() if kinds(kind)) / per for index in there]
    cpu = max(crowd.cpu[index] for index in there) / per
    # In a world in which not all meet, the last of the watched agents stands for the usual one.
    usual = statistics.median if crowd.full else list[float].pop
    return Use(max(sent), usual(sent), max(size), usual(size), cpu)


def measure(size: int, full: bool | None = None) -> dict[str, Use]:
    """Return what agents send in a world of this size, by case."""
    found: dict[str, Use] = {}

    def is_heartbeat(kind: str) -> bool:
        return kind in HEARTBEATS

    def is_other(kind: str) -> bool:
        return kind not in HEARTBEATS

    with Crowd(size, full=full) as crowd:

        def then(event: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                event()
                crowd.pass_time(2 * STEP)  # acknowledgements that go alone wait for 0.05 s

            return run

        def idle() -> None:
            crowd.pass_time(INTERVALS)

        def talk() -> None:
            for _ in range(round(INTERVALS / STEP / 4)):
                crowd.talk()
                crowd.pass_time(4 * STEP)

        found["join"] = use_of(crowd, crowd.join_as_a_cluster, is_other)
        found["barrier"] = use_of(crowd, then(crowd.wait_for_all), is_other)
        found["broadcast"] = use_of(crowd, then(crowd.tell_all), is_other)
        crowd.pass_time(1.0 + STEP)  # to the second heartbeat
        found["idle"] = use_of(crowd, idle, is_heartbeat, INTERVALS)
        found["talk"] = use_of(crowd, talk, is_heartbeat, INTERVALS, only=0)
        if size > 2:
            found["leave"] = use_of(crowd, then(partial(crowd.leave, size - 1)), is_other)
            found["loss"] = use_of(crowd, then(partial(crowd.lose, size - 2)), is_other)
    with Crowd(size, full=full) as crowd:
        found["join fixed"] = use_of(crowd, crowd.join_as_a_program, is_other)
        found["shutdown"] = use_of(crowd, then(crowd.shut_down), is_other)
    return {name: found[name] for name in CASES if name in found}


def competing(size: int) -> int:
    """Return the requests to the store of agents that join at the same moment: each reads the list before one writes.

    Only the store is simulated here, and no agent meets another. A request takes `REQUEST` seconds.
    """
    store = Memory()
    secret = Secret(b"the secret of this simulation", shared_off_host=True)
    with Crowd(size, full=False) as crowd:
        request = store.compare_set

        def taking_turns(key: str, expected: str, desired: str) -> bytes:
            crowd.pause()
            return request(key, expected, desired)

        def sleep(seconds: float) -> None:
            until = crowd.clock.now() + seconds
            while crowd.clock.now() < until:
                crowd.pause()

        store.compare_set = taking_turns  # type: ignore[method-assign]
        time.sleep, slept = sleep, time.sleep
        roster._random, drawn = random.Random(0), roster._random  # type: ignore[assignment]
        crowd.turn = REQUEST
        joins = {}
        for index in range(size):
            me = crowd.make(index).me
            joins[index] = partial(Roster(lambda: store, secret, me.host).join, me, PATIENCE)
        try:
            crowd.run(joins)
        finally:
            time.sleep, roster._random = slept, drawn
    return store.requests


def list_of_members(size: int) -> tuple[int, int]:
    """Return the bytes of the list of members, and the bytes that all agents move to join one after the other."""
    with Crowd(size, full=False) as crowd:
        crowd.watched = []
        store = crowd.join_as_a_cluster()
        return len(store.text), store.bytes


def ticks(size: int) -> tuple[int, float]:
    """Return how often an idle agent looks at its connections in a second, and the CPU time that this takes.

    The heartbeats of its ``size`` connections are due at as many different moments of each second.
    """
    clock = ManualClock()
    monotonic, time.monotonic = time.monotonic, clock.now
    try:
        channel = Network().open()
        me = Record("worker0", 0, 1, channel.addresses, "here", os.getpid(), 0, None)
        agent = Agent(me, channel, RpcBackendOptions(arena_bytes=0))
        for number in range(size):
            clock.advance(1.0 / size)
            record = Record(f"worker{number + 1}", number + 1, number + 2, ["inprocess://x"], f"{number}", 1, 0, None)
            agent.links.connect(record)
        looks, until, began = 0, clock.now() + 1.0, time.process_time()
        while agent.links.due < until:
            clock.advance(max(agent.links.due - clock.now(), 0.0))
            agent._run_due(clock.now())
            looks += 1
        took = time.process_time() - began
        agent.links.close(None)
        agent.processes.close()
    finally:
        time.monotonic = monotonic
    return looks, took


def memory_of_a_peer(peers: int = 1000) -> float:
    """Return the bytes of Python's memory that an agent needs for each other agent, without ZeroMQ's part."""
    channel = Network().open()
    me = Record("worker0", 0, 1, channel.addresses, "here", os.getpid(), 0, None)
    agent = Agent(me, channel, RpcBackendOptions(arena_bytes=0))
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(peers):
        record = Record(f"worker{number + 1}", number + 1, number + 2, ["inprocess://x"], f"host{number}", 1, 0, None)
        agent.links.connect(record)
        agent.membership.add(record)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    agent.links.close(None)
    agent.processes.close()
    return (after - before) / peers


@dataclass
class Connection:
    """What one agent needs for its connection to and from one agent on another host."""

    files: float
    """Open files, of both directions."""
    memory: float
    """Bytes of resident memory."""


def connection(links: int = 300) -> Connection:
    """Measure what encrypted connections take, with two channels of this process and the loopback interface."""
    secret = Secret(b"the secret of this measurement", shared_off_host=True)
    channels = [
        ZeroMqChannel(f"measured-{os.getpid()}-{number}", secret, local=False, host="127.0.0.1") for number in range(2)
    ]
    try:
        sender, receiver = channels

        def connect(count: int) -> list[Any]:
            made = [sender.connect(receiver.addresses) for _ in range(count)]
            for link in made:
                link.send([b"hello"], "call")
            for _ in made:
                while receiver.receive(10.0) is None:
                    pass
            return made

        kept = connect(10)
        before = len(os.listdir("/proc/self/fd")), resident()
        kept += connect(links)
        after = len(os.listdir("/proc/self/fd")), resident()
        return Connection((after[0] - before[0]) / links, (after[1] - before[1]) / links)
    finally:
        for channel in channels:
            channel.close()


def needs_of_a_notebook(workers: int) -> tuple[int, int]:
    """Start so many workers on this machine as workers of other hosts; return the notebook's open files and threads."""
    os.environ["NBDIST_CHANNEL"] = "zeromq"  # as between hosts
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        invitation = Path(folder) / "invitation.json"
        command = [sys.executable, "-m", "nbdist", "worker", "--connect", str(invitation)]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

        def start() -> None:
            while not (invitation.exists() and invitation.stat().st_size):
                time.sleep(0.05)
            for _ in range(workers):
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **quiet)
                ends.callback(process.wait)

        starting = threading.Thread(target=start, daemon=True)
        starting.start()
        with Cluster(
            workers, launcher="join", host="127.0.0.1", invitation=str(invitation), backend="none", timeout=300
        ) as cluster:
            starting.join()
            cluster.execute("pass")
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def resident() -> int:
    """Return the resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# --- what is shown --------------------------------------------------------------------------------


def tables(found: Mapping[int, Mapping[str, Use]]) -> str:
    """Return the tables, as Markdown: messages, then bytes."""
    parts = []
    for title, fields in (
        ("messages that one agent sends: busiest, median", ("busiest", "median")),
        ("bytes that one agent sends: busiest, median", ("busiest_bytes", "median_bytes")),
    ):
        lines = [f"| {title} | {' | '.join(f'{size:,}' for size in found)} |", f"| --- |{' ---: |' * len(found)}"]
        for case, words in CASES.items():
            cells = []
            for uses in found.values():
                use = uses.get(case)
                cells.append("-" if use is None else ", ".join(short(getattr(use, field)) for field in fields))
            lines.append(f"| {words} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def short(number: float) -> str:
    """Return a number in a few characters."""
    for above, unit, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if number >= above:
            return f"{number / unit:.3g} {name}"
    return f"{number:,.0f}" if number == round(number) else f"{number:,.1f}"


def draw(found: Mapping[int, Mapping[str, Use]], path: Path) -> None:
    """Draw the messages of the busiest agent and of the median one, over the number of agents."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = {
        "joining": ("join", "join fixed"),
        "waiting for all": ("barrier", "shutdown"),
        "telling all, losing one": ("broadcast", "loss"),
        "heartbeats, a second": ("idle", "talk"),
    }
    for axes, (title, cases) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for number, case in enumerate(cases):
            sizes = [size for size, uses in found.items() if case in uses]
            for field, style in (("busiest", "-o"), ("median", "--s")):
                if case == "talk" and field == "median":
                    continue  # it is about one agent
                ys = [getattr(found[size][case], field) for size in sizes]
                axes.plot(sizes, ys, style, color=f"C{number}", markersize=3, label=f"{case}, {field}")
        axes.set(title=title, xlabel="agents", xscale="log", yscale="symlog", ylim=(0, None))
        axes.set_xticks([2, 16, 128, 1000], ["2", "16", "128", "1000"])
        axes.minorticks_off()
        axes.title.set_fontsize(10)
        axes.legend(fontsize=7)
    figure.supylabel("messages that one agent sends", fontsize=10)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--json", help="write the raw numbers to this file")
    parser.add_argument("--no-plot", action="store_true", help="leave docs/large_worlds.svg as it is")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import harness

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each agent here has a pipe
    threading.stack_size(1 << 20)
    print(f"{harness.machine()}\n", flush=True)
    largest = max(options.sizes)
    found: dict[int, dict[str, Use]] = {}
    for size in options.sizes:
        began = time.perf_counter()
        found[size] = measure(size)
        print(f"{size} agents: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    print(tables(found))
    cpu = ", ".join(f"{words} {found[largest][case].busiest_cpu:.2g} s" for case, words in CASES.items())
    print(f"\nCPU time of the busiest of {largest:,} agents, without sockets: {cpu}")
    text, moved = list_of_members(largest)
    print(f"\nThe list of {largest:,} members has {short(text)}B; all together move {short(moved)}B to join in turn.")
    few = min(COMPETING, largest)
    requests = competing(few)
    print(f"If {few} agents join at the same moment, they send {requests:,} requests to the list.")
    looks, took = ticks(largest)
    print(f"An idle agent looks {looks} times a second at {largest:,} connections: {took:.2g} s of CPU time.")
    python = memory_of_a_peer()
    wire = connection()
    print(
        f"A connection to and from an agent on another host: {wire.files:.1f} open files; {short(wire.memory)}B of "
        f"ZeroMQ's and {short(python)}B of Python's memory."
    )
    (few_files, few_threads), (files, threads) = needs_of_a_notebook(1), needs_of_a_notebook(3)
    each = (files - few_files) / 2, (threads - few_threads) / 2
    print(
        f"A notebook with one worker on another host has {few_files} open files and {few_threads} threads; with each "
        f"further worker {each[0]:.0f} files and {each[1]:.0f} threads more."
    )
    raw = {
        "cases": {size: {case: asdict(use) for case, use in uses.items()} for size, uses in found.items()},
        "list": {"bytes": text, "moved": moved, "requests": requests},
        "ticks": {"looks": looks, "seconds": took},
        "connection": {**asdict(wire), "python": python},
        "notebook": {"files": few_files, "threads": few_threads, "files of a worker": each[0]},
    }
    harness.write(raw, options.json)
    if not options.no_plot:
        draw(found, PICTURE)


if __name__ == "__main__":
    main()
