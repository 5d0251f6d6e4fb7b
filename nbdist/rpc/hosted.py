"""A program's own `init_rpc` on a worker of a cluster, where RPC runs already."""

from __future__ import annotations

from nbdist.errors import UsageError
from nbdist.rpc.agent import Agent
from nbdist.rpc.options import RpcBackendOptions

# The members have met, and nbdist does not use torch's list of devices here.
_WITHOUT_EFFECT_NOW = frozenset({"init_method", "devices"})


def take_on(agent: Agent, name: str, rank: int, world_size: int | None, options: RpcBackendOptions | None) -> None:
    """Apply a program's ``init_rpc`` to the running agent of a cluster: set its time limit and number of threads.

    An option with its default value changes nothing. Raises UsageError, before any change, if the running agent cannot
    take the name, the rank, the size or an option.
    """
    me = agent.me
    if name != me.name:
        raise UsageError(
            f"this is {me.name} of a cluster, where RPC runs already; it cannot take the name {name!r}. Give init_rpc "
            "the worker's own name, or start the program with `python -m nbdist run`, where each process makes its own "
            "RPC"
        )
    if rank >= 0 and rank != me.id:
        raise UsageError(
            f"this is {me.name} of a cluster, where RPC runs already, with rank {me.id}; it cannot get rank {rank}: "
            "leave the rank out"
        )
    members = len(agent.membership.members())
    if world_size and world_size > members:
        raise UsageError(
            f"this cluster's RPC has {members} members, the notebook included; a world_size of {world_size} would be "
            "waited for in vain. For more workers, end the cluster with %dist_shutdown, then use %dist_init -n N"
        )
    if options is None:
        return
    plain = vars(type(agent.options)())  # an option with its default value changes nothing
    asked = {option: value for option, value in vars(options).items() if value != plain.get(option)}
    mine = agent.options.device_maps
    if all(to == name or device_map == mine.get(to) for to, device_map in options.device_maps.items()):
        asked.pop("device_maps", None)  # the agent has these maps already; a map to itself is ignored
    refused = [
        option
        for option, value in asked.items()
        if option not in (*_WITHOUT_EFFECT_NOW, "rpc_timeout", "num_worker_threads")
        and value != getattr(agent.options, option, None)
    ]
    if refused:
        raise UsageError(
            f"{me.name} belongs to a cluster, where RPC runs already; it cannot take on {', '.join(sorted(refused))} "
            "now. Leave it out, or start the program with `python -m nbdist run`, where each process makes its own RPC"
        )
    # Last, so that a refused `init_rpc` has changed nothing.
    if "rpc_timeout" in asked:
        agent.rpc_timeout = options.rpc_timeout
    if "num_worker_threads" in asked:
        agent.pool.resize(options.num_worker_threads)
