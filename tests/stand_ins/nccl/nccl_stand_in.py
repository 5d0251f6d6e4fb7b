"""Stands in for NCCL and its GPU: workers that preload this module form their process group with it.

Its collectives return at once, as NCCL's do. Whoever needs the result waits for the "GPU" in C, deaf to signals, until
all members have come or the group is aborted; after an abort the wait ends without an error. It says so to the methods
that torch's users wait with: `gpu.item()`, and ``wait`` of a collective with ``async_op=True``.

A file named "never" in the directory ``NCCL_STAND_IN`` makes aborts hang. One named "late" makes them return 4 s after
they have ended the waits; NCCL needs about one. One named "making" makes collectives wait for a communicator that is
never made.
"""

import ctypes
import functools
import os
import threading
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from nbdist.cluster.processes.setup import WorkerSetup

_libc = ctypes.CDLL(None)


class Gpu:
    """A queue of collectives. A mutex, locked while the queue is not empty, is what threads wait for."""

    def __init__(self):
        self.pending = 0
        self.lock = threading.Lock()
        self.c_lock, self.c_unlock = _libc.pthread_mutex_lock, _libc.pthread_mutex_unlock
        self.mutex = ctypes.create_string_buffer(64)

    def begin(self):
        with self.lock:
            self.pending += 1
            if self.pending == 1:
                self.mutex = ctypes.create_string_buffer(64)
                self.c_lock(self.mutex)

    def end(self):
        with self.lock:
            self.pending -= 1
            if self.pending == 0:
                self.c_unlock(self.mutex)

    @property
    def item(self):
        """The function that waits for the queue, as ``t.item()`` waits for the GPU."""
        mutex = self.mutex if self.pending else ctypes.create_string_buffer(64)
        return functools.partial(self.c_lock, mutex)


gpu = Gpu()
stuck = ctypes.create_string_buffer(64)
"""A mutex that nobody unlocks, for a communicator that is not made as long as a member is missing."""


class Done(dist.Work):
    """A collective that was begun: waiting for it orders streams only."""

    def __init__(self):
        super().__init__()
        self.gpu_wait = gpu.item

    def wait(self, timeout=None):
        return True


class StandIn(dist.ProcessGroup):
    """The process group."""

    def __init__(self, store, rank, size):
        super().__init__(rank, size)
        self.store, self.number, self.aborted = store, 0, threading.Event()
        self.wait = _libc.pthread_mutex_lock

    def getBackendName(self):
        return "nccl_stand_in"

    def allreduce(self, tensors, opts=None):
        if self.aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank()}.")
        if Path(os.environ["NCCL_STAND_IN"], "making").exists():
            self.wait(stuck)
            self.wait(stuck)
        number, self.number = self.number, self.number + 1
        gpu.begin()
        threading.Thread(target=self._run, args=(number, tensors[0]), daemon=True).start()
        return Done()

    def _run(self, number, tensor):
        keys = [f"{number} {rank}" for rank in range(self.size())]
        self.store.set(keys[self.rank()], str(float(tensor)))
        while not self.aborted.is_set() and not self._has(keys):
            time.sleep(0.01)
        if not self.aborted.is_set():
            tensor.fill_(sum(float(self.store.get(key)) for key in keys))
        gpu.end()

    def _has(self, keys):
        try:
            return self.store.check(keys)
        except Exception:
            return False

    def abort(self):
        while Path(os.environ["NCCL_STAND_IN"], "never").exists():
            time.sleep(0.05)
        self.aborted.set()
        if Path(os.environ["NCCL_STAND_IN"], "late").exists():
            time.sleep(4)

    def shutdown(self):
        assert self.aborted.is_set(), "NCCL waits here for collectives that may never end"


dist.Backend.register_backend("nccl_stand_in", lambda store, rank, size, timeout: StandIn(store, rank, size))

_decode = WorkerSetup.decode.__func__
WorkerSetup.decode = classmethod(lambda cls, text: msgspec.structs.replace(_decode(cls, text), backend="nccl_stand_in"))
torch.gpu = gpu
