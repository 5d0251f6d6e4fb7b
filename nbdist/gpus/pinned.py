"""Calls ``torch.cuda`` for `nbdist.gpus.staging`: pinned memory, a stream of its own, and events."""

from __future__ import annotations

import torch

from nbdist.gpus.order import BUFFERS

__all__ = ["PinnedLane", "empty_like", "is_capturing"]


def is_capturing() -> bool:
    """Return whether the calling thread's current stream records a CUDA graph, which must not get other copies."""
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

    def begin(self, device: torch.device) -> None:
        """Have the copies that follow wait, on the GPU, for what the calling thread's current stream does so far."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        self._stream = stream
        stream.wait_stream(torch.cuda.current_stream(device))
        self._events = [torch.cuda.Event() for _ in self.buffers]

    def queue(self, buffer: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Ask the GPU to copy bytes, between a buffer and the GPU's memory. Returns at once."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._events[buffer].record(self._stream)

    def wait(self, buffer: int) -> None:
        """Wait until the GPU has made the last copy that was queued for a buffer."""
        self._events[buffer].synchronize()

    def finish(self) -> None:
        """Wait until the GPU has made all copies. Raises torch's error if the GPU has failed."""
        if self._stream is not None:
            self._stream.synchronize()
