"""A world of agents in one process, whose channels can fail on purpose; and a clock that the test moves."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Literal

from nbdist.channel.contract import Channel
from nbdist.channel.faulty import Faults, FaultyChannel
from nbdist.channel.inprocess import Network
from nbdist.channel.local import LocalChannel
from nbdist.channel.process_watch import started_at
from nbdist.channel.secret import Secret
from nbdist.channel.shared_memory.arena import open_arena
from nbdist.channel.zeromq import ZeroMqChannel, host_identity
from nbdist.errors import UsageError
from nbdist.ids import new_incarnation
from nbdist.rpc.agent import Agent
from nbdist.rpc.core.members import WorkerInfo
from nbdist.rpc.options import RpcBackendOptions
from nbdist.wire.messages import Record


class ManualClock:
    """A clock that stands still until a test moves it. It shows ``start`` seconds at first.

    The pure parts of nbdist, such as `nbdist.wire.peer.Peer`, take the time as an argument; a test gives them this
    clock's.

    Example:
        >>> clock = ManualClock()
        >>> clock.advance(2.5)
        1002.5
        >>> clock.now()
        1002.5
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def now(self) -> float:
        """Return the clock's time in seconds."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Move the clock forward by ``seconds``, and return its new time. Raises UsageError if negative or NaN."""
        if not seconds >= 0:  # NaN, too
            raise UsageError(f"a clock cannot be moved back: advance() was given {seconds:g} s")
        self._now += seconds
        return self._now


class World:
    """A world of several agents in this process, ``worker0``, ``worker1`` and so on.

    Inside ``with world[0].activate():`` the functions of `nbdist.rpc` act for ``worker0``. Leaving the ``with`` block
    of the world closes all agents at once; `shutdown` ends the world in order.

    Args:
        size: how many agents the world begins with.
        channel: ``"inprocess"`` for queues; ``"local"`` for unix sockets, ``"zeromq"`` for ZeroMQ over ``ipc://``.
        faults: the faults of every agent's channel, from the handshake on. The object is also ``world.faults``, and a
            test may change it while the world runs.
        options: as for `nbdist.rpc.init_rpc`; its ``init_method`` is ignored.
        dynamic: whether agents may join (`add`) and leave later.
        apart: True to let every agent treat the others as workers on other hosts, so that a silent agent is lost.
        timeout: how long joining may take, in seconds.

    Raises:
        UsageError: the size or the channel is not possible.
        RendezvousError: the agents did not meet in time; with faults, this may be intended. They are closed then.
        TypeError: the size or the time is no number.

    Example:
        >>> with World(2) as world, world[0].activate():
        ...     rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
        tensor([4., 4.])
    """

    def __init__(
        self,
        size: int,
        *,
        channel: Literal["inprocess", "local", "zeromq"] = "inprocess",
        faults: Faults | None = None,
        options: RpcBackendOptions | None = None,
        dynamic: bool = False,
        apart: bool = False,
        timeout: float = 30.0,
    ) -> None:
        if channel not in ("inprocess", "local", "zeromq"):
            raise UsageError(f'channel must be "inprocess", "local" or "zeromq", not {channel!r}')
        if size < 1 and not dynamic:
            raise UsageError(f"a fixed world needs at least one agent, not {size}; a dynamic one may begin with none")
        self.faults = faults
        self.agents: list[Agent] = []
        self._channel = channel
        self._options = options or RpcBackendOptions()
        self._dynamic = dynamic
        self._apart = apart
        self._timeout = timeout
        self._network = Network()
        self._secret = Secret(secrets.token_bytes(32), shared_off_host=True)
        try:
            if dynamic:
                for _ in range(size):
                    self.add()
            else:
                for id in range(size):
                    self.agents.append(self._make(f"worker{id}", id, size))
                world = [agent.me for agent in self.agents]
                deadline = time.monotonic() + timeout
                # In threads: each of them waits until it has met all others.
                self._all_at_once(lambda agent: agent.handshake.join_fixed(world, deadline))
        except BaseException:  # also Ctrl-C: nobody else has the agents, whose threads would run on
            self.close()
            raise

    # -- joining ------------------------------------------------------------------------------

    def _make(self, name: str, id: int, size: int | None) -> Agent:
        """Make and start an agent; ``size`` is the number of agents in a fixed world, None in a dynamic one."""
        incarnation = new_incarnation()
        channel = self._open(f"{os.getpid()}-{incarnation:x}")
        host = host_identity()
        arena = open_arena(incarnation, self._options.arena_bytes, self._options.arena_threshold)
        me = Record(
            name=name,
            id=id,
            incarnation=incarnation,
            addresses=channel.addresses,
            # Agents of one host watch each other's processes; on another host, silence counts as a loss.
            host=f"{host}/{name}" if self._apart else host,
            pid=os.getpid(),
            started=started_at(os.getpid()),
            world_size=size,
            device_maps=self._options.device_maps_by_name,
            arena=arena.probe if arena is not None else None,
        )
        try:
            agent = Agent(me, channel, self._options, arena)
        except BaseException:  # also Ctrl-C: no agent is there to close its channel and arena
            if arena is not None:
                arena.close()
            channel.close()
            raise
        agent.start()
        return agent

    def _open(self, label: str) -> Channel:
        channel: Channel
        if self._channel == "inprocess":
            channel = self._network.open()
        else:
            channel = zeromq = ZeroMqChannel(label, self._secret)
            if self._channel == "local":
                channel = LocalChannel(zeromq, max_message=self._options.max_message)
        return channel if self.faults is None else FaultyChannel(channel, self.faults)

    def add(self, name: str | None = None, id: int | None = None) -> Agent:
        """Add an agent to a dynamic world, and return it when it has met the others.

        After the world's `close`, agents can still be added; then call `close` again.

        Args:
            name: the agent's name; None for ``worker`` and its id.
            id: the agent's id; None for the number of agents that the world has had.

        Raises:
            UsageError: the world is fixed, or the name has other characters than a worker's may have.
            RendezvousError: another living agent has the name or the id, or the others did not answer in time. The
                agent is closed then.

        Example:
            >>> with World(1, dynamic=True) as world:
            ...     world.add().me.name
            'worker1'
        """
        if not self._dynamic:
            raise UsageError("no agent can be added to a fixed world; make a dynamic one: World(..., dynamic=True)")
        number = len(self.agents) if id is None else id
        present = [agent.me for agent in self.agents if not agent.closed]
        name = WorkerInfo(name or f"worker{number}", number).name  # raises UsageError for a bad name
        agent = self._make(name, number, None)
        try:
            agent.handshake.join_dynamic(present, time.monotonic() + self._timeout)
        except BaseException:  # also Ctrl-C: the agent is not in `agents` yet, where `close` would find it
            agent.close("could not join its world")
            raise
        self.agents.append(agent)
        return agent

    # -- using --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.agents)

    def __getitem__(self, index: int) -> Agent:
        return self.agents[index]

    def __iter__(self) -> Iterator[Agent]:
        return iter(self.agents)

    def kill(self, index: int, why: str = "died") -> None:
        """End one agent as SIGKILL would end its process: it sends nothing more, and the others report it as lost.

        Calls to it, and its own, fail with WorkerLost. A second call does nothing. Raises IndexError for a place that
        does not exist. `add` can give the name to another agent.

        Args:
            index: the agent's place in the world.
            why: the text after the agent's name in the errors of the others.

        Example:
            >>> with World(2) as world, world[0].activate():
            ...     world.kill(1, "was switched off")
            ...     rpc.rpc_sync("worker1", max, args=(1, 2))
            Traceback (most recent call last):
            nbdist.errors.WorkerLost: worker1 was switched off. Call another worker, ...
        """
        victim = self.agents[index]
        # Before it closes: `close` says goodbye, and the others would report that reason instead of ``why``.
        for agent in self.agents:
            if agent is not victim and not agent.closed:
                agent.lose(victim.me.incarnation, why)
        victim.close("was killed")

    # -- ending -------------------------------------------------------------------------------

    def shutdown(self, timeout: float = 30.0) -> None:
        """End the world in order: wait until no call is open and all references are released, then close all agents.

        Whatever is raised, the agents are closed. A second call does nothing.

        Raises:
            RendezvousError: the world has not ended after ``timeout`` seconds (0 or less: no limit), such as because a
                call still runs.
            WorkerLost: an agent was lost meanwhile; one that was lost before is no error.
        """
        try:
            self._all_at_once(lambda agent: agent.ending.end(timeout))
        finally:
            self.close()

    def close(self) -> None:
        """Close all agents at once; their open calls fail with WorkerLost. A second call does nothing.

        Later calls of the agents raise NotInitialized, their references RRefError or WorkerLost.
        """
        for agent in self.agents:
            agent.close("has shut down")

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all_at_once(self, action: Callable[[Agent], object]) -> None:
        """Call ``action`` with every living agent, each in its own thread; raise the first error once all are done."""

        def act(agent: Agent) -> None:
            with agent.activate():  # the threads are new, and none of them has an active agent
                action(agent)

        with ThreadPoolExecutor(max(1, len(self.agents))) as threads:
            for ended in as_completed([threads.submit(act, agent) for agent in self.agents if not agent.closed]):
                ended.result()
