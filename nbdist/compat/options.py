"""Defines torch's class of options, on top of nbdist's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nbdist.rpc.options import DEFAULT_RPC_TIMEOUT_SEC, RpcBackendOptions


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Takes the options of torch's TensorPipe backend, and nbdist's own. Transports and channels are ignored."""

    def __init__(self, *, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, **options: Any) -> None:
        if not isinstance(rpc_timeout, int | float):
            raise TypeError(f"incompatible constructor arguments: {rpc_timeout!r} is not a number of seconds")
        super().__init__(rpc_timeout=rpc_timeout, **options)

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Set the devices of worker ``to`` on which tensors arrive, as `RpcBackendOptions` does, with torch's checks.

        Raises ValueError, with torch's text, if a device here is mapped to another device already. `init_rpc` refuses
        two devices here that share one there.
        """
        known = dict(self.device_maps.get(to, {}))
        for ours, theirs in device_map.items():
            here, there = torch.device(ours), torch.device(theirs)
            if known.get(here, there) != there:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {here} to {there} and {known[here]}"
                )
            known[here] = there
        self.device_maps[to] = known
