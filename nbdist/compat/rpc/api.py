"""Replaces torch.distributed.rpc.api: the calls, and the private functions that programs use.

The calls are nbdist's, with two differences. They raise torch's errors (`nbdist.compat.words`), and a ``_wait_all``
block collects their futures.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from nbdist.compat import gathering, references, words
from nbdist.compat.agents import agent_of_torch
from nbdist.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from nbdist.errors import NbdistError, UsageError
from nbdist.rpc import api as rpc
from nbdist.rpc.core.members import WorkerInfo
from nbdist.rpc.futures import Future
from nbdist.rpc.references.rref import RRef

__all__ = ["RRef", "get_worker_info", "remote", "rpc_async", "rpc_sync", "shutdown"]

logger = logging.getLogger("nbdist.compat")

_ignore_rref_leak = True  # a program sets it to False, if `shutdown` must raise an error for RRefs not deleted
_PRACTICALLY_NO_WAIT = 1e-9  # seconds; 0 is refused, and the last round of `shutdown` waits anyway

_thread_local_var = threading.local()

_is_current_rpc_agent_set = rpc.is_initialized
_get_current_rpc_agent = agent_of_torch


# -- calls --------------------------------------------------------------------------------------


def _in_torchs_words(call: Callable[..., Any]) -> Callable[..., Any]:
    # Not with the call's ``__module__``: a program may send the function itself, which is pickled by its own place.
    @functools.wraps(call, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def stand_in(to: str | int | WorkerInfo, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(to, *args, **kwargs)
        except UsageError as error:
            words.refuse_call(error, to)

    return stand_in


rpc_sync, remote, _rpc_async = map(_in_torchs_words, (rpc.rpc_sync, rpc.remote, rpc.rpc_async))


@functools.wraps(_rpc_async)
def rpc_async(*args: Any, **kwargs: Any) -> Future[Any]:
    """Run a function on a worker and return a Future at once; see `nbdist.rpc.rpc_async`."""
    future: Future[Any] = _rpc_async(*args, **kwargs)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Return the name and id of a worker, found by name or id; without an argument, of this worker.

    Raises UnknownWorker for an unknown worker, and TypeError for anything that is no name, id or `WorkerInfo`, both
    with torch's text. Raises WorkerLost if the worker is gone.
    """
    try:
        return rpc.get_worker_info(worker_name)
    except UsageError as error:
        words.refuse_worker_info(error, worker_name)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait, at the end of the block, for all calls that the thread has made in it with `rpc_async`.

    Raises the first error among them. Blocks of one thread cannot be nested: an inner block forgets the calls of the
    outer block, which then ends with AttributeError.
    """
    _thread_local_var.future_list = []  # torch's name: a suite reads it
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


# -- the current agent --------------------------------------------------------------------------


def _set_and_start_rpc_agent(agent: Any) -> None:
    # torch's name: a suite replaces this function by a mock.
    raise UsageError(
        f"nbdist cannot make calls through {agent!r}, which is not an agent of nbdist; use a backend of BackendType "
        "that nbdist has, such as TENSORPIPE"
    )


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """End RPC in this process, as `nbdist.rpc.shutdown`.

    If ``graceful``, first wait until all calls are answered and, in a fixed world, all workers have called this.
    ``timeout`` is in seconds, 0 for no limit. RPC ends in this process even if this raises an error. Only a worker of a
    notebook's cluster stays in its world, until the notebook ends the cluster.

    Raises:
        RendezvousError: the wait took longer than ``timeout``.
        WorkerLost: a worker was lost while this one waited.
        RuntimeError: RPC does not run here; or other workers still refer to values of this worker, and
            ``_ignore_rref_leak`` is False.
    """
    try:
        agent = rpc.current_agent()
    except UsageError as error:
        words.refuse_call(error)
    if graceful:
        agent.ending.release = _delete_users
    leaked = [] if graceful else agent.references.leaked()  # before shutdown, which leaves no time to delete RRefs
    rpc.shutdown(graceful, timeout)
    # A graceful end asks after it, because the others release their references during the end.
    leaked = leaked or agent.references.leaked()
    if leaked and not _ignore_rref_leak:
        raise words.of_leaks(leaked)


def _delete_users() -> None:
    # By the module's name, at the time of the call: torch's suites replace that function to provoke a leak.
    _delete_all_user_and_unforked_owner_rrefs(_PRACTICALLY_NO_WAIT)


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = 100.0) -> None:
    """Release all references to other workers' values, as `nbdist.compat.references.release_users`."""
    references.release_users(rpc.current_agent(), timeout)


# -- gathering ----------------------------------------------------------------------------------


def _all_gather(
    obj: Any, worker_names: Collection[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Return the objects that all workers, or all ``worker_names``, have given, by name. All of them must call this.

    Raises RpcTimeout after ``timeout`` seconds; without it, or with 0, this waits for slow workers without a limit. If
    one of them is lost before the first one by name has all objects, all others raise WorkerLost.
    """
    try:
        return gathering.all_gather(obj, worker_names, timeout)
    except UsageError as error:
        words.refuse_call(error)


def _barrier(worker_names: Collection[str]) -> None:
    """Wait, without a time limit, until all of ``worker_names`` have called this; only log errors, as torch."""
    try:
        _all_gather(None, worker_names)
    except NbdistError:
        logger.exception("_barrier of %s failed: not all of them called it in time", ", ".join(worker_names))


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers have called this; ``timeout`` and the errors are those of `_all_gather`."""
    _all_gather(None, timeout=timeout)
