"""Starts an agent and brings it into a world. If a step fails, closes everything that was started.

The steps of `start_agent`::

    1  meeting.parse, settle          choose the place to meet; refuse one that other machines reach without a secret
    2  ZeroMqChannel, LocalChannel    open the sockets at which others reach this agent
    3  open_arena, open_gpus          open shared memory for large tensors, on the CPU and on GPUs, if the system has it
    4  Agent.start                    start the threads that receive messages
    5  Roster.form or join            register in the list of members in the store; check the device maps
    6  Handshake.join_...             meet every other member

`Agent.close` ends the threads, closes the sockets and frees the memory. Last, `_leave` removes the agent from the
roster.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nbdist.channel import local
from nbdist.channel.contract import Channel
from nbdist.channel.locked_directory import sweep
from nbdist.channel.process_watch import started_at
from nbdist.channel.secret import Secret
from nbdist.channel.shared_memory.arena import open_arena
from nbdist.channel.shared_memory.gpu_arena import open_gpus
from nbdist.channel.zeromq import ZeroMqChannel, host_identity
from nbdist.errors import NbdistError, RendezvousError, UsageError
from nbdist.ids import new_incarnation
from nbdist.rpc import devices
from nbdist.rpc.agent import Agent
from nbdist.rpc.core.members import WorkerInfo
from nbdist.rpc.options import RpcBackendOptions, time_limit
from nbdist.rpc.thread_switching import switching
from nbdist.rpc.world import meeting, tcp_store
from nbdist.rpc.world.roster import Roster
from nbdist.wire.messages import Record

_LONGEST_FORMING = 24 * 3600.0  # seconds for a world to form if the options set no time limit

_LARGEST_NUMBER = (1 << 63) - 1  # the largest rank or world size that fits in a message

# Seconds for which the worker that serves the store waits, after an orderly end, until the others have left it.
_WAIT_FOR_OTHERS_TO_LEAVE = 2.0


def start_agent(
    name: str,
    rank: int,
    world_size: int | None,
    options: RpcBackendOptions,
    *,
    store: Any = None,
    present: Sequence[Record] | None = None,
    wrap: Callable[[Channel], Channel] | None = None,
    directory: Path | None = None,
    device: str = "",
) -> Agent:
    """Start an agent, and return it when it is a member of its world.

    ``options.rpc_timeout`` limits how long this takes. The name, the rank and the size are those of `init_rpc`, whose
    errors this raises. ``store`` is one of torch's stores, to meet at; None opens the store that
    ``options.init_method`` names. ``present`` has the records of the members to meet, if the caller knows them. Then
    there is no store, and this agent knows no other members. ``wrap`` returns a channel around the agent's channel,
    such as one with faults. ``directory`` is where the agent's sockets lie; None for a new directory of this user.
    ``device`` is where GPU tensors arrive that no device map names (`Record.device`).
    """
    timeout = time_limit(options.rpc_timeout) or _LONGEST_FORMING
    deadline = time.monotonic() + timeout
    WorkerInfo(name, 0)  # raises UsageError for a bad name
    place = meeting.parse(options.init_method, rank, world_size) if store is None and present is None else None
    rank = place.rank if place is not None else rank
    for what, number in (("world_size", world_size or 0), ("rank", rank)):
        if number > _LARGEST_NUMBER:
            raise UsageError(f"{what} must not be larger than {_LARGEST_NUMBER}")
    if world_size is not None and not 0 <= rank < world_size:
        raise UsageError(f"rank must be from 0 to world_size - 1 ({world_size - 1}), not {rank}")
    host = options.host or os.environ.get("NBDIST_HOST")
    secret = Secret.find(options.secret)
    if place is not None:
        meeting.settle(place, secret.shared_off_host, host)
    incarnation = new_incarnation()
    with contextlib.ExitStack() as undo:
        zeromq = ZeroMqChannel(
            f"{os.getpid()}-{incarnation:x}", secret, host=host, max_message=options.max_message, directory=directory
        )
        undo.callback(zeromq.close)
        uses_sockets = options.channel == "auto"
        channel: Channel = local.LocalChannel(zeromq, max_message=options.max_message, uses_sockets=uses_sockets)
        undo.callback(channel.close)
        if wrap is not None:
            channel = wrap(channel)
        arena = open_arena(incarnation, options.arena_bytes, options.arena_threshold)
        if arena is not None:
            undo.callback(arena.close)
        gpus = None
        if arena is not None and torch.cuda.device_count() and _uses_gpus(options, device):
            gpus = open_gpus(incarnation, options.arena_threshold)
        if gpus is not None:
            undo.callback(gpus.close)
        me = Record(
            name=name,
            id=rank,
            incarnation=incarnation,
            addresses=channel.addresses,
            host=host_identity(),
            pid=os.getpid(),
            started=started_at(os.getpid()),
            world_size=world_size,
            device_maps=options.device_maps_by_name,
            arena=arena.probe if arena is not None else None,
            device=device,
            devices=[str(each) for each in options.devices],
            gpus=torch.cuda.device_count(),
            gpu_uuids=gpus.uuids if gpus is not None else [],
        )
        agent = Agent(me, channel, options, arena, gpus)
        agent.directory = zeromq.directory
        agent.links.meets_all = present is None
        undo.callback(agent.close, "could not join its world")
        agent.start()
        if present is not None:
            if dead := agent.handshake.join_dynamic(present, deadline):
                names = ", ".join(record.name for record in dead)
                raise RendezvousError(f"no answer from {names}: see whether its host can be reached from here")
            undo.pop_all()
            return agent
        open_store = partial(place.open, timeout, secret) if place is not None else partial(meeting.prefixed, store)
        roster = Roster(open_store, secret, me.host)
        undo.callback(tcp_store.end_server)  # the next try needs a new store: the contents may have caused the failure
        undo.callback(roster.close)
        undo.callback(roster.leave, me)
        if world_size is not None:
            members = roster.form(me, deadline)
            try:
                devices.check(members)  # before any member is met: all members raise the same error, and none waits
            except UsageError:
                if place is not None and place.serves:
                    roster.wait_for_others(me, time.monotonic() + _WAIT_FOR_OTHERS_TO_LEAVE)
                raise
            agent.handshake.join_fixed(members, deadline)
        else:
            dead = agent.handshake.join_dynamic(roster.join(me, deadline), deadline)
            if dead and not (place is not None and place.is_kept):
                roster.leave(*dead)
            devices.check(agent.members())
        agent.at_close(lambda: _leave(agent, roster, place))
        agent.at_close(switching.shorten(options.switch_interval))
        agent.on_lost(lambda record, why: _clean_after(agent, record))
        if place is not None and place.keeps_list:  # else a new worker could not take the lost member's name
            agent.on_lost(lambda record, why: roster.leave(record))
        undo.pop_all()
    return agent


def _uses_gpus(options: RpcBackendOptions, device: str) -> bool:
    """Return whether an agent shares memory of GPUs, which starts CUDA in its process: it has a GPU, or names one."""
    named = {*options.devices, *(ours for device_map in options.device_maps.values() for ours in device_map)}
    return device.startswith("cuda") or any(each.type == "cuda" for each in named)


def _leave(agent: Agent, roster: Roster, place: meeting.Meeting | None) -> None:
    """Remove this member from the roster, if the store still exists, and close the store."""
    if place is None or place.is_open():
        if place is not None and place.serves and agent.ending.completed:
            # The store ends with the member that serves it, and the others could not leave it any more.
            roster.wait_for_others(agent.me, time.monotonic() + _WAIT_FOR_OTHERS_TO_LEAVE)
        roster.leave(agent.me)
    roster.close()


def _clean_after(agent: Agent, record: Record) -> None:
    """After a member on this host is lost, remove the files that its process could not remove."""
    if record.host == agent.me.host and record.pid != os.getpid():
        agent.pool.submit(_sweep_soon)  # a listener must be quick


def _sweep_soon() -> None:
    """Remove the files of all dead agents of this user."""
    with contextlib.suppress(OSError, NbdistError):  # the next agent tries again
        sweep()
