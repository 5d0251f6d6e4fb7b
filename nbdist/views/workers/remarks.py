"""Tells the user, in a line or two after a cluster has started, what they should know and did not ask for."""

from __future__ import annotations

import contextlib

from nbdist.channel import machine
from nbdist.cluster.cluster import Cluster
from nbdist.cluster.output.arranger import grouped, say_names
from nbdist.cluster.processes.setup import AUTO
from nbdist.cluster.worker import gpu
from nbdist.errors import NbdistError


def remarks_on_start(cluster: Cluster) -> list[str]:
    """Return lines about a container's limits, the process group of workers with GPUs, and shared or old GPUs."""
    found = []
    if limited := machine.limits():
        found.append(f"Limited here: the workers may use {limited}.")
    has_gpu = [worker.device.startswith("cuda") for worker in cluster.workers]
    if any(has_gpu) and cluster.spec.backend is None and (backend := cluster.backend) != AUTO:
        found.append(f"The process group uses {_backend_in_words(backend, all(has_gpu))}.")
    if cluster.spec.gpu_memory is None:
        gpus = {worker.name: worker.gpu for worker in cluster.workers if worker.gpu is not None}
        sharers = grouped(gpus, gpus.__getitem__)  # names of workers, by the number of their GPU
        found += [_sharing(number, names) for number, names in sharers.items() if len(names) > 1]
    return found + _old(cluster)


def _backend_in_words(backend: str, all_have_gpus: bool) -> str:
    if backend == "gloo":
        why = "workers share a GPU" if all_have_gpus else "some workers have no GPU"
        return f"gloo, for tensors on GPUs too, because {why}"
    return "nccl for tensors on GPUs and gloo for those on the CPU"


def _old(cluster: Cluster) -> list[str]:
    """Return a line for each kind of GPU that torch's cuDNN does not run on. Asks the workers with GPUs."""
    names = [worker.name for worker in cluster.workers if worker.device.startswith("cuda")]
    lacks: dict[str, str] = {}
    for name, asked in [(name, cluster.agent.call(name, gpu.own_lacks_convolutions)) for name in names]:
        with contextlib.suppress(NbdistError):  # its next cell says that it is lost
            lacks[name] = asked.wait()
    groups = grouped(lacks, lacks.__getitem__)
    return [f"The GPU of {say_names(names)}, {text}." for text, names in groups.items() if text]


def _sharing(number: int, names: list[str]) -> str:
    part = f"{0.9 / len(names):.2f}"
    return (
        f"{say_names(names)} share GPU {number}, and the first to ask gets its memory; "
        f"`%dist_init --gpu-memory {part}` gives each its part."
    )
