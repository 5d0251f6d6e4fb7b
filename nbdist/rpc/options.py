"""What can be set when an agent starts: torch's options, and ours."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nbdist import durations
from nbdist.errors import UsageError

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "UNSET_RPC_TIMEOUT",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "time_limit",
]

DEFAULT_RPC_TIMEOUT_SEC = 60.0
DEFAULT_INIT_METHOD = "env://"
DEFAULT_NUM_WORKER_THREADS = 16
UNSET_RPC_TIMEOUT = -1.0
_LEAST_MESSAGE = 64 * 1024
"""Bytes within which every message lies that nbdist sends of itself."""
_MOST_MESSAGE = (1 << 63) - 1
"""What ZeroMQ can be told; far more than any machine has memory for."""
DEFAULT_ARENA_THRESHOLD = 128 * 1024
DEFAULT_SWITCH_INTERVAL = 0.0001

Device = int | str | torch.device


class RpcBackendOptions:
    """Options of `nbdist.rpc.init_rpc`.

    ``num_worker_threads``
        how many threads may run functions for others at a time; those that wait for a nested call do not count.
    ``rpc_timeout``
        seconds after which a call fails, unless it says otherwise; 0 for never, and so is more than 1e8 or infinity.
    ``init_method``
        where the members meet: ``env://``, ``tcp://host:port`` or ``file:///path``.
    ``device_maps``
        for each callee, which of its devices a tensor on one of ours becomes.
    ``secret``
        what all members share; else ``NBDIST_SECRET_FILE`` names a file with it, else it is this user's own
        (on one host). At least 16 bytes.
    ``host``
        the address to listen at for members on other hosts; else ``NBDIST_HOST``, else this host only.
    ``suspect_after``, ``lost_after``
        seconds of silence after which a member on another host is reported, and given up.
    ``retries``
        how often a control message is sent again before it is given up.
    ``max_message``
        bytes, from 64 KiB on; a longer message from another member ends its connection.
    ``channel``
        ``"auto"`` takes the shortest way to each member; ``"zeromq"`` takes ZeroMQ also where there is a shorter one.
        Else ``NBDIST_CHANNEL`` says it.
    ``arena_bytes``
        the most memory, in bytes, in which this agent shares large tensors with others on its host; what finds no
        room there is sent as anything else is. 0 for none; else ``NBDIST_ARENA_BYTES`` says it, or it is a quarter
        of the memory there is.
    ``arena_threshold``
        bytes from which a tensor is shared. Else ``NBDIST_ARENA_THRESHOLD`` says it.
    ``switch_interval``
        seconds that a thread of this process may run Python while another wants to, as by `sys.setswitchinterval`,
        for as long as the agent lives; so that calls are answered soon though the main thread is busy. 0 leaves it.
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
            raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
        if not isinstance(num_worker_threads, int) or num_worker_threads < 1:
            raise UsageError(f"num_worker_threads must be a whole number from 1, not {num_worker_threads!r}")
        if not isinstance(max_message, int) or not _LEAST_MESSAGE <= max_message <= _MOST_MESSAGE:
            raise UsageError(f"max_message must be a number of bytes from {_LEAST_MESSAGE} on, not {max_message!r}")
        if not isinstance(retries, int) or retries < 0:
            raise UsageError(f"retries must be a whole number from 0, not {retries!r}")
        rpc_timeout = time_limit(rpc_timeout)
        suspect_after = durations.seconds(suspect_after, "suspect_after")
        lost_after = durations.seconds(lost_after, "lost_after")
        switch_interval = durations.seconds(switch_interval, "switch_interval")
        if not 0 < suspect_after <= lost_after:
            raise UsageError(f"0 < suspect_after <= lost_after must hold, not {suspect_after!r} and {lost_after!r}")
        channel = channel or os.environ.get("NBDIST_CHANNEL") or "auto"
        if channel not in ("auto", "zeromq"):
            raise UsageError(f'channel must be "auto" or "zeromq", not {channel!r}')
        if switch_interval < 0:
            raise UsageError(f"switch_interval must be 0 (as it is) or more, not {switch_interval!r}")
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
        """Say which of ``to``'s devices a tensor on one of ours becomes when it is sent there."""
        known = self.device_maps.setdefault(to, {})
        for ours, theirs in device_map.items():
            known[torch.device(ours)] = torch.device(theirs)
        if len(set(known.values())) != len(known):
            del self.device_maps[to]
            raise UsageError(f"the device map for {to!r} must be one to one, not {known}")

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Name the local devices that calls use; kept for torch's programs, nothing here needs it."""
        self.devices = [torch.device(device) for device in devices]


def time_limit(rpc_timeout: float) -> float:
    """Return ``rpc_timeout``, the default time limit of calls in seconds, if it can be one; 0 is for none."""
    found = durations.limit(rpc_timeout, "rpc_timeout")
    if found < 0:
        raise UsageError(f"rpc_timeout must be 0 (never) or more, not {found:g}")
    return found


def _from_environment(value: int | None, name: str) -> int | None:
    """An option that is a number of bytes, from 0 on; None where nobody says it."""
    said = os.environ.get(f"NBDIST_{name.upper()}") if value is None else value
    try:
        number = int(said) if said else said
    except ValueError:
        number = -1
    if isinstance(number, str) or (number is not None and number < 0):
        raise UsageError(f"{name} must be a number of bytes, from 0 on, not {said!r}")
    return number


TensorPipeRpcBackendOptions = RpcBackendOptions
"""The same thing, for programs that say it so."""
