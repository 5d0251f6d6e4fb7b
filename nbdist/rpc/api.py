"""The functions of torch.distributed.rpc, with the same names and arguments.

Each function acts for one agent, the *current agent* of the calling thread. In a thread that runs code for an agent,
such as a function that another worker called, it is that agent. In every other thread it is the agent that `init_rpc`
started in this process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nbdist import durations
from nbdist.channel.contract import Channel
from nbdist.channel.resources import refusals_in_words
from nbdist.errors import Interrupted, NotInitialized, UsageError
from nbdist.rpc.agent import Agent
from nbdist.rpc.calls.keyboard_interrupts import InterruptWatch
from nbdist.rpc.core.members import WorkerInfo
from nbdist.rpc.futures import Future
from nbdist.rpc.here import here
from nbdist.rpc.hosted import take_on
from nbdist.rpc.options import UNSET_RPC_TIMEOUT, RpcBackendOptions
from nbdist.rpc.references import rref as rref_module
from nbdist.rpc.references.rref import RRef
from nbdist.rpc.start import start_agent
from nbdist.rpc.waits import set_interrupt_hook
from nbdist.torch_private import warn_of_untested


class _Process:
    """The agent that `init_rpc` started in this process."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self.lock = threading.Lock()  # held while the agent starts, and while it is forgotten

    def close(self) -> None:
        if self.agent is not None:
            with contextlib.suppress(Exception):  # the process is ending anyway
                self.agent.close("has exited without shutdown")

    def after_fork(self) -> None:
        self.agent = None  # its sockets and threads stay with the parent
        self.lock = threading.Lock()  # a thread of the parent may have held the old one


_process = _Process()
atexit.register(_process.close)  # tells the other workers, if the program did not call `shutdown`
os.register_at_fork(after_in_child=_process.after_fork)


def current_agent() -> Agent:
    """Return the agent for which the calling thread acts. Raises NotInitialized if there is none, or it has ended."""
    agent = here.agent or _process.agent
    if agent is None or agent.links.closed:
        raise NotInitialized(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
        )
    return agent


rref_module.set_home_finder(lambda: current_agent().home)


def is_available() -> bool:
    """Return True, as torch's function of this name does where torch has RPC.

    Example:
        >>> rpc.is_available()
        True
    """
    return True


def is_initialized() -> bool:
    """Return whether the calling thread has a current agent that has not ended."""
    agent = here.agent or _process.agent
    return agent is not None and not agent.closed


# -- life ---------------------------------------------------------------------------------------


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Make this process a worker of an RPC world, and return when the world has formed.

    There are two kinds of world. With ``world_size`` the world is *fixed*: this function returns when all its workers
    have met. Without ``world_size`` the world is *dynamic*: workers may join and leave at any time. After an error or
    Ctrl-C, nothing of this worker runs, and the function may be called again.

    On a worker of a notebook's cluster, RPC runs already. A program may still call this function there: it sets the
    time limit of calls and the number of threads, if ``rpc_backend_options`` names them. It raises UsageError for a
    name, a rank, a ``world_size`` or an option that the running worker cannot take.

    Args:
        name: this worker's name, unique in the world: fewer than 128 letters, digits, ``-``, ``_`` and ``:``.
        backend: ignored; accepted because torch's programs pass it.
        rank: this worker's id, from 0 to ``world_size - 1``; negative to read it from ``init_method``, or from the
            environment variable ``RANK`` where ``init_method`` is ``env://``.
        world_size: how many workers the world has; None or 0 for a dynamic world.
        rpc_backend_options: where the workers meet, time limits, threads and more, see `RpcBackendOptions`. Its
            ``rpc_timeout`` also limits how long this function waits.

    Raises:
        TypeError: ``name`` is not a str, or the options are of another class.
        ValueError: ``init_method`` or the environment lacks a part, such as ``MASTER_ADDR``. The message is torch's.
        UsageError: RPC runs already in this process (call `shutdown` first), the name or the rank is not allowed, or a
            device map names devices or workers that do not exist.
        NotUnique: another living worker has the same name or rank.
        RendezvousError: some workers did not arrive in time (the message names their ranks), or the store cannot be
            used.
        SecurityError: workers on several machines share no secret, or a secret or the runtime directory is not safe.
        WorkerLost: another worker died while the world formed.

    Example:
        Two processes run this, with ``RANK`` 0 and 1, and the same ``MASTER_ADDR`` and ``MASTER_PORT``:

        >>> import os
        >>> from nbdist import rpc
        >>> rank = int(os.environ["RANK"])  # doctest: +SKIP
        >>> rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)  # doctest: +SKIP

        The programs in ``notebooks/programs`` call it in this way.
    """
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    agent = _process.agent
    if agent is not None and agent.hosted and not agent.closed:
        take_on(agent, name, rank, world_size, rpc_backend_options)
        return  # the program uses the cluster's RPC
    if rank <= 0:  # warn once in each world, not in each of its members
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
    device: str = "",
) -> Agent:
    """Start the agent of this process, and return it when it is a member of its world.

    `init_rpc` and the cluster call this; the other arguments are those of `nbdist.rpc.start.start_agent`. ``hosted`` is
    the run directory of the cluster that the agent belongs to; None without a cluster. The agent of a cluster keeps
    running after the user's `shutdown`. Raises UsageError if this process has a running agent already.
    """
    with _process.lock:
        if _process.agent is not None and not _process.agent.closed:
            raise UsageError(
                f"RPC is already initialized in this process, as {_process.agent.me.name!r}: call rpc.shutdown() first"
            )
        with refusals_in_words("RPC cannot start"):
            agent = start_agent(
                name, rank, world_size, options, store=store, wrap=wrap, directory=hosted, device=device
            )
        _process.agent = agent
        agent.hosted = hosted is not None
        if agent.hosted:
            set_interrupt_hook(agent.stopping.on_interrupt)  # Ctrl-C then stops the work on other workers, too
            agent.at_close(lambda: set_interrupt_hook(None))
        watch = InterruptWatch.start(lambda: _give_up(agent))
        if watch is not None:
            agent.at_close(watch.close)
    return agent


def _give_up(agent: Agent) -> None:
    # The main thread sleeps in torch's C++ after Ctrl-C, and only the end of these calls wakes it.
    main = threading.main_thread().ident
    calls = [call for call in agent.pending.all() if call.thread == main]
    error = Interrupted(
        "interrupted (Ctrl-C) while waiting for this call. The function may still run on the worker: call again only "
        "if it may run twice"
    )
    agent.outcomes.interrupt(calls, error)


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """End RPC in this process.

    The agent ends even if the wait fails or Ctrl-C ends it. Afterwards, calls and a second `shutdown` raise
    NotInitialized, and references raise RRefError or WorkerLost; `init_rpc` may be called again. In a function that
    another worker has called, a graceful shutdown waits for this function itself: until ``timeout``, or for ever.

    On a worker of a notebook's cluster, the agent runs until the cluster ends it. There, ``graceful=True`` waits until
    this worker's calls and the calls to it are answered, and then releases its references to values of other workers;
    ``graceful=False`` does nothing.

    Args:
        graceful: True to wait first. In a fixed world, the wait lasts until all workers have called `shutdown` and all
            calls are answered everywhere. In a dynamic world, it lasts until all calls from and to this worker are
            answered. False ends this worker at once: its unanswered calls, and those of other workers to it, fail with
            WorkerLost.
        timeout: the longest time to wait, in seconds; 0 or less for no limit.

    Raises:
        NotInitialized: RPC does not run.
        RendezvousError: the wait took longer than ``timeout``. The message names the workers or calls that are missing.
        WorkerLost: a worker was lost while the fixed world ended. The message names it. The world has ended without it.
        TypeError: ``timeout`` is no number; UsageError if it is NaN. Then RPC has not ended.

    Example:
        >>> rpc.shutdown()  # doctest: +SKIP
    """
    timeout = durations.limit(timeout)
    agent = current_agent()
    ending = agent.ending
    wait = ending.drain if agent.hosted or agent.me.world_size is None else ending.end
    try:
        if graceful:
            wait(timeout)
    finally:
        if not agent.hosted:
            finish(agent)


def finish(agent: Agent) -> None:
    """End an agent at once: its pending calls fail. Forget it if it is the agent of this process."""
    agent.close("has shut down")
    with _process.lock:
        if _process.agent is agent:
            _process.agent = None


# -- calls --------------------------------------------------------------------------------------


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run ``func(*args, **kwargs)`` on worker ``to`` and return the result.

    Tensors travel by value. A function of a module travels by its name, so the worker must be able to import it; a
    function of ``__main__`` travels with its code.

    An error that ``func`` raises is raised here, with a note that has the worker's traceback.

    Call `rpc_async` instead in a finaliser (a ``__del__``, or the callback of a weak reference) and in the handler of a
    signal. Python may run these in a thread that is sending or receiving messages. In such a thread, this function
    sends the call but cannot wait for the answer, and raises UsageError.

    Args:
        to: the worker's name, id or `WorkerInfo`; this worker itself is allowed.
        func: any callable that can be sent.
        args: a tuple or a list.
        kwargs: a dict.
        timeout: the time limit in seconds; negative for the ``rpc_timeout`` of `RpcBackendOptions`, 0 or more than 1e8
            for none.

    Returns:
        The result. It is a copy, even if the worker is this one.

    Raises:
        NotInitialized: RPC does not run here: before `init_rpc`, after `shutdown`.
        UnknownWorker: the world never had such a worker.
        WorkerLost: the worker, or the owner of a reference in the arguments, is gone; the worker dies before it has
            answered; or RPC ends here meanwhile. The message says what happened.
        RpcTimeout: the answer did not arrive in time; ``func`` may still run.
        EncodeError: an argument cannot be sent. The message names the argument.
        RRefError: an argument is a reference that was released, or whose `remote` call got no answer.
        TypeError: ``func`` is not callable, ``args`` is no tuple or list, or ``timeout`` is no number.
        UsageError: ``kwargs`` is no dict, ``to`` is of another type, ``timeout`` is NaN, or see above.
        RemoteError: ``func`` raised an error that cannot be rebuilt in this process.
        KeyboardInterrupt: the user pressed Ctrl-C during the wait. In a cluster, ``func`` is interrupted as well.

    Example:
        >>> rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
        tensor([4., 4.])

        >>> rpc.rpc_sync("worker1", int, args=("two",))
        Traceback (most recent call last):
        ValueError: ...
    """
    return current_agent().caller.sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Run ``func(*args, **kwargs)`` on worker ``to``, and return a Future of the result at once.

    The arguments are those of `rpc_sync`, the time limit included. They are encoded before this function returns, so
    the caller may change a tensor afterwards.

    Returns:
        A `Future`. Its ``wait()`` returns the result, or raises what `rpc_sync` would raise while it waits: WorkerLost,
        even if the worker is gone already; RpcTimeout, the error of ``func``.

    Raises:
        NotInitialized: RPC does not run here.
        UnknownWorker: the world never had such a worker.
        EncodeError: an argument cannot be sent. The message names the argument.
        RRefError, TypeError, UsageError: for wrong arguments, as in `rpc_sync`.

    Example:
        >>> futures = [rpc.rpc_async(f"worker{n}", max, args=(n, 5)) for n in range(2)]
        >>> [future.wait() for future in futures]
        [5, 5]
    """
    return current_agent().caller.asynchronous(to, func, args, kwargs, timeout)


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Run ``func(*args, **kwargs)`` on worker ``to``, which keeps the result, and return a reference to it at once.

    The arguments are those of `rpc_sync`, the time limit included. The worker ``to`` owns the result and keeps it as
    long as any worker has a reference to it.

    Returns:
        An `RRef`. It can be used at once: methods that need the value wait until ``func`` has returned. `RRef.to_here`
        raises the error of ``func``, RRefError if the time limit passes first, WorkerLost if the worker dies.

    Raises:
        NotInitialized: RPC does not run here.
        UnknownWorker: the world never had such a worker.
        WorkerLost: the worker is gone already.
        EncodeError: an argument cannot be sent. The message names the argument.
        RRefError, TypeError, UsageError: for wrong arguments, as in `rpc_sync`.

    Example:
        >>> rref = rpc.remote("worker1", torch.ones, args=(2, 2))
        >>> rref.rpc_sync().sum()
        tensor(4.)
        >>> rref
        <RRef to Tensor float32(2, 2) on worker1, confirmed>
    """
    return current_agent().caller.remote(to, func, args, kwargs, timeout)


def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Return the name and the id of the worker ``worker_name``; without this argument, those of this worker.

    Sends no message.

    Raises:
        NotInitialized: RPC does not run here.
        UnknownWorker: the world never had such a worker.
        WorkerLost: the worker is gone, and no other has taken its name. The message says what happened to it.
        UsageError: ``worker_name`` is no str, int or `WorkerInfo`.

    Example:
        >>> rpc.get_worker_info("worker1")
        WorkerInfo(id=1, name=worker1)
    """
    agent = current_agent()
    record = agent.me if worker_name is None else agent.find(worker_name)
    return WorkerInfo(record.name, record.id)
