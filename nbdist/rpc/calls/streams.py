"""Lets a future carry the CUDA streams on which its value is computed, as torch's futures do.

A thread that completes a future with a tensor on a GPU may have the GPU still compute it, on the thread's current
stream. Another thread has another current stream, and would read the tensor too early::

    set_result(t)          `mark`               an event on the current stream of t's GPU, behind all that computes t
    wait(), value()        `StreamMarks.wait`   the reader's current stream waits for the event; the thread does not

What comes from another process needs no mark: it is complete when it arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["CUDA_IS_BUILT", "StreamMarks", "mark"]

CUDA_IS_BUILT = torch.backends.cuda.is_built()
"""True if this torch can use GPUs. Callers look here first, so that nothing is called where it cannot."""

_LOOKS = 10_000
"""Entries of containers that are looked at: a list of a million numbers has no tensors."""


class StreamMarks:
    """The tensors of a value that are on GPUs, and for each GPU an event behind which they are computed."""

    __slots__ = ("_events", "_tensors")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        """Record an event on the current stream of each GPU on which one of ``tensors`` is; all are on GPUs."""
        self._tensors = tensors
        self._events = []
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            with torch.cuda.device(device):  # an event belongs to the GPU on which it is recorded
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                self._events.append((device, event))

    def wait(self) -> None:
        """Have the calling thread's current streams wait for the events; returns at once. Any thread, any number.

        The tensors' memory is not used again before these streams have done what they are asked to do by then.
        """
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)
        for tensor in self._tensors:
            if tensor.layout is torch.strided:  # torch has no such function for sparse tensors
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


def mark(value: Any) -> StreamMarks | None:
    """Return marks of the streams that compute the tensors in ``value``; None if it has no tensors on GPUs.

    Tensors are looked for in lists, tuples, sets and dicts, among the last 10,000 entries that are reached. Without
    CUDA, this costs one call.
    """
    if not torch.cuda.is_initialized():
        return None
    tensors = [tensor for tensor in _tensors_in(value) if tensor.is_cuda]
    return StreamMarks(tensors) if tensors else None


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value: itself, or those in its containers."""
    seen: set[int] = set()  # a list may contain itself
    left = [value]
    for _ in range(_LOOKS):
        if not left:
            return
        each = left.pop()
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple | set | frozenset | dict) and id(each) not in seen:
            seen.add(id(each))
            left.extend(each.values() if isinstance(each, dict) else each)
