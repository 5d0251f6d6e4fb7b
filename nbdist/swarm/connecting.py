"""`connect`: a swarm that another process serves, for this process, too."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nbdist.errors import NotInitialized, UsageError
from nbdist.ids import new_incarnation
from nbdist.rpc import api
from nbdist.rpc.agent import Agent
from nbdist.rpc.options import RpcBackendOptions
from nbdist.swarm.client.crew import Crew
from nbdist.swarm.client.journal import Journal
from nbdist.swarm.directory.placing import FarPlacer
from nbdist.swarm.doors.client_invitation import ClientInvitation
from nbdist.swarm.doors.outside import Outside
from nbdist.swarm.server.neighbours import Address
from nbdist.swarm.swarm import Swarm

_joining = threading.Lock()
_users: dict[Agent, int] = {}
"""The open swarms of each agent that `connect` has started: one, or none."""


def connect(address: str | Path) -> Swarm:
    """Return a swarm that another process serves, for use in this process: a worker, a script, another notebook.

    Several processes may use a swarm at the same time. Each has sessions and models of its own; one placer, in the
    process that has called `serve`, gives blocks to workers for all. `Swarm.join`, `Swarm.leave` and `Swarm.move` may
    be called in any of them: sessions of the others move in their next step. The swarm ends when the process that
    serves it closes it. If that process is lost or frozen instead, a worker becomes the placer, and the swarm lasts
    until the last process that uses it has closed it or is lost. Workers of a cluster end with their notebook.

    With an address, a process without RPC becomes a member of the workers' world, until `Swarm.close`. It must run on
    the host of the process that serves, as the same user. With the file of an invitation, the process is a client, on
    any host, and no member: models write texts, and `Swarm.blocks`, `Swarm.states` and `Swarm.log` show what it hears.
    Calls without a cache, as for gradients, and `Swarm.join`, `Swarm.leave`, `Swarm.move` and `Swarm.kill` raise
    SecurityError. A client that dies or is silent for 12 s loses its sessions, and nothing else happens.

    Args:
        address: what `Swarm.address` has returned there, or in another process that uses the swarm; it is out of date
            once a worker has become the placer. Or the path of a file that `Swarm.invite` has written there.

    Raises:
        UsageError: ``address`` is no address or invitation of a swarm, the swarm is closed, or this process is a member
            of another world.
        SecurityError: others can read the invitation.
        WorkerLost, UnknownWorker: the process that ``address`` names is gone, or does not answer.
        RendezvousError: there is no such world any more.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=97
        ... )
        >>> sw = nbdist.swarm.serve(transformers.LlamaForCausalLM(config), workers=["worker0", "worker1"])
        >>> def write(address):  # on worker1
        ...     model = nbdist.swarm.connect(address).causal_lm()
        ...     return model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, pad_token_id=0, eos_token_id=None)
        >>> rpc.rpc_sync("worker1", write, args=(sw.address(),)).shape
        torch.Size([1, 5])
        >>> sw.close()
    """
    if isinstance(address, str | Path) and Path(address).is_file():
        return _connect_from_outside(Path(address))
    parts = address.rsplit("#", 2) if isinstance(address, str) else ()
    if len(parts) != 3:
        raise UsageError(
            "address is what `Swarm.address()` of the process that serves has returned, or the file that its "
            f"`Swarm.invite()` has written, not {address!r}"
        )
    with _joining:
        try:
            agent = api.current_agent()
        except NotInitialized:
            agent = _join(parts[0])
            _users[agent] = 0
        if agent in _users:
            _users[agent] += 1
    try:
        if parts[0] != (own := agent.options.init_method) and {*map(_kind, (parts[0], own))} == {"file"}:
            raise UsageError(
                "this process has workers of its own, and RPC has one world: connect in a program or notebook without "
                "workers"
            )
        return _connect(agent, Address(*parts[1:]), at_close=partial(_leave, agent))
    except BaseException:
        _leave(agent)
        raise


def _leave(agent: Agent) -> None:
    """Close an agent that `connect` has started, with the last swarm that uses it."""
    with _joining:
        if agent in _users:
            _users[agent] -= 1
            if not _users[agent]:
                del _users[agent]
                agent.close("left the swarm")


def _kind(place: str) -> str:
    return place.partition(":")[0]


def _join(place: str) -> Agent:
    if _kind(place) != "file":
        raise UsageError(
            "this swarm's workers are on several hosts: only members of their world, such as these workers, can use it "
            "by its address. Connect by an invitation: Swarm.invite"
        )
    if not os.path.isdir(os.path.dirname(place.removeprefix("file://"))):
        raise UsageError(
            "the process that served this swarm has ended, or runs on another host: connect by an "
            "invitation, Swarm.invite"
        )
    # A dynamic member with a number that no worker has.
    return api.initialize(f"client{os.getpid()}", new_incarnation(), None, RpcBackendOptions(init_method=place))


def _connect(agent: Agent, address: Address, at_close: Callable[[], object]) -> Swarm:
    placer, journal = FarPlacer(address, at_close), Journal()
    facts = placer.facts()
    crew = Crew(placer, facts, journal)
    weakref.finalize(crew, placer.leave).atexit = False
    placer.watch(crew.publish())
    crew.take(placer.news())  # what the placer sends comes later
    return Swarm(facts.source.open(), crew, journal)


def _connect_from_outside(file: Path) -> Swarm:
    outside = Outside(ClientInvitation.read(file))
    try:
        placer, journal = FarPlacer(outside.placer, outside.close, outside=outside), Journal()
        crew = Crew(placer, outside.facts, journal, outside)
        outside.tell(crew)
        return Swarm(outside.checkpoint(), crew, journal)
    except BaseException:  # also Ctrl-C
        outside.close()
        raise
