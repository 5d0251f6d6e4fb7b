"""Wraps nbdist's agent in classes with the names and methods of torch's agents.

torch's private functions return the agent. Programs ask it for the workers, and `RemoteModule` for the device maps.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from nbdist.compat import words
from nbdist.errors import UsageError
from nbdist.rpc import api
from nbdist.rpc.agent import Agent
from nbdist.rpc.core.members import WorkerInfo
from nbdist.rpc.options import RpcBackendOptions


class RpcAgent:
    """Wraps an agent, with the methods of torch's class of this name."""

    _agent: Agent

    @classmethod
    def around(cls, agent: Agent) -> RpcAgent:
        """Return a new wrapper of a running agent. From now on, `agent_of_torch` returns it for the agent."""
        self = cls.__new__(cls)
        self._agent = agent
        _wrappers[agent] = self
        return self

    def get_worker_info(self, name: str | int | None = None) -> WorkerInfo:
        """Return the name and id of a worker, or of this one. Raises UnknownWorker, or WorkerLost if it is gone."""
        record = self._agent.me if name is None else self._agent.find(name)
        return WorkerInfo(record.name, record.id)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return the name and id of every member, in the order of ids."""
        return [WorkerInfo(record.name, record.id) for record in self._agent.members()]

    def get_debug_info(self) -> dict[str, str]:
        """Return counters of the agent as text, by torch's names: of its threads, and of pending and running calls."""
        counters = self._agent.statistics()
        return {  # torch's names, but for the last two
            "agent.thread_pool_size": str(self._agent.options.num_worker_threads),
            "agent.num_pending_requests": str(counters["pending_calls"]),
            "agent.client_active_calls": str(counters["pending_calls"]),
            "agent.server_active_calls": str(counters["running_calls"]),
            "agent.threads": str(counters["threads"]),
            "agent.unacknowledged": str(counters["unacknowledged"]),
        }

    def _get_device_map(self, worker: WorkerInfo | str) -> dict[torch.device, torch.device]:
        """Return the device of ``worker`` for each device of this worker; {} if the options have no map for it."""
        name = worker.name if isinstance(worker, WorkerInfo) else worker
        return self._agent.options.device_maps.get(name, {})


class TensorPipeAgent(RpcAgent):
    """Starts an agent of nbdist where a program starts torch's TensorPipe agent."""

    def __init__(
        self, store: Any, name: str, rank: int, world_size: int | None, options: RpcBackendOptions, *_: Any, **__: Any
    ) -> None:
        # Ignores torch's further arguments, ``reverse_device_maps`` and ``devices``.
        try:
            self._agent = api.initialize(name, rank, world_size or None, options, store=store)
        except UsageError as error:
            words.refuse_init(error)
        _wrappers[self._agent] = self


_wrappers: weakref.WeakKeyDictionary[Agent, RpcAgent] = weakref.WeakKeyDictionary()  # each agent has only one


def agent_of_torch() -> RpcAgent:
    """Return the wrapper of the current agent, the same at every call."""
    agent = api.current_agent()
    return _wrappers.get(agent) or TensorPipeAgent.around(agent)
