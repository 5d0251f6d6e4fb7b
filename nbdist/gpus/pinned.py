"""Calls ``torch.cuda`` for `nbdist.gpus.staging`: pinned memory, a stream of its own, and events."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from nbdist.gpus.order import BUFFERS
from nbdist.signals import DeferredSignals


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return a block in which a GPU is the thread's current one."""
    # `torch.cuda.stream` switches back to the GPU that was current before. If the thread has not used that GPU, this
    # starts CUDA there, and a thread that torch knows nothing about begins with GPU 0.
    return torch.cuda.device(device)


def is_capturing() -> bool:
    """Return whether the thread's stream of the current GPU records a CUDA graph, which must not get other copies."""
    return torch.cuda.is_current_stream_capturing()


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a new tensor on a GPU for the values of a contiguous one. Raises torch's error if there is no room."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


class PinnedLane:
    """Two pinned buffers, and the copies between them and a GPU. One thread uses them at a time, for one copy."""

    # ``tests/wire/test_staging.py`` has a stand-in with these methods.

    def __init__(self, size: int) -> None:
        """Make buffers of ``size`` bytes each. Raises RuntimeError if the system refuses pinned memory."""
        with torch.inference_mode(False):  # a tensor that is made in that mode could be written to only there
            # torch puts the memory into its own cache when the lane is collected.
            self.buffers = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(BUFFERS)]
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._stream: torch.cuda.Stream | None = None
        self._events: list[torch.cuda.Event] = []

    def begin(self, on_gpu: torch.Tensor) -> None:
        """Have the copies that follow wait, on the GPU, for what the calling thread's current stream does so far."""
        device = on_gpu.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        self._stream = stream
        stream.wait_stream(torch.cuda.current_stream(device))
        # If an interrupt frees the tensor early, torch does not reuse its memory before the copies are over.
        on_gpu.record_stream(stream)
        # New ones: an event belongs to the GPU on which it was recorded first, and the last copy may have used another.
        self._events = [torch.cuda.Event() for _ in self.buffers]

    def queue(self, buffer: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Ask the GPU to copy bytes, between a buffer and the GPU's memory. Returns at once."""
        with DeferredSignals(), torch.cuda.stream(self._stream):  # Ctrl-C must not leave the thread on this stream
            target.copy_(source, non_blocking=True)
            self._events[buffer].record(self._stream)

    def wait(self, buffer: int) -> None:
        """Wait for the last copy that was queued for a buffer."""
        self._events[buffer].synchronize()

    def finish(self) -> None:
        """Wait for all copies. Raises torch's error if the GPU has failed."""
        if self._stream is not None:  # else `begin` has failed
            self._stream.synchronize()
