"""Reads the facts about a process and its machine: versions, shared memory, open files, ports, GPUs and NCCL."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass

import torch

import nbdist
from nbdist.channel import machine
from nbdist.channel.shared_memory import gpu_memory, mapping
from nbdist.gpus import staging
from nbdist.gpus.support import is_supported, lacks_convolutions
from nbdist.rpc.agent import active_agent

_SHARED_FILES = "/dev/shm"


@dataclass(frozen=True)
class GpuFacts:
    """One GPU that a process may use."""

    index: int
    """The GPU's number, as torch counts it in this process."""
    name: str
    capability: tuple[int, int]
    """The GPU's compute capability, such as (9, 0)."""
    is_supported: bool
    """True if torch has code for GPUs of this capability."""
    unshared: str = ""
    """Why its memory cannot be shared between processes; empty if it can."""
    lacks_convolutions: str = ""
    """The sentence that torch's cuDNN does not run on it; empty if it does."""


@dataclass(frozen=True)
class MachineFacts:
    """The facts about one process and its machine at one moment. Amounts of memory are in bytes."""

    host: str
    nbdist: str
    python: str
    torch: str
    cuda: str
    """The version of CUDA that torch is built for; empty if it is built without CUDA."""
    nccl: str
    """The version of NCCL in torch; empty without one."""
    has_driver: bool
    """True if NVIDIA's driver runs on the machine."""
    gpu_count: int
    """The number of GPUs that torch sees in this process."""
    gpus: tuple[GpuFacts, ...]  # those that were looked at: see `describe_machine`
    unpinned: str
    """Why the process has no pinned memory for tensors that leave its GPU; empty if it has, or needs none."""
    can_share: bool
    """True if large tensors go to processes of the same host through shared memory."""
    memory: int
    """The memory that the process may use: the machine's, or less in a container."""
    memory_left: int
    shared_files_left: int | None
    """The free bytes of ``/dev/shm``; None if there is no such folder."""
    files_open: int
    files_limit: int
    ports: tuple[int, int] | None
    """The first and the last port that the system gives to programs that ask for any; None if it does not tell."""


def describe_machine(*, every_gpu: bool = False) -> MachineFacts:
    """Return the facts about this process and its machine.

    To look at a GPU, torch must start CUDA in the process, which takes hundreds of MB of the GPU's memory. So `gpus` is
    empty in a process that does not use CUDA, unless ``every_gpu``.
    """
    agent = active_agent()
    count = torch.cuda.device_count()
    return MachineFacts(
        host=platform.node(),
        nbdist=nbdist.__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        nccl=_nccl_version(),
        has_driver=machine.has_nvidia_driver(),
        gpu_count=count,
        gpus=_gpus(count) if every_gpu or torch.cuda.is_initialized() else (),
        unpinned=staging.refusal(),
        can_share=mapping.is_available() if agent is None else agent.me.arena is not None,
        memory=machine.memory(),
        memory_left=machine.available_memory(),
        shared_files_left=_shared_files_left(),
        files_open=machine.open_files(),
        files_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        ports=machine.free_ports(),
    )


def _nccl_version() -> str:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return ""
    try:
        found = torch.cuda.nccl.version()
    except (AttributeError, ImportError, RuntimeError):  # torch's, depending on its version and build
        return "of an unknown version"
    return ".".join(map(str, found))


def _gpus(count: int) -> tuple[GpuFacts, ...]:
    # Starts CUDA in this process.
    built = torch.cuda.get_arch_list()
    found = []
    for index in range(count):
        capability = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        unshared = gpu_memory.why_unavailable(index) if torch.version.hip is None else ""  # other drivers are not asked
        has_code = is_supported(capability, built)
        found.append(GpuFacts(index, name, capability, has_code, unshared, lacks_convolutions(index)))
    return tuple(found)


def _shared_files_left() -> int | None:
    try:
        found = os.statvfs(_SHARED_FILES)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
