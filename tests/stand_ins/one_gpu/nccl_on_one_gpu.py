"""Lets workers that share a GPU form their process group with NCCL: workers that preload this module do.

NCCL refuses two members with one GPU if they are on one host. Each worker tells NCCL a host of its own, so NCCL
connects the members by TCP, and aborts as it does between hosts.
"""

import os

import msgspec

from nbdist.cluster.processes.setup import WorkerSetup

_decode = WorkerSetup.decode.__func__


def decode(cls, text):
    """Return the setup of this worker, with NCCL as its backend for tensors on the GPU."""
    os.environ.update(NCCL_HOSTID=f"host-{os.getpid()}", NCCL_IB_DISABLE="1")
    return msgspec.structs.replace(_decode(cls, text), backend="cpu:gloo,cuda:nccl")


WorkerSetup.decode = classmethod(decode)
