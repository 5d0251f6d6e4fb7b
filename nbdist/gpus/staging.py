"""Copies large tensors between GPUs and the host's memory, in chunks, by way of pinned memory.

A GPU copies to and from pinned memory by itself, quickly, and while the processor does something else. So a tensor that
leaves a GPU goes through two pinned buffers (`nbdist.gpus.order`): the GPU fills one while the processor copies the
other to where the tensor goes, which is shared memory or a frame. A tensor that arrives goes the same way back.

The GPU copies on a stream of its own, after what the calling thread's current stream had to do. The calling thread
waits for the copy, as it does in ``tensor.cpu()``; no other thread waits.

Shared memory itself is not pinned. nbdist frees parts of it in the middle of a segment (`Mapping.empty`); the GPU would
go on to use the old pages, which no process sees any more. Pinning it would also take longer than a copy for each
process that maps it, and frames would still have to be copied.

One copy has the buffers for itself. There are `_MOST_LANES` pairs of buffers in a process at most: the copies of
further threads, small copies, and all copies of a process that gets no pinned memory are torch's own, which wait for
the whole tensor at once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch

from nbdist.amounts import size
from nbdist.errors import NbdistError
from nbdist.gpus import order, pinned
from nbdist.gpus.pinned import PinnedLane
from nbdist.large_memory import with_large_pages

# Bytes of one buffer: the processor copies them in about 0.4 ms, and asking the GPU for a copy takes about 0.02 ms.
CHUNK_BYTES = 4 << 20
STAGED_BYTES = order.BUFFERS * CHUNK_BYTES  # the smallest tensor copied in chunks: one chunk overlaps with nothing
_MOST_LANES = 4  # pairs of buffers in a process: 32 MiB of pinned memory
# Copies that may fail in turn: an error may be another thread's, such as one that records a CUDA graph.
_MOST_FAILURES = 3

_Steps = Callable[[int, int], Iterator[order.CopyStep]]  # `order.from_gpu` or `order.to_gpu`

_log = logging.getLogger("nbdist.gpus")


class CopyLanes:
    """The lanes of this process. Any thread may call the methods, at any moment: none of them takes a lock.

    ::

        permit ── `take` makes a lane ──> in use ── `put_back` ──> free ── `take` ──> in use
                                            └── collected, or `clear` of a free one ──> permit
    """

    def __init__(self, make: type[PinnedLane] = PinnedLane) -> None:
        self.refused = ""  # torch's words; empty if this process has pinned memory, or has not asked yet
        self.staged = 0  # bytes that went through lanes; not exact if several threads copy at once
        self._make = make
        self._failures = 0  # copies that have failed since the last one that did not
        self._permits = deque(range(_MOST_LANES))
        self._free: deque[PinnedLane] = deque()

    @property
    def pinned(self) -> int:
        """The bytes of pinned memory that lanes hold."""
        return (_MOST_LANES - len(self._permits)) * STAGED_BYTES

    def take(self) -> PinnedLane | None:
        """Return a lane that nobody uses; None if there are as many as there may be, or the system refuses one.

        After the first refusal, this process asks for no pinned memory any more.
        """
        if self.refused:
            return None
        try:
            # No look at the length before it: another thread may pop in between.
            return self._free.pop()
        except IndexError:
            pass
        try:
            permit = self._permits.pop()
        except IndexError:
            return None
        try:
            lane = self._make(CHUNK_BYTES)
            # The callback runs wherever garbage is collected, even in here: a lock could be held by this very thread.
            weakref.finalize(lane, self._permits.append, permit).atexit = False
            return lane
        except BaseException as error:  # also Ctrl-C: a permit that does not come back is lost for ever
            self._permits.append(permit)
            if not isinstance(error, RuntimeError):
                raise
            self.refuse(error)
            return None

    def put_back(self, lane: PinnedLane) -> None:
        """Take back a lane after a copy, none of whose steps is under way."""
        self._failures = 0
        self._free.append(lane)

    def failed(self, error: Exception) -> None:
        """Record that a copy has failed; after `_MOST_FAILURES` in turn, use no pinned memory any more."""
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
            self.refuse(error)

    def clear(self) -> None:
        """Drop the lanes that nobody uses."""
        self._free.clear()

    def refuse(self, error: Exception) -> None:
        """Use no pinned memory from now on, because of an error; log it, once."""
        if not self.refused:
            self.refused = str(error).partition("\n")[0] or type(error).__name__
            _log.warning(
                "large tensors go between the GPU and the host without pinned memory, more slowly: %s", self.refused
            )
        self.clear()

    def forked(self) -> None:
        """Keep the parent's lanes for ever, in a forked process: to free pinned memory, torch would use CUDA there."""
        for lane in self._free:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(lane))


process_lanes = CopyLanes()
"""The lanes of this process."""


def _after_fork() -> None:
    global process_lanes
    process_lanes.forked()
    process_lanes = CopyLanes()


os.register_at_fork(after_in_child=_after_fork)


def to_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor of bytes on a GPU to one on the CPU of the same length, after what the thread's stream does.

    Returns when ``target`` is complete.
    """
    if source.numel() < STAGED_BYTES or not _copied(order.from_gpu, source, target):
        target.copy_(source)


def fresh_host_copy(source: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU of a tensor of bytes on a GPU, in memory of its own, after what the stream does."""
    if source.numel() < STAGED_BYTES:
        return source.cpu()
    target = torch.empty(source.numel(), dtype=torch.uint8, device="cpu")
    with_large_pages(target.data_ptr(), target.numel())
    to_host(source, target)
    return target


def to_gpu(tensor: torch.Tensor, device: str) -> torch.Tensor | None:
    """Return a copy of a large CPU tensor on a GPU; None for any other tensor or device, which torch should move.

    The copy has no history. It is complete when this returns, so any thread may use it on any stream. Raises torch's
    error if the GPU has no room for it.
    """
    # The copy of a tensor that requires grad must have a history, so torch makes it.
    if tensor.nbytes < STAGED_BYTES or tensor.requires_grad or not tensor.is_cpu or not tensor.is_contiguous():
        return None
    if tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj()):
        return None  # its bytes are not its values
    there = torch.device(device)
    if there.type != "cuda":
        return None
    moved = pinned.empty_like(tensor, there)
    on_gpu, on_host = _bytes_of(moved), _bytes_of(tensor)
    if not _copied(order.to_gpu, on_gpu, on_host):
        on_gpu.copy_(on_host)
    return moved


def _copied(steps: _Steps, on_gpu: torch.Tensor, on_host: torch.Tensor) -> bool:
    """Copy bytes between a GPU and the host in these steps; return False if torch should copy all of them instead."""
    # When this returns or raises an error, no copy is under way, unless the GPU has failed.
    lanes = process_lanes  # a child's fork replaces them
    try:
        with pinned.on(on_gpu.device):
            if pinned.is_capturing() or (lane := lanes.take()) is None:
                return False
            try:
                lane.begin(on_gpu)
                _carry_out(lane, steps, on_gpu, on_host)
            finally:  # after Ctrl-C, too: both memories may be used for something else at once
                lane.finish()
    except (RuntimeError, AttributeError, TypeError) as error:
        if isinstance(error, NbdistError) or not _comes_from_torch(error):
            raise  # another thread has stopped this one, because a worker is lost; or it is from a signal's handler
        lanes.failed(error)
        return False  # if the GPU has failed, torch's own copy says so again
    # Only after a whole copy. After any error the lane is dropped: nobody knows what its buffers hold.
    lanes.put_back(lane)
    lanes.staged += on_gpu.numel()
    return True


def _comes_from_torch(error: Exception) -> bool:
    """Return whether torch raised an error, rather than another thread or a signal's handler during a copy."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith(("torch.", "nbdist.gpus."))


def _carry_out(lane: PinnedLane, steps: _Steps, on_gpu: torch.Tensor, on_host: torch.Tensor) -> None:
    """Carry out the steps of a copy; those of `order.to_gpu` may leave the last copies under way."""
    leaves_gpu = steps is order.from_gpu
    for act, buffer, start, end in steps(on_gpu.numel(), CHUNK_BYTES):
        between = lane.buffers[buffer][: end - start]
        if act == "wait":
            lane.wait(buffer)
        elif act == "queue":
            there = on_gpu[start:end]
            lane.queue(buffer, *((between, there) if leaves_gpu else (there, between)))
        elif act == "drain":
            on_host[start:end].copy_(between)
        else:
            between.copy_(on_host[start:end])


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a tensor that shares its memory."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), begin, (tensor.nbytes,), (1,))


def free() -> None:
    """Give the pinned memory that is not in use now back to torch's cache. An agent calls this when it closes."""
    process_lanes.clear()


def statistics() -> dict[str, int]:
    """Return counters of this process: bytes of pinned memory, and bytes that were copied by way of it."""
    return {"pinned_bytes": process_lanes.pinned, "staged_bytes": process_lanes.staged}


def refusal() -> str:
    """Return why this process uses no pinned memory; empty if it uses some, or has not needed any yet."""
    return process_lanes.refused


def describe() -> str:
    """Return in words how large tensors go between GPUs and the host in this process, for `nbdist.doctor`."""
    if process_lanes.refused:
        return f"through ordinary memory of the host, as pinned memory is refused: {process_lanes.refused}"
    return f"through pinned memory of the host, {size(CHUNK_BYTES)} at a time"
