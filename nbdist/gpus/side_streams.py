"""Lets threads with different current CUDA streams work on the same tensors: they meet at the GPU's default stream.

Several threads run a backward pass: threads of the agent's pool, whose current stream is the default stream, and a
thread of the user's, whose current stream may be another one, a *side stream*. torch's engine orders a call only with
the thread that makes it. So one thread may read what the GPU still computes for another::

    the user's thread, on stream s                a thread of the pool, on the default stream
    computes a gradient
    `publish`: the default stream waits for s
                                                  adds another gradient to it
    `catch_up`: s waits for the default stream
    reads the sum

Both return at once; only the GPU waits, and the default stream never waits for itself. Tensors on the CPU and None
are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def publish(tensors: Iterable[torch.Tensor | None]) -> None:
    """Let the default stream wait for what the thread's current stream computes, on the GPUs of these tensors."""
    for device in _gpus_of(tensors):
        _let_wait(torch.cuda.default_stream(device), torch.cuda.current_stream(device))


def catch_up(tensors: Iterable[torch.Tensor | None]) -> None:
    """Let the thread's current stream wait for the default stream, on the GPUs of these tensors, which it will use.

    torch's allocator then does not reuse their memory before the current stream has finished with them.
    """
    given = list(tensors)  # the loops below go through it more than once
    for device in _gpus_of(given):
        here = torch.cuda.current_stream(device)
        _let_wait(here, torch.cuda.default_stream(device))
        for tensor in given:
            # Also on the default stream: a side stream may have allocated the tensor.
            if tensor is not None and tensor.device == device and tensor.layout is torch.strided:
                tensor.record_stream(here)


def catch_up_everywhere() -> None:
    """Let the thread's current stream of each GPU wait for that GPU's default stream, if this process uses CUDA."""
    if torch.cuda.is_initialized():  # or the calls below would start CUDA
        for number in range(torch.cuda.device_count()):
            _let_wait(torch.cuda.current_stream(number), torch.cuda.default_stream(number))


def _let_wait(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
    if stream != other:
        stream.wait_stream(other)


def _gpus_of(tensors: Iterable[torch.Tensor | None]) -> list[torch.device]:
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda))
