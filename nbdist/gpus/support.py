"""Tells which GPUs the installed torch, and the cuDNN in it, has code for."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

# An entry of torch's list of architectures, such as "sm_90a": its kind, and the two numbers of the capability.
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)")
_CUDNN_DROPS = 91100, (7, 5)  # from this version of cuDNN on, it needs a GPU of this capability or a later one


def is_supported(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Return whether a torch that is built for these architectures runs on a GPU of this compute capability.

    Code for "sm_86" runs on 8.6 and on later minor versions. Code for "compute_90" is compiled for any later GPU when
    it is loaded. With an empty list, the answer is True.
    """
    found = [match for each in built if (match := _ARCHITECTURE.match(each))]
    for kind, major, minor in (match.groups() for match in found):
        version = int(major), int(minor)
        if version <= capability and (kind == "compute" or version[0] == capability[0]):
            return True
    return not found


def lacks_convolutions(device: int | str) -> str:
    """Return a sentence that says that torch's cuDNN does not run on a GPU; empty if it does, or torch has none."""
    since, oldest = _CUDNN_DROPS
    capability = torch.cuda.get_device_capability(device)
    if capability >= oldest or torch.version.hip is not None:
        return ""
    version = torch.backends.cudnn.version() or 0
    if version < since:
        return ""
    return (
        f"a {torch.cuda.get_device_name(device)}, runs no convolutions: its compute capability is "
        f"{capability[0]}.{capability[1]}, and torch's cuDNN {version // 10000}.{version // 100 % 100} needs "
        f"{oldest[0]}.{oldest[1]}. After `torch.backends.cudnn.enabled = False` torch uses slower ones of its own"
    )
