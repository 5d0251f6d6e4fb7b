"""Options of an agent: those of torch's RPC, and those of nbdist."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from nbdist import durations
from nbdist.errors import UsageError

DEFAULT_RPC_TIMEOUT_SEC = 60.0
"""Seconds after which a call without a time limit of its own fails; torch's default."""
DEFAULT_INIT_METHOD = "env://"
DEFAULT_NUM_WORKER_THREADS = 16
UNSET_RPC_TIMEOUT = -1.0
"""The ``timeout`` with which a call takes the agent's default."""
_SMALLEST_LIMIT = 64 * 1024  # bytes; every message that nbdist sends for its own purposes is shorter
_LARGEST_LIMIT = (1 << 63) - 1  # bytes; the largest limit that ZeroMQ accepts
DEFAULT_ARENA_THRESHOLD = 128 * 1024
"""The size in bytes from which a tensor is sent through shared memory."""
DEFAULT_SWITCH_INTERVAL = 0.0001
"""Seconds; Python's own default is 0.005."""

Device = int | str | torch.device


class BackendType(Enum):
    """The backends of RPC. nbdist is the only one, under the name that torch's programs pass to `init_rpc`.

    Example:
        >>> rpc.BackendType.TENSORPIPE
        <BackendType.TENSORPIPE: 'nbdist'>
    """

    TENSORPIPE = "nbdist"


class RpcBackendOptions:
    """Options of `nbdist.rpc.init_rpc`, given by name.

    Args:
        num_worker_threads: how many threads may run functions for other workers at a time. Threads that wait for a
            call of their own do not count.
        rpc_timeout: seconds after which a call without its own time limit fails; no limit if 0, infinite or above 1e8.
        init_method: where the workers meet: ``env://``, ``tcp://host:port`` or ``file:///path``.
        device_maps: for each worker to which tensors are sent, a map from devices here to devices there.
        devices: the devices of this worker that device maps may name; by default all that torch sees.
        secret: a text of at least 16 bytes that all workers share. None for the text in the file that
            ``NBDIST_SECRET_FILE`` names; without it, this user's own secret, which serves workers of one host.
        host: the address at which workers on other hosts reach this one. None for ``NBDIST_HOST``; without it, only
            workers of this host reach it.
        suspect_after: seconds of silence after which a warning names a worker on another host.
        lost_after: seconds of silence after which a worker on another host counts as lost, and its calls fail.
        retries: how often a message that has not arrived is sent again. After that, a call fails with WorkerLost.
        max_message: bytes, at least 64 KiB. A longer message ends the connection to its sender.
        channel: ``"auto"`` takes the fastest way to each worker, ``"zeromq"`` always takes ZeroMQ. None for
            ``NBDIST_CHANNEL``; without it, ``"auto"``.
        arena_bytes: how much memory, in bytes, this agent may use to share large tensors with other workers of its
            host; tensors that do not fit are sent like any other. 0 for none; None for ``NBDIST_ARENA_BYTES``; without
            it, a quarter of the memory that this process may have.
        arena_threshold: a tensor of this many bytes or more is shared. None for ``NBDIST_ARENA_THRESHOLD``; without it,
            128 KiB.
        switch_interval: seconds after which a thread must let another one run Python, see `sys.setswitchinterval`,
            while messages come or calls run here: so a worker whose main thread computes in Python answers soon. At
            other times, with 0, and if it is longer than the interval from before, that one holds.

    Raises:
        UsageError: a value is out of range; the text says which values are allowed.
        TypeError: there is no such option (torch's ``_transports`` and ``_channels`` are ignored), or a time is no
            number.
        RuntimeError: torch does not know a device. Whether this machine has it, and whether ``init_method``, ``secret``
            and ``host`` can be used, only `init_rpc` says, which reads the options; later changes have no effect.

    Example:
        >>> options = rpc.RpcBackendOptions(num_worker_threads=4, rpc_timeout=20)
        >>> options.rpc_timeout
        20.0
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[Device, Device]] | None = None,
        devices: Sequence[Device] | None = None,
        secret: str | bytes | None = None,
        host: str | None = None,
        suspect_after: float = 5.0,
        lost_after: float = 12.0,
        retries: int = 20,
        max_message: int = 1 << 40,
        channel: str | None = None,
        arena_bytes: int | None = None,
        arena_threshold: int | None = None,
        switch_interval: float = DEFAULT_SWITCH_INTERVAL,
        **ignored: Any,
    ) -> None:
        unknown = set(ignored) - {"_transports", "_channels"}
        if unknown:
            raise TypeError(f"RpcBackendOptions has no option {', '.join(sorted(unknown))}")
        if not isinstance(num_worker_threads, int) or num_worker_threads < 1:
            raise UsageError(f"num_worker_threads must be a whole number of at least 1, not {num_worker_threads!r}")
        if not isinstance(max_message, int) or not _SMALLEST_LIMIT <= max_message <= _LARGEST_LIMIT:
            raise UsageError(f"max_message must be {_SMALLEST_LIMIT} to {_LARGEST_LIMIT} bytes, not {max_message!r}")
        if not isinstance(retries, int) or retries < 0:
            raise UsageError(f"retries must be a whole number of at least 0, not {retries!r}")
        rpc_timeout = time_limit(rpc_timeout)
        suspect_after = durations.seconds(suspect_after, "suspect_after")
        lost_after = durations.seconds(lost_after, "lost_after")
        switch_interval = durations.seconds(switch_interval, "switch_interval")
        if not 0 < suspect_after <= lost_after:
            raise UsageError(
                f"suspect_after, {suspect_after!r} s, must be more than 0 and at most lost_after, {lost_after!r} s"
            )
        channel = channel or os.environ.get("NBDIST_CHANNEL") or "auto"
        if channel not in ("auto", "zeromq"):
            raise UsageError(f'channel must be "auto" or "zeromq", not {channel!r}')
        if switch_interval < 0:
            raise UsageError(f"switch_interval must be 0 (leave Python's own) or more seconds, not {switch_interval!r}")
        self.num_worker_threads = num_worker_threads
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        self.devices = [torch.device(device) for device in devices or ()]
        self.secret = secret
        self.host = host
        self.suspect_after = suspect_after
        self.lost_after = lost_after
        self.retries = retries
        self.max_message = max_message
        self.channel = channel
        self.arena_bytes = _from_environment(arena_bytes, "arena_bytes")
        threshold = _from_environment(arena_threshold, "arena_threshold")
        self.arena_threshold = DEFAULT_ARENA_THRESHOLD if threshold is None else threshold
        self.switch_interval = switch_interval
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Set the devices of worker ``to`` on which tensors from devices of this worker arrive.

        Adds to earlier maps for this worker. Call it before `init_rpc`, which checks that workers and devices exist;
        later, it has no effect. Raises UsageError if two devices here would share one there, RuntimeError if torch does
        not know a device; the earlier maps stay.

        Args:
            to: the name of the worker to which tensors are sent.
            device_map: from devices here to devices there.

        Example:
            >>> options = rpc.RpcBackendOptions()
            >>> options.set_device_map("worker1", {"cuda:0": "cuda:1"})
        """
        known = dict(self.device_maps.get(to, {}))
        known |= {torch.device(ours): torch.device(theirs) for ours, theirs in device_map.items()}
        if len(set(known.values())) != len(known):
            raise UsageError(f"two devices here would share one of {to!r}, which a device map must not do: {known}")
        self.device_maps[to] = known

    @property
    def device_maps_by_name(self) -> dict[str, dict[str, str]]:
        """The device maps, with the names of devices, as they go into this worker's `Record`."""
        return {
            to: {str(ours): str(theirs) for ours, theirs in device_map.items()}
            for to, device_map in self.device_maps.items()
        }

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Set the ``devices`` of this worker that device maps may name, instead of all that torch sees.

        Replaces earlier ones; an empty list means all. Raises RuntimeError if torch does not know a device; `init_rpc`
        raises UsageError for one that this machine lacks. After `init_rpc`, this has no effect.
        """
        self.devices = [torch.device(device) for device in devices]


def time_limit(rpc_timeout: float) -> float:
    """Return ``rpc_timeout``, the default time limit of calls in seconds, as a float; 0 for no limit.

    Raises UsageError if it is negative or NaN, and TypeError if it is no number.
    """
    found = durations.limit(rpc_timeout, "rpc_timeout")
    if found < 0:
        raise UsageError(f"rpc_timeout must be 0 (no limit) or more seconds, not {found:g}")
    return found


def _from_environment(value: int | None, name: str) -> int | None:
    # The given value, else that of ``NBDIST_NAME``; None if neither is set.
    said = (os.environ.get(f"NBDIST_{name.upper()}") or None) if value is None else value
    if said is None:
        return None
    try:
        number = int(said) if isinstance(said, int | str) else -1
    except ValueError:
        number = -1
    if number < 0:
        raise UsageError(f"{name} must be a whole number of bytes, at least 0, not {said!r}")
    return number


TensorPipeRpcBackendOptions = RpcBackendOptions
"""The name of `RpcBackendOptions` in torch's programs."""
