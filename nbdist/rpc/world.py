"""Starts an agent and brings it into a world; nothing is left behind where that fails."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbdist.channel import local
from nbdist.channel.arena import open_arena
from nbdist.channel.contract import Channel
from nbdist.channel.liveness import started_at
from nbdist.channel.security import Secret
from nbdist.channel.zeromq import ZmqChannel, host_identity, sweep
from nbdist.errors import NbdistError, UsageError
from nbdist.ids import new_incarnation
from nbdist.rpc import rendezvous, switching, tcp_store
from nbdist.rpc.agent import Agent
from nbdist.rpc.membership import WorkerInfo
from nbdist.rpc.options import RpcBackendOptions, time_limit
from nbdist.rpc.roster import Roster, Store
from nbdist.wire.messages import Record

__all__ = ["start_agent"]

_NO_TIMEOUT = 24 * 3600.0

_LARGEST_NUMBER = (1 << 63) - 1
"""What a message can carry."""

_OTHERS_LEAVE = 2.0
"""Seconds that the member which serves the store stays, after an orderly end, for members that have yet to leave it."""


def start_agent(
    name: str,
    rank: int,
    world_size: int | None,
    options: RpcBackendOptions,
    *,
    store: Any = None,
    wrap: Callable[[Channel], Channel] | None = None,
    directory: Path | None = None,
) -> Agent:
    """An agent that is a member of its world.

    ``store`` is used instead of opening one by ``options.init_method``; ``wrap`` puts something around the
    agent's channel, such as faults; its files are in ``directory`` rather than in the user's own.
    """
    timeout = time_limit(options.rpc_timeout) or _NO_TIMEOUT
    deadline = time.monotonic() + timeout
    WorkerInfo(name, 0)  # raises for a bad name
    meeting = rendezvous.parse(options.init_method, rank, world_size) if store is None else None
    rank = meeting.rank if meeting is not None else rank
    for what, number in (("world_size", world_size or 0), ("rank", rank)):
        if number > _LARGEST_NUMBER:
            raise UsageError(f"{what} must not be larger than {_LARGEST_NUMBER}")
    if world_size is not None and not 0 <= rank < world_size:
        raise UsageError(f"rank must be from 0 to world_size - 1 ({world_size - 1}), not {rank}")
    host = options.host or os.environ.get("NBDIST_HOST")
    secret = Secret.find(options.secret)
    if meeting is not None:
        rendezvous.settle(meeting, secret.shared_off_host, host)
    incarnation = new_incarnation()
    with contextlib.ExitStack() as undo:
        zeromq = ZmqChannel(
            f"{os.getpid()}-{incarnation:x}", secret, host=host, max_message=options.max_message, directory=directory
        )
        undo.callback(zeromq.close)
        channel: Channel = zeromq
        if options.channel == "auto" and local.is_available():
            channel = local.LocalChannel(zeromq, max_message=options.max_message)
            undo.callback(channel.close)
        if wrap is not None:
            channel = wrap(channel)
        arena = open_arena(incarnation, options.arena_bytes, options.arena_threshold)
        if arena is not None:
            undo.callback(arena.close)
        me = Record(
            name=name,
            id=rank,
            incarnation=incarnation,
            addresses=channel.addresses,
            host=host_identity(),
            pid=os.getpid(),
            started=started_at(os.getpid()),
            world_size=world_size,
            device_maps={
                to: {str(ours): str(theirs) for ours, theirs in device_map.items()}
                for to, device_map in options.device_maps.items()
            },
            arena=arena.probe if arena is not None else None,
        )
        agent = Agent(me, channel, options, arena)
        agent.directory = zeromq.directory
        undo.callback(agent.close, "could not join its world")
        agent.start()
        roster = Roster(lambda: _open(meeting, store, timeout), secret, me.host)
        undo.callback(tcp_store.end_server)  # what is in the store may be why
        undo.callback(roster.close)
        undo.callback(roster.leave, me)
        if world_size is not None:
            agent.handshake.join_fixed(roster.form(me, deadline), deadline)
        else:
            dead = agent.handshake.join_dynamic(roster.join(me, deadline), deadline)
            if dead:
                roster.leave(*dead)
        agent.at_close(lambda: _leave(agent, roster, meeting))
        agent.at_close(switching.shorten(options.switch_interval))
        agent.on_lost(lambda record, why: _clean_after(agent, record))
        undo.pop_all()
    return agent


def _open(meeting: rendezvous.Meeting | None, store: Any, timeout: float) -> Store:
    return meeting.open(timeout) if meeting is not None else rendezvous.prefixed(store)


def _leave(agent: Agent, roster: Roster, meeting: rendezvous.Meeting | None) -> None:
    """Strike this member off the roster, while there is a store; the member that serves the store leaves last."""
    if meeting is None or meeting.is_open():
        if meeting is not None and meeting.serves and agent.ending.completed:
            roster.wait_for_others(agent.me, time.monotonic() + _OTHERS_LEAVE)
        roster.leave(agent.me)
    roster.close()


def _clean_after(agent: Agent, record: Record) -> None:
    """What a killed process of this host could not remove itself, whoever saw it die removes (G5)."""
    if record.host == agent.me.host and record.pid != os.getpid():
        agent.pool.submit(_sweep_soon)


def _sweep_soon() -> None:
    with contextlib.suppress(OSError, NbdistError):
        sweep()
