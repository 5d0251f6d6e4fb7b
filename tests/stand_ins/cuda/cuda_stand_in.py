"""Stands in for CUDA in workers that preload this module: as many GPUs as ``CUDA_VISIBLE_DEVICES`` names.

Only what a worker asks of its GPU when it starts is answered; no tensor can be put there. ``CUDA_STAND_IN`` is the
compute capability of all GPUs, such as "6.0".
"""

import contextlib
import os
from types import SimpleNamespace

import torch


def visible():
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


def check(device):
    """Return the name of a device, such as "cuda:1", as the driver has it; raise torch's error if it is not there."""
    index = torch.device(device).index
    if index >= len(visible()):
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    return visible()[index]


torch.cuda.device_count = lambda: len(visible())
torch.cuda.set_device = check
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.cuda.get_arch_list = lambda: ["sm_75", "sm_80", "sm_90", "compute_90"]
torch.cuda.get_device_capability = lambda device: tuple(map(int, os.environ["CUDA_STAND_IN"].split(".")))
torch.cuda.get_device_name = lambda device: f"pretended GPU {check(device)}"
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=check(device), total_memory=1 << 30)
