"""Says on which device of the receiver each tensor of a message arrives (`Devices`).

============================ ========================================================================
a tensor's device here       the receiver's device
============================ ========================================================================
a device in a device map     the mapped device (`nbdist.rpc.RpcBackendOptions.set_device_map`)
the CPU                      the CPU
a GPU, sent to itself        the same GPU
a GPU, within a cluster      the receiver's own: a worker's GPU, or the CPU for the notebook
a GPU, anywhere else         none: the tensor cannot be sent
============================ ========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from nbdist.errors import EncodeError

SAME = "same"  # a value of `Devices.own`, for messages of a worker to itself: each tensor arrives on its own device


@dataclass(frozen=True, slots=True)
class Devices:
    """Maps the devices of this worker to those of one receiver."""

    receiver: str = ""  # the receiver's name, for the error
    # The device map: the receiver's device for devices here, such as ``{"cuda:0": "cuda:1"}``.
    mapped: Mapping[str, str] = field(default_factory=dict)
    # The receiver's device for a GPU that the map lacks; `SAME`, or empty if such a tensor cannot be sent.
    own: str = ""
    results: bool = False  # True if the tensors are part of a result, for the error

    leave_cpu: bool = field(init=False)  # True if CPU tensors arrive on the CPU: no device map sends them elsewhere

    def __post_init__(self) -> None:
        # Here, once: each message needs it.
        object.__setattr__(self, "leave_cpu", self.mapped.get("cpu", "cpu") == "cpu")

    def of(self, device: torch.device) -> str | None:
        """Return the receiver's device for a tensor on ``device``; None means the CPU. May raise EncodeError."""
        name = str(device)
        if (there := self.mapped.get(name)) is not None:
            return there
        if device.type == "cpu":
            return None
        if self.own:
            return name if self.own == SAME else self.own
        receiver = self.receiver or "the other worker"
        told = (
            f"the options of {receiver}, which made the call, set_device_map(THIS WORKER, {{DEVICE THERE: '{name}'}})"
            if self.results
            else f"the options of this worker set_device_map({receiver!r}, {{'{name}': DEVICE THERE}})"
        )
        error = EncodeError(
            f"cannot be sent: a tensor is on {name}, and no device map says where it goes on {receiver}. Send "
            f"tensor.cpu(); or before init_rpc give {told}"
        )
        error.unmapped = "result" if self.results else "argument"
        raise error


CPU_ONLY = Devices()  # for an unknown receiver: tensors on GPUs cannot be sent to it
