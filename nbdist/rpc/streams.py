"""Lets a future carry the CUDA streams on which its value is computed, as torch's futures do.

A thread may complete a future with a tensor while the GPU still computes the tensor, on the thread's current stream.
Another thread may have another current stream, and would read the tensor too early::

    set_result(t)          `mark`               records an event on the current stream of t's GPU, behind all kernels
                                                that compute t
    wait(), value()        `StreamMarks.wait`   the reader's current stream waits for the event; the thread does not

A value from another process needs no mark: it is complete when it arrives.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

_LOOKS = 10_000  # the most objects that `mark` looks at: a list of a million numbers most likely has no tensors


class StreamMarks:
    """The tensors of a value that are on GPUs, and for each GPU an event: when it has happened, they are computed."""

    __slots__ = ("_events", "_tensors")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        # Weak, because the owner of an RRef may take the tensors out of its value.
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._events = []
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            with torch.cuda.device(device):  # an event belongs to the GPU on which it is recorded
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                self._events.append((device, event))

    def wait(self) -> None:
        """Let the calling thread's current streams wait for the events. Returns at once. Any thread may call this."""
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)
        # torch's allocator must not reuse the memory before these streams have finished the work that is queued on them
        # when the tensors are freed.
        for reference in self._tensors:
            tensor = reference()
            if tensor is not None and tensor.layout is torch.strided:  # torch has no `record_stream` for sparse tensors
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


def mark(value: Any) -> StreamMarks | None:
    """Return marks of the streams that compute the tensors in ``value``; None if it has no tensors on GPUs."""
    if not torch.cuda.is_initialized():
        return None
    tensors = [tensor for tensor in _tensors_in(value) if tensor.is_cuda]
    return StreamMarks(tensors) if tensors else None


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
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
