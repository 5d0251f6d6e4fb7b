"""torch.distributed.rpc's functions, name for name.

They act for the *current agent*: in a thread that runs something for an agent, that agent; elsewhere the one
that ``init_rpc`` started in this process.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from nbdist import durations
from nbdist.channel.contract import Channel
from nbdist.channel.resources import refusals_in_words
from nbdist.errors import Interrupted, NotInitialized, RendezvousError, UsageError
from nbdist.rpc import rref as rref_module
from nbdist.rpc.agent import Agent
from nbdist.rpc.futures import Future, set_interrupt_hook
from nbdist.rpc.here import here
from nbdist.rpc.hosted import take_on
from nbdist.rpc.interrupts import InterruptWatch
from nbdist.rpc.membership import WorkerInfo
from nbdist.rpc.options import UNSET_RPC_TIMEOUT, RpcBackendOptions
from nbdist.rpc.rref import Home, RRef
from nbdist.rpc.world import start_agent
from nbdist.torch_private import warn_of_untested

__all__ = [
    "BackendType",
    "current_agent",
    "get_worker_info",
    "init_rpc",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

_LAST_WORDS = 1.0
"""Seconds that leaving a dynamic world waits for acknowledgements."""

_log = logging.getLogger("nbdist.rpc")
_lock = threading.Lock()
_agent: Agent | None = None
_interrupts: InterruptWatch | None = None


class BackendType(Enum):
    """The backends that torch's programs name; there is one, and it is nbdist."""

    TENSORPIPE = "nbdist"


def current_agent() -> Agent:
    """The agent for which this thread acts."""
    agent = here.agent or _agent
    if agent is None or agent.links.closed:
        raise NotInitialized(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
        )
    return agent


def _home() -> Home:
    return current_agent().home


rref_module.set_home_finder(_home)


def is_initialized() -> bool:
    """Whether there is a current agent."""
    agent = here.agent or _agent
    return agent is not None and not agent.closed


# -- life ---------------------------------------------------------------------------------------


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Make this process a member of an RPC world, under ``name``.

    With ``world_size`` the world is fixed, and this returns when all its members are there. Without, members
    may join and leave at any time. ``rank`` is this worker's id. ``backend`` is accepted for torch's programs.

    On a worker of a cluster RPC runs already. There this sets the time limit and the number of threads that
    ``rpc_backend_options`` names, and raises UsageError for a name, a rank or an option that the worker cannot take on.
    """
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    if _agent is not None and _agent.hosted and not _agent.closed:
        take_on(_agent, name, rank, world_size, rpc_backend_options)
        return  # a program that brings its own world finds it formed
    if rank <= 0:  # once for a world, not once for each of its members
        warn_of_untested()
    initialize(name, rank, world_size or None, rpc_backend_options or RpcBackendOptions())


def initialize(
    name: str,
    rank: int,
    world_size: int | None,
    options: RpcBackendOptions,
    *,
    store: Any = None,
    wrap: Callable[[Channel], Channel] | None = None,
    hosted: Path | None = None,
) -> Agent:
    """Start the agent of this process; see `nbdist.rpc.world.start_agent`.

    One that is ``hosted`` belongs to a cluster, whose run directory that is: the user's `init_rpc` and `shutdown`
    leave it running, and Ctrl-C in a wait stops the work that was waited for.
    """
    global _agent, _interrupts
    with _lock:
        if _agent is not None and not _agent.closed:
            raise UsageError(f"RPC is already initialized in this process, as {_agent.me.name!r}")
        with refusals_in_words("RPC cannot start"):
            agent = start_agent(name, rank, world_size, options, store=store, wrap=wrap, directory=hosted)
        _agent = agent
        agent.hosted = hosted is not None
        if agent.hosted:
            set_interrupt_hook(agent.stopping.on_interrupt)
            agent.at_close(lambda: set_interrupt_hook(None))
        _interrupts = InterruptWatch.start(lambda: _give_up(agent))
        agent.at_close(_stop_watching)
    return agent


def _stop_watching() -> None:
    global _interrupts
    watch, _interrupts = _interrupts, None
    if watch is not None:
        watch.close()


def _give_up(agent: Agent) -> None:
    """Ctrl-C while the main thread sleeps in torch's C++: fail what it waits for."""
    main = threading.main_thread().ident
    calls = [call for call in agent.pending.all() if call.thread == main]
    agent.outcomes.interrupt(calls, Interrupted("interrupted (Ctrl-C) while waiting for this call"))


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """End RPC in this process.

    ``graceful`` waits until all members of a fixed world have called this and nothing is under way any more;
    in a dynamic world, until what this worker asked for and was asked for is done. ``timeout`` limits that wait
    (seconds; 0, or less, for no limit); the error names who is missing. The agent ends in any case, but for a
    member of a notebook's cluster, which only finishes what is under way: the cluster ends it.
    """
    timeout = durations.limit(timeout)
    agent = current_agent()
    if agent.hosted:
        if graceful:
            _drain(agent, timeout)
        return
    try:
        if graceful and agent.me.world_size is not None:
            agent.ending.end(timeout)
        elif graceful:
            _drain(agent, timeout)
    finally:
        finish(agent)


def finish(agent: Agent) -> None:
    """End an agent at once."""
    global _agent
    agent.close("has shut down")
    with _lock:
        if _agent is agent:
            _agent = None


def _drain(agent: Agent, timeout: float) -> None:
    deadline = time.monotonic() + timeout if timeout > 0 else float("inf")
    while agent.exchange.active or agent.pending.unended:
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"shutdown of {agent.me.name}: {agent.executor.doing() or 'calls of its own'} still running"
            )
        time.sleep(0.002)
    agent.references.release_all()
    deadline = min(deadline, time.monotonic() + _LAST_WORDS)  # who does not answer by then learns it by our Goodbye
    while agent.links.outstanding() and time.monotonic() < deadline:
        time.sleep(0.002)


def _at_exit() -> None:
    agent = _agent
    if agent is not None and not agent.closed:
        with contextlib.suppress(Exception):
            agent.close("has exited without shutdown")


def _after_fork() -> None:
    global _agent, _interrupts, _lock
    _agent = _interrupts = None  # sockets and threads stay with the parent
    _lock = threading.Lock()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)


# -- calls --------------------------------------------------------------------------------------


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run ``func(*args, **kwargs)`` on worker ``to`` and return the result.

    ``timeout`` is in seconds; negative for the default of the options, 0 for none (as is more than 1e8, or infinity).

    In a finaliser (a ``__del__``, or what a weak reference calls) and in a signal's handler, use `rpc_async`. Python
    may run them in a thread that is sending or reading messages. There this makes the call, cannot wait for it, and
    raises UsageError.
    """
    return current_agent().caller.sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """As `rpc_sync`, but return a Future at once."""
    return current_agent().caller.asynchronous(to, func, args, kwargs, timeout)


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Run ``func(*args, **kwargs)`` on worker ``to`` and return, at once, a reference to the result there."""
    return current_agent().caller.remote(to, func, args, kwargs, timeout)


def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Name and id of a worker; of the current one without a name."""
    agent = current_agent()
    record = agent.me if worker_name is None else agent.find(worker_name)
    return WorkerInfo(record.name, record.id)
