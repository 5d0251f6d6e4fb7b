"""torch's classes of agents, around nbdist's agent.

torch's functions hand out the agent, and its suites ask it for what there is no public function for.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nbdist.channel.contract import Channel
from nbdist.channel.faulty import FaultyChannel
from nbdist.compat.faults import faults
from nbdist.compat.options import FaultyTensorPipeRpcBackendOptions
from nbdist.rpc import api
from nbdist.rpc.agent import Agent
from nbdist.rpc.membership import WorkerInfo
from nbdist.rpc.options import RpcBackendOptions

__all__ = ["FaultyTensorPipeAgent", "RpcAgent", "TensorPipeAgent", "agent_of_torch"]


class RpcAgent:
    """What torch's functions return as the current agent."""

    _agent: Agent

    @classmethod
    def around(cls, agent: Agent) -> RpcAgent:
        """An agent that runs already."""
        self = cls.__new__(cls)
        self._agent = agent
        _wrappers[agent] = self
        return self

    def get_worker_info(self, name: str | int | None = None) -> WorkerInfo:
        """Name and id of a worker; of this one without a name."""
        record = self._agent.me if name is None else self._agent.find(name)
        return WorkerInfo(record.name, record.id)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Name and id of every member, by id."""
        return [WorkerInfo(record.name, record.id) for record in self._agent.members()]

    def get_debug_info(self) -> dict[str, str]:
        """Counters, under torch's names."""
        counters = self._agent.statistics()
        return {
            "agent.thread_pool_size": str(self._agent.options.num_worker_threads),
            "agent.num_pending_requests": str(counters["pending_calls"]),
            "agent.client_active_calls": str(counters["pending_calls"]),
            "agent.server_active_calls": str(counters["running_calls"]),
            "agent.threads": str(counters["threads"]),
            "agent.unacknowledged": str(counters["unacknowledged"]),
        }

    @property
    def is_static_group(self) -> bool:
        """Whether the world is fixed."""
        return self._agent.me.world_size is not None

    def shutdown(self) -> None:
        """End at once."""
        api.finish(self._agent)

    def _get_device_map(self, worker: WorkerInfo | str) -> dict[torch.device, torch.device]:
        name = worker.name if isinstance(worker, WorkerInfo) else worker
        return self._agent.options.device_maps.get(name, {})

    def _get_backend_options(self) -> RpcBackendOptions:
        return self._agent.options


class TensorPipeAgent(RpcAgent):
    """What torch's programs start under the name of TensorPipe; it is nbdist's agent."""

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        world_size: int | None,
        options: RpcBackendOptions,
        reverse_device_maps: Mapping[str, Any] | None = None,
        devices: Sequence[Any] = (),
    ) -> None:
        wrap = self._wrapper(options)
        self._agent = api.initialize(name, rank, world_size or None, options, store=store, wrap=wrap)
        _wrappers[self._agent] = self

    @staticmethod
    def _wrapper(options: RpcBackendOptions) -> Any:
        """What to put around the channel, if anything."""
        return None


class FaultyTensorPipeAgent(TensorPipeAgent):
    """An agent some of whose messages fail or are late."""

    @staticmethod
    def _wrapper(options: RpcBackendOptions) -> Any:
        if not isinstance(options, FaultyTensorPipeRpcBackendOptions):
            wanted = FaultyTensorPipeRpcBackendOptions.__name__
            raise TypeError(f"`rpc_backend_options` must be a `{wanted}`, not {options!r}")
        rules = faults(options.messages_to_fail, options.num_fail_sends, options.messages_to_delay)

        def wrap(channel: Channel) -> Channel:
            return FaultyChannel(channel, rules)

        return wrap


_wrappers: weakref.WeakKeyDictionary[Agent, RpcAgent] = weakref.WeakKeyDictionary()


def agent_of_torch() -> RpcAgent:
    """The current agent, as torch's functions return it; always the same object."""
    agent = api.current_agent()
    return _wrappers.get(agent) or TensorPipeAgent.around(agent)
