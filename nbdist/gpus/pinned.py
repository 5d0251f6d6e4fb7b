"""Calls ``torch.cuda`` for `nbdist.gpus.staging`: pinned memory, a stream of its own, and events."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from nbdist.gpus.order import BUFFERS
from nbdist.signals import DeferredSignals


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return a block in which a GPU is the thread's current one.

    Without it, `torch.cuda.stream` would switch from the current GPU and back to it, which starts CUDA there if the
    thread has not used that GPU: threads that torch knows nothing about begin with GPU 0.
    """
    return torch.cuda.device(device)


def is_capturing() -> bool:
    """Return whether the calling thread's current stream records a CUDA graph, which must not get other copies.

    The current stream is that of the current GPU.
    """
    return torch.cuda.is_current_stream_capturing()


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a new tensor on a GPU for the values of a contiguous one. Raises torch's error if there is no room."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


class PinnedLane:
    """Two pinned buffers, and the copies between them and a GPU. One thread at a time uses it, for one copy at a time.

    torch returns the buffers to its own cache of pinned memory when the object is collected.
    """

    def __init__(self, size: int) -> None:
        """Make buffers of ``size`` bytes each. Raises RuntimeError if the system refuses pinned memory."""
        with torch.inference_mode(False):  # a tensor that is made in that mode could be written to only there
            self.buffers = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(BUFFERS)]
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._stream: torch.cuda.Stream | None = None
        self._events: list[torch.cuda.Event] = []

    def begin(self, on_gpu: torch.Tensor) -> None:
        """Have the copies that follow wait, on the GPU, for what the calling thread's current stream does so far.

        ``on_gpu`` has the memory that they read or write. If it is freed before they are over, after an interrupt,
        torch does not reuse it before.
        """
        device = on_gpu.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        self._stream = stream
        stream.wait_stream(torch.cuda.current_stream(device))
        on_gpu.record_stream(stream)
        self._events = [torch.cuda.Event() for _ in self.buffers]

    def queue(self, buffer: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Ask the GPU to copy bytes, between a buffer and the GPU's memory. Returns at once."""
        with DeferredSignals(), torch.cuda.stream(self._stream):  # Ctrl-C must not leave the thread on this stream
            target.copy_(source, non_blocking=True)
            self._events[buffer].record(self._stream)

    def wait(self, buffer: int) -> None:
        """Wait until the GPU has made the last copy that was queued for a buffer."""
        self._events[buffer].synchronize()

    def finish(self) -> None:
        """Wait until the GPU has made all copies. Raises torch's error if the GPU has failed."""
        if self._stream is not None:
            self._stream.synchronize()
